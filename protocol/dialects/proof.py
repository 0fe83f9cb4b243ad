"""The proof that a dialect writes what its family writes. Run once, at load; what fails it is not used.

It knows items and chat messages, the dialect's methods and the template. Strategy: probe conversations in
which every kind of item follows every other, behind every kind of opening, and texts that are hard in some
way. The dialect's fragments spelled out must be the template's rendering, and their ids the ids that the
family's tokenizer gives for it. Each conversation's beginning is a conversation here too, so each item is
seen to add exactly its fragment. Then: no text is lost in ids,
and a control token's spelling stays text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product, takewhile
from typing import Any

from protocol.dialects.base import Dialect, Fragment
from protocol.dialects.template import ChatMessage, ChatTemplate
from protocol.dialects.tokens import DialectError, Tokens
from protocol.wire import (
    ContentPart,
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    Message,
    Reasoning,
    Tool,
    item_text,
)

_PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOLS = [
    FunctionTool("read_file", "Reads “a file”.\nAll of it.", _PARAMETERS),
    FunctionTool("now", parameters={"type": "object", "properties": {}}),
]
_CALLABLE: list[Tool] = [*_TOOLS, CustomTool("patch")]

_TEXTS = (
    "Hello there, what's in it?",
    "",
    " ",
    "\n",
    "\n\n  Two  blank  lines before,   and one after.\n",
    'def f(x):\n\treturn {"a": [1, 2.50, "\\u00e9"]}  # 1234567',
    "Grüße, 世界 🙂 …\u00a0—\u200b",
    "user\nassistant\nsystem",
)

_CALL = FunctionCall("c", "read_file", '{ "path":"a\\u0062.txt",\n"n" : [1,{}] }')
_CUSTOM_CALL = CustomToolCall("c", "patch", "*** one\n two\n")


def prove(dialect: Dialect, template: ChatTemplate, tokens: Tokens) -> None:
    """Raises DialectError with the first difference found."""
    conversations = list(_conversations())
    for instructions, tools in product((None, "Be short.\n"), ([], _TOOLS)):
        opening = dialect.opening(instructions, tools)
        head: list[ChatMessage] = [{"role": "system", "content": instructions}] if instructions else []
        for items in conversations:
            messages = head + chat_messages(items)
            rendered = template.render(messages, chat_tools(tools))
            _compare(tokens, opening + dialect.items(items), rendered, items[-1])
        rendered = template.render(messages, chat_tools(tools), add_generation_prompt=True)
        _compare(
            tokens, opening + dialect.items(items) + dialect.turn_start(), rendered, "the start of a turn"
        )
    _prove_turn(dialect, tokens)
    for text in (*_TEXTS, *tokens.control):
        _prove_text(tokens, text)


def _conversations() -> Iterator[list[Item]]:
    """Conversations that begin with a user's message; each one's beginning is a conversation here too."""
    hello = Message("user", "Hi")
    thought = Reasoning(content=[ContentPart("reasoning_text", "First,\n\nread it. ")])
    kinds: list[list[Item]] = [
        [Message("user", "And now?")],
        [Message("developer", "Mind the gap.")],
        [Message("assistant", "I see.\n")],
        [_CALL],
        [thought, Message("assistant", "Well,"), _CALL],
        [Message("assistant", "Two"), _CALL, _CUSTOM_CALL],
        [FunctionCallOutput("c", "a\nb\n")],
        [CustomToolCallOutput("c", "done")],
    ]
    yield [hello]
    for first in kinds:
        yield [hello, *first]
        yield from ([hello, *first, *second] for second in kinds if not _is_one_turn(first[-1], second[0]))
    for text in _TEXTS:
        yield [hello, Message("user", text)]
        yield [hello, Message("system", text)]
        yield [hello, Message("assistant", text)]
        yield [hello, Message("assistant", text), _CALL]
        yield [hello, CustomToolCall("c", "patch", text)]
        yield [hello, FunctionCall("c", "read_file", text)]
        yield [hello, FunctionCallOutput("c", text)]


def _is_one_turn(first: Item, second: Item) -> bool:
    """Both are the assistant's: a chat message has no place for them in this order."""
    return len(chat_messages([first, second])) == 1


def _compare(tokens: Tokens, fragment: Fragment, rendered: str, last: object) -> None:
    spelled = tokens.spell(fragment)
    if spelled != rendered:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(spelled, rendered, strict=False))
        at = sum(1 for _ in same)
        raise DialectError(
            "the chat template does not write each item as it stands, whatever surrounds it: "
            f"{rendered[at : at + 40]!r} instead of {spelled[at : at + 40]!r}, with {last!r} at the end"
        )
    if tokens.encode(fragment) != tokens.encode_as_family(rendered):
        raise DialectError(
            f"the tokenizer does not treat {last!r} independently of the control tokens around it"
        )


def _prove_turn(dialect: Dialect, tokens: Tokens) -> None:
    """A sampled stop token is continued as a written one, and what the dialect has the model say, its parser
    understands.
    """
    said: list[Item] = [Message("assistant", "Two"), _CALL, _CUSTOM_CALL]
    sampled = dialect.tokenize(dialect.sampled(said))
    closed = sampled + dialect.tokenize(dialect.turn_end(sampled[-1]))
    if dialect.tokenize(dialect.turn_start()) + closed != dialect.tokenize(dialect.items(said)):
        raise DialectError("a turn that is sampled and a turn that is written are different tokens")
    parser = dialect.parser(_CALLABLE)
    parsed = parser.feed(sampled) + parser.finish()
    texts = [getattr(each, "text", "") for each in parsed]
    if "".join(texts) != "Two" + _CALL.arguments + _CUSTOM_CALL.input:
        raise DialectError(f"a call in this template's form is not understood by the parser: {parsed}")


def _prove_text(tokens: Tokens, text: str) -> None:
    ids = tokens.encode([text])
    if any(token in tokens.spelling for token in ids):
        raise DialectError(f"the tokenizer makes control tokens of the text {text!r}")
    if tokens.decode(ids) != text:
        raise DialectError(f"the tokenizer loses some of the text {text!r}")


def chat_messages(items: Sequence[Item]) -> list[ChatMessage]:
    """The items in the words of chat templates; neighbouring assistant items are one message, whatever their
    order.
    """
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case Message(role="user" | "system" | "developer" as role):
                messages.append(
                    {"role": "system" if role == "developer" else role, "content": item_text(item)}
                )
            case FunctionCallOutput() | CustomToolCallOutput():
                messages.append({"role": "tool", "content": item_text(item)})
            case _:
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                _add_said(messages[-1], item)
    return messages


def _add_said(message: ChatMessage, item: Item) -> None:
    match item:
        case Message():
            message["content"] += item_text(item)
        case Reasoning():
            message["reasoning_content"] = item_text(item)
        case FunctionCall(name=name, arguments=arguments):
            function = {"name": name, "arguments": arguments}
            message.setdefault("tool_calls", []).append({"type": "function", "function": function})
        case CustomToolCall(name=name, input=text):
            message.setdefault("tool_calls", []).append(
                {"type": "custom", "custom": {"name": name, "input": text}}
            )


def chat_tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    """Function tools in the words of chat templates."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]
