"""The ChatML dialect with Hermes calls: what the embedded model speaks, and families that write turns like
it.

It knows which item is written in which form and what one turn may hold; the forms themselves come from the
model's chat template (template.py), ids and bytes from its tokenizer (tokens.py), and sampled tokens are read
by parser.py.

Strategy: a conversation is a concatenation of forms filled with texts, and no item's writing depends on its
neighbours, except that neighbouring assistant items share one turn. Inside a turn the parts stand in the
order in which they were said, which the template itself cannot express (it puts all calls last) but the model
does.

Tools of a namespace are called `namespace.name` in the prompt; the parser gives both parts back.
`tool_choice` changes the prompt in one case only: for "none" no tool is written, so a client that changes to
or from "none" changes its prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from protocol.dialects.base import CallStarted, Fragment, RenderingError
from protocol.dialects.parser import MAX_NAME, Marks, TurnParser
from protocol.dialects.template import ChatTemplate, Form, derive_forms, to_json
from protocol.dialects.tokens import DialectError, Tokens
from protocol.wire import (
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    Message,
    NamespaceTool,
    Reasoning,
    Tool,
    ToolCall,
    item_text,
)

# What needs no escape, neither in JSON nor on a line of its own.
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME}}}")


class ChatMLDialect:
    """See `base.Dialect`. Stateless; may be used from several threads."""

    name = "chatml"

    def __init__(self, template: ChatTemplate, tokens: Tokens, eos_token: str | None = None) -> None:
        """`eos_token`: the spelling of a stop token beside the one that closes a turn.

        Raises DialectError if the template's forms cannot be derived or its marks are not control tokens.
        """
        self._tokens = tokens
        self._forms = derive_forms(template, tokens.split)
        _, self._turn_end = self._forms.turn.pieces
        stops = [_mark(self._turn_end[:1], "the end of a turn")]
        if eos_token in tokens.control and tokens.control[eos_token] not in stops:
            stops.append(tokens.control[eos_token])
        self.stop_tokens: tuple[int, ...] = tuple(stops)
        self._marks = Marks(
            *_outer_marks(self._forms.reasoning, "reasoning"),
            *_outer_marks(self._forms.call, "a call"),
            *_outer_marks(self._forms.custom_call, "a custom call"),
            stops=self.stop_tokens,
        )

    def opening(
        self, instructions: str | None, tools: Sequence[Tool], tool_choice: object = "auto"
    ) -> Fragment:
        """The system message: instructions and tools, either of which may be absent.

        Of `tool_choice` only "none" has an effect: no tool is written, and the caller gives the parser none
        either. Raises RenderingError: a tool's name that cannot be written, two tools of one name.
        """
        shown = [] if tool_choice == "none" else list(_flat(tools))
        seen: set[str] = set()
        for _, name, param in shown:
            _check_name(name, param)
            if name in seen:
                raise RenderingError(f"Two tools are called '{name}'.", param)
            seen.add(name)
        lines = self._forms.tool_separator.join(_definition(tool, name) for tool, name, _ in shown)
        form = self._forms.openings[bool(instructions), bool(shown)]
        return form.fill(*([instructions] if instructions else []), *([lines] if shown else []))

    def items(self, items: Sequence[Item]) -> Fragment:
        """New items, in order. Raises RenderingError: a call to a name that cannot be written."""
        fragment: Fragment = []
        said: list[tuple[int, Item]] = []  # of the turn that is being written

        def close_turn() -> None:
            if said:
                fragment.extend(self._forms.turn.fill(self._said(said)))
                said.clear()

        for index, item in enumerate(items):
            form = self._form(item)
            if form is not None:
                close_turn()
                fragment += form.fill(item_text(item))  # type: ignore[arg-type]  # calls have no form of their own
                continue
            if said and _would_merge(said[-1][1], item):
                close_turn()
            said.append((index, item))
        close_turn()
        return fragment

    def turn_start(self) -> Fragment:
        """What comes before the model speaks."""
        return list(self._forms.turn.pieces[0])

    def turn_end(self, last_token: int) -> Fragment:
        """What closes a sampled turn whose last token is this one."""
        return self._turn_end[1:] if last_token == self._turn_end[0] else list(self._turn_end)

    def sampled(self, items: Sequence[Item]) -> Fragment:
        """What the model would have to sample to say these items as one turn, its stop token included.

        The parser reads the same items from it, but for: blank messages and reasoning (they are none), white
        space around a call's arguments, and arguments that are no JSON object (the call is text). Raises
        RenderingError: two messages or two reasoning items in a row (they would be one), items that are not
        the assistant's, names that cannot be written.
        """
        for index, item in enumerate(items):
            if self._form(item) is not None:
                raise RenderingError("Only what the assistant says can be sampled.", f"input[{index}]")
            if index and _would_merge(items[index - 1], item):
                raise RenderingError(
                    "Two texts in a row cannot be told apart in one turn.", f"input[{index}]"
                )
        return [*self._said(list(enumerate(items))), self._turn_end[0]]

    def tokenize(self, fragment: Fragment) -> list[int]:
        """Token ids of a fragment. Linear in its length."""
        return self._tokens.encode(fragment)

    def parser(self, tools: Sequence[Tool]) -> TurnParser:
        """A fresh parser for one model turn in which these tools may be called."""
        functions: dict[str, CallStarted] = {}
        customs: dict[str, CallStarted] = {}
        for tool, name, _ in _flat(tools):
            namespace = name.removesuffix(tool.name).removesuffix(".") or None
            if isinstance(tool, FunctionTool):
                functions[name] = CallStarted(tool.name, namespace)
            else:
                customs[name] = CallStarted(tool.name, namespace, custom=True)
        return TurnParser(self._tokens, self._marks, functions, customs)

    def _form(self, item: Item) -> Form | None:
        """The form of an item that is a message of its own; None for what the assistant says."""
        match item:
            case Message(role="user"):
                return self._forms.user
            case Message(role="system" | "developer"):
                return self._forms.system
            case FunctionCallOutput() | CustomToolCallOutput():
                return self._forms.tool_output
        return None

    def _said(self, items: Sequence[tuple[int, Item]]) -> Fragment:
        """What stands inside one turn; each item comes with its index, for errors. Empty texts are left
        out.
        """
        fragment: Fragment = []
        needs_separator = False
        for index, item in items:
            match item:
                case FunctionCall(arguments=text) | CustomToolCall(input=text):
                    form = self._forms.call if isinstance(item, FunctionCall) else self._forms.custom_call
                    name = _prompt_name(item.namespace, item.name)
                    _check_name(name, f"input[{index}].name")
                    part = form.fill(name, text)
                case Reasoning():
                    part = self._forms.reasoning.fill(item_text(item)) if item_text(item) else []
                case Message():
                    part = [item_text(item)] if item_text(item) else []
            if not part:
                continue
            if needs_separator:
                fragment.append(self._forms.separator)
            fragment += part
            needs_separator = not isinstance(item, Reasoning)
        return fragment


def _would_merge(first: Item, second: Item) -> bool:
    """Two texts of one kind without anything between them would read as one."""
    return type(first) is type(second) and not isinstance(first, ToolCall)


def _flat(tools: Sequence[Tool]) -> Iterator[tuple[FunctionTool | CustomTool, str, str]]:
    """Every tool that can be called, its name in the prompt, and the path of that name in the request."""
    for index, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for inner_index, inner in enumerate(tool.tools):
                yield inner, _prompt_name(tool.name, inner.name), f"tools[{index}].tools[{inner_index}].name"
        else:
            yield tool, tool.name, f"tools[{index}].name"


def _prompt_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        raise RenderingError(
            f"The name '{name}' is not made of 1 to {MAX_NAME} letters, digits and characters of '_.:/-'.",
            param,
        )


def _definition(tool: FunctionTool | CustomTool, name: str) -> str:
    """The line that tells the model of a tool. A function without parameters takes none."""
    kind = "function" if isinstance(tool, FunctionTool) else "custom"
    details: dict[str, Any] = {"name": name, "description": tool.description or ""}
    if isinstance(tool, FunctionTool):
        details["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    elif tool.format is not None:
        details["format"] = tool.format
    return to_json({"type": kind, kind: details})


def _outer_marks(form: Form, what: str) -> tuple[int, int]:
    """The control tokens that open and close a form."""
    closing = [part for part in form.pieces[-1] if isinstance(part, int)]
    return _mark(form.pieces[0][:1], f"the start of {what}"), _mark(closing, f"the end of {what}")


def _mark(parts: Sequence[int | str], what: str) -> int:
    match parts:
        case [int(token)]:
            return token
    raise DialectError(f"{what} is not marked by one control token of the tokenizer")
