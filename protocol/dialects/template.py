"""A chat template, and the forms that are derived from it once: the template's own text around each kind of
item.

It knows Jinja and the message shapes that chat templates take; nothing of turns, tools' names or parsing. A
template is code from a model's folder, so it runs in a sandbox.

Strategy: render with sentinels where texts go, and split at them. What a message adds is what its rendering
has more than the rendering without it (`delta`); a template that writes its history anew when a message
follows has no such difference and is refused. After that, rendering an item is putting texts into its form:
no Jinja runs for it. That a form holds for all texts and histories is not assumed from one rendering: see
proof.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.dialects.base import Fragment
from protocol.dialects.tokens import DialectError

ChatMessage = dict[str, Any]
"""One message in the shape that chat templates take (`role`, `content`, `tool_calls`, …)."""


class ChatTemplate:
    """A compiled chat template. `variables` are what it is given beside messages: the spellings of special
    tokens.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises DialectError if the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _refuse
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DialectError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The whole conversation as one string. Raises DialectError if the template refuses it."""
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            kinds = [message["role"] for message in messages]
            raise DialectError(f"the chat template refuses a conversation of {kinds}: {error}") from error

    def delta(self, history: Sequence[ChatMessage], message: ChatMessage) -> str:
        """What `message` adds after `history`. Raises DialectError if it changes how the history is
        written.
        """
        before = self.render(history)
        after = self.render([*history, message])
        if not after.startswith(before):
            raise DialectError(
                f"the chat template is not append-only: a message of {message['role']} changes its history"
            )
        return after[len(before) :]


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates write it: Python's separators, characters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True, slots=True)
class Form:
    """The template's own text around the texts of one kind of item: one piece more than there are texts."""

    pieces: tuple[Fragment, ...]

    def fill(self, *contents: str | Fragment) -> Fragment:
        """The fragment with these texts, or fragments, in their places."""
        fragment = list(self.pieces[0])
        for content, piece in zip(contents, self.pieces[1:], strict=True):
            fragment += [content] if isinstance(content, str) else content
            fragment += piece
        return fragment


@dataclass(frozen=True, slots=True)
class Forms:
    """All that a ChatML-like template writes by itself."""

    openings: dict[tuple[bool, bool], Form]  # by (has instructions, has tools)
    tool_separator: str
    user: Form
    system: Form
    tool_output: Form
    turn: Form  # around what the model says in one turn
    reasoning: Form
    call: Form  # name, arguments
    custom_call: Form  # name, input
    separator: str  # between a text or a call and what follows it in the same turn


_TEXT, _NAME, _BODY = "sentinel-text", "sentinel-name", "sentinel-body"
_HISTORY: list[ChatMessage] = [{"role": "user", "content": "sentinel-history"}]
_TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("sentinel-tool-one", "sentinel-tool-two")
)


def derive_forms(template: ChatTemplate, split: Callable[[str], Fragment]) -> Forms:
    """The forms of a template; `split` makes a fragment of its own text.

    Raises DialectError if texts are missing, doubled or changed, or if the template is not append-only.
    """

    def form(*pieces: str) -> Form:
        return Form(tuple(map(split, pieces)))

    def pieces_of(message: ChatMessage, *sentinels: str) -> list[str]:
        return _cut(template.delta(_HISTORY, message), sentinels)

    def said(**message: Any) -> ChatMessage:
        return {"role": "assistant", "content": "", **message}

    user = pieces_of({"role": "user", "content": _TEXT}, _TEXT)
    system = pieces_of({"role": "system", "content": _TEXT}, _TEXT)
    tool_output = pieces_of({"role": "tool", "content": _TEXT}, _TEXT)
    turn = pieces_of(said(content=_TEXT), _TEXT)
    start, end = turn

    def within_turn(pieces: list[str]) -> list[str]:
        if not (pieces[0].startswith(start) and pieces[-1].endswith(end)):
            raise DialectError(
                "the chat template writes a turn differently when it has calls or reasoning in it"
            )
        return [pieces[0][len(start) :], *pieces[1:-1], pieces[-1][: len(pieces[-1]) - len(end)]]

    function = {"type": "function", "function": {"name": _NAME, "arguments": _BODY}}
    custom = {"type": "custom", "custom": {"name": _NAME, "input": _BODY}}
    call = within_turn(pieces_of(said(tool_calls=[function]), _NAME, _BODY))
    custom_call = within_turn(pieces_of(said(tool_calls=[custom]), _NAME, _BODY))
    reasoning = within_turn(pieces_of(said(content=_BODY, reasoning_content=_TEXT), _TEXT, _BODY))
    text_then_call = within_turn(pieces_of(said(content=_TEXT, tool_calls=[function]), _TEXT, _NAME, _BODY))

    openings, tool_separator = _derive_openings(template, _BODY.join(user))
    return Forms(
        openings={given: form(*pieces) for given, pieces in openings.items()},
        tool_separator=tool_separator,
        user=form(*user),
        system=form(*system),
        tool_output=form(*tool_output),
        turn=form(*turn),
        reasoning=form(*reasoning[:2]),
        call=form(*call),
        custom_call=form(*custom_call),
        separator=text_then_call[1].removesuffix(call[0]),
    )


def _derive_openings(
    template: ChatTemplate, user_message: str
) -> tuple[dict[tuple[bool, bool], list[str]], str]:
    """What stands before the first message, around instructions and tools; and what separates tools."""
    openings: dict[tuple[bool, bool], list[str]] = {}
    tool_separator = ""
    for has_instructions, has_tools in product((False, True), repeat=2):
        head = [{"role": "system", "content": _TEXT}] if has_instructions else []
        tools = _TOOLS if has_tools else ()
        rendered = template.render([*head, {"role": "user", "content": _BODY}], tools)
        if not rendered.endswith(user_message):
            raise DialectError("the chat template writes the first user message differently from later ones")
        sentinels = [*([_TEXT] if has_instructions else []), *map(to_json, tools)]
        pieces = _cut(rendered.removesuffix(user_message), sentinels)
        if has_tools:
            tool_separator = pieces.pop(-2)
        openings[has_instructions, has_tools] = pieces
    return openings, tool_separator


def _cut(rendered: str, sentinels: Sequence[str]) -> list[str]:
    """`rendered` cut at the sentinels, each of which must be in it once and in this order."""
    pieces: list[str] = []
    rest = rendered
    for sentinel in sentinels:
        before, found, rest = rest.partition(sentinel)
        if not found or sentinel in rest:
            raise DialectError(f"the chat template does not write {sentinel!r} once, in order and as it is")
        pieces.append(before)
    return [*pieces, rest]
