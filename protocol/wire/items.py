"""Items and tools as structs, and how they are read from a request.

Each is decoded for itself, because unknown *types* of item and tool are not errors (clients send many that no
server knows) while a bad *field* of a known one is.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from protocol.errors import RequestError
from protocol.wire.decoding import decode, note


class ContentPart(msgspec.Struct, omit_defaults=True):
    """A part of a message, of a reasoning item, or of a tool's output. Known text types carry `text`."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Message(msgspec.Struct, tag="message"):
    """Something said: by the user, the developer, the system, or (in a history) the assistant."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class FunctionCall(msgspec.Struct, tag="function_call"):
    """The model's call to a function tool; `arguments` is JSON text exactly as it was sampled."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class FunctionCallOutput(msgspec.Struct, tag="function_call_output"):
    """What a function tool answered."""

    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class CustomToolCall(msgspec.Struct, tag="custom_tool_call"):
    """The model's call to a custom tool, whose input is free text."""

    call_id: str
    name: str
    input: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class CustomToolCallOutput(msgspec.Struct, tag="custom_tool_call_output"):
    """What a custom tool answered."""

    call_id: str
    output: str | list[ContentPart]
    id: str | None = None
    status: str | None = None


class Reasoning(msgspec.Struct, tag="reasoning"):
    """Reasoning that was sampled earlier."""

    summary: list[ContentPart] = []
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None


Item: TypeAlias = (
    Message | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput | Reasoning
)
ToolOutput: TypeAlias = FunctionCallOutput | CustomToolCallOutput
ToolCall: TypeAlias = FunctionCall | CustomToolCall

_ITEM_TYPES = frozenset(
    struct.__struct_config__.tag
    for struct in (Message, FunctionCall, FunctionCallOutput, CustomToolCall, CustomToolCallOutput, Reasoning)
)
_ITEM = msgspec.json.Decoder(Item)

# ---- tools ----


class FunctionTool(msgspec.Struct, tag="function"):
    """A tool whose arguments are JSON by a schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct, tag="custom"):
    """A tool whose input is free text, or text by a grammar."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(msgspec.Struct, tag="namespace"):
    """A named group of function and custom tools."""

    name: str
    description: str | None = None
    tools: list[FunctionTool | CustomTool] = []


Tool: TypeAlias = FunctionTool | CustomTool | NamespaceTool


class _Namespace(msgspec.Struct):
    """A namespace whose tools have not been looked at."""

    name: str
    description: str | None = None
    tools: list[msgspec.Raw] | None = None


_TOOL_TYPES = frozenset(struct.__struct_config__.tag for struct in (FunctionTool, CustomTool))
_TOOL = msgspec.json.Decoder(FunctionTool | CustomTool)
_NAMESPACE = msgspec.json.Decoder(_Namespace)


class _ItemHead(msgspec.Struct):
    type: str | None = None
    role: str | None = None


class _ToolHead(msgspec.Struct):
    type: str


_ITEM_HEAD = msgspec.json.Decoder(_ItemHead)
_TOOL_HEAD = msgspec.json.Decoder(_ToolHead)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})


def parse_items(raw: str | list[msgspec.Raw] | None, ignored: list[str], param: str = "input") -> list[Item]:
    """The items of an `input`; a string is one user message. Types that we do not know are listed in
    `ignored`.

    Raises RequestError: a bad field, or content that is not text (images and files are refused, not dropped).
    """
    if raw is None:
        return []
    if isinstance(raw, str):
        return [Message(role="user", content=raw)]
    items: list[Item] = []
    for index, each in enumerate(raw):
        at = f"{param}[{index}]"
        head = decode(_ITEM_HEAD, each, at)
        if head.type is None and head.role is not None:
            each = msgspec.Raw(b'{"type":"message",' + bytes(each).lstrip()[1:])
        elif head.type not in _ITEM_TYPES:
            note(ignored, f"{at}: item of type {head.type}")
            continue
        item = decode(_ITEM, each, at)
        _check_parts(item, at)
        items.append(item)
    return items


def _check_parts(item: Item, at: str) -> None:
    """Only text is taken, and text parts must have it."""
    field = "output" if isinstance(item, ToolOutput) else "content"
    for index, part in enumerate(content_parts(item)):
        where = f"{at}.{field}[{index}]"
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"Content of type '{part.type}' is not supported by this server; text is.",
                code="unsupported_parameter",
                param=f"{where}.type",
            )
        if (part.refusal if part.type == "refusal" else part.text) is None:
            raise RequestError(
                f"Missing required parameter: '{where}.text'.",
                code="missing_required_parameter",
                param=f"{where}.text",
            )


def parse_tools(raw: list[msgspec.Raw] | None, ignored: list[str], param: str = "tools") -> list[Tool]:
    """The tools that the model may call. Hosted and unknown kinds are listed in `ignored`.

    Raises RequestError on a bad field of a known kind.
    """
    tools: list[Tool] = []
    for index, each in enumerate(raw or []):
        at = f"{param}[{index}]"
        kind = decode(_TOOL_HEAD, each, at).type
        if kind == "namespace":
            tools.append(_parse_namespace(each, ignored, at))
        elif kind in _TOOL_TYPES:
            tools.append(decode(_TOOL, each, at))
        else:
            note(ignored, f"{at}: tool of type {kind}")
    return tools


def without_ignored(raw: list[msgspec.Raw] | None) -> list[msgspec.Raw]:
    """The tools that `parse_tools` takes, as they were sent."""
    return [each for each in raw or [] if _TOOL_HEAD.decode(each).type in {*_TOOL_TYPES, "namespace"}]


def _parse_namespace(raw: msgspec.Raw, ignored: list[str], at: str) -> NamespaceTool:
    group = decode(_NAMESPACE, raw, at)
    members = parse_tools(group.tools, ignored, f"{at}.tools")
    inner = [tool for tool in members if not isinstance(tool, NamespaceTool)]
    if len(inner) < len(members):
        raise RequestError("A namespace cannot be in a namespace.", param=f"{at}.tools")
    return NamespaceTool(group.name, group.description, inner)


def content_parts(item: Item) -> list[ContentPart]:
    """The parts of an item's content or output; a plain string has none."""
    match item:
        case Message(content=list() as parts) | FunctionCallOutput(output=list() as parts):
            return parts
        case CustomToolCallOutput(output=list() as parts) | Reasoning(content=list() as parts):
            return parts
    return []


def item_type(item: Item) -> str:
    """The `type` of an item."""
    return str(item.__struct_config__.tag)


def item_text(item: Message | ToolOutput | Reasoning) -> str:
    """All the text of an item, its parts joined without a separator."""
    match item:
        case Message(content=str() as text) | FunctionCallOutput(output=str() as text):
            return text
        case CustomToolCallOutput(output=str() as text):
            return text
    return "".join(part.text or part.refusal or "" for part in content_parts(item))
