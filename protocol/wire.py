"""The Responses API as structs: items and client events in, the Response object and server events out.

It knows field names and shapes, and nothing of what they lead to. Strategy: decode in two steps.
`decode_client_event` finds the frame's `type`, then one msgspec decoder a type validates while it decodes,
and its error path becomes `param`. Items are decoded one by one, because unknown *types* of item and tool are
not errors (clients send many that no server knows) while a bad *field* of a known one is. Unknown keys are
ignored. Going out, an event is a struct that is encoded at most once.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocol.errors import RequestError

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
LARGEST_INTEGER = 2**53 - 1  # of a field: what every JSON reader takes exactly, and every encoder of ours
MAX_IGNORED = 32  # things without meaning here that a Response lists; and how much of each, in characters
MAX_SHOWN = 100

Short: TypeAlias = Annotated[str, Meta(max_length=512)]
"""A name, an id, or a label: short, because errors and Responses repeat it."""

# ---- items ----


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

# ---- client events ----


class StreamOptions(msgspec.Struct):
    """Accepted and without effect."""

    include_obfuscation: bool | None = None


class Create(msgspec.Struct, tag="response.create", kw_only=True):
    """`response.create`, or the body of a POST: everything a Response is made from.

    `input` and `tools` are kept raw here; `parse_items` and `parse_tools` read them.
    """

    model: Short | None = None
    input: str | list[msgspec.Raw] | None = None
    instructions: str | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Short | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=LARGEST_INTEGER)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], Short], Meta(max_length=16)] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    user: Short | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=LARGEST_INTEGER)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_cache_key: Short | None = None
    safety_identifier: Short | None = None
    service_tier: str | None = None
    stream: bool | None = None
    generate: bool | None = None
    lifecycle: Short | None = None
    event_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream_id: str | None = None


class Append(msgspec.Struct, tag="response.append", kw_only=True):
    """`response.append`: results (and messages) for a held run."""

    input: list[msgspec.Raw]
    response_id: Short | None = None
    stream_id: str | None = None
    event_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class Cancel(msgspec.Struct, tag="response.cancel", kw_only=True):
    """`response.cancel`: end this run now."""

    response_id: Short
    stream_id: str | None = None


class Steer(msgspec.Struct, tag="response.steer", kw_only=True):
    """`response.steer`: more user input for a run that is going on."""

    previous_response_id: Short
    input: str | list[msgspec.Raw]


class Inject(msgspec.Struct, tag="response.inject", kw_only=True):
    """`response.inject` (beta): items for a run that is going on."""

    response_id: Short
    input: list[msgspec.Raw]


class Processed(msgspec.Struct, tag="response.processed", kw_only=True):
    """`response.processed`: some clients tell that they have read a response. No answer is expected."""

    response_id: str | None = None


ClientEvent: TypeAlias = Create | Append | Cancel | Steer | Inject | Processed


class Head(msgspec.Struct):
    """The fields that are read before the frame's type is known to be one of ours."""

    type: Any = None
    stream_id: Any = None


_HEAD = msgspec.json.Decoder(Head)
_CLIENT_EVENTS: dict[str, msgspec.json.Decoder[ClientEvent]] = {
    str(struct.__struct_config__.tag): msgspec.json.Decoder(struct)
    for struct in (Create, Append, Cancel, Steer, Inject, Processed)
}
_CREATE = msgspec.json.Decoder(Create)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_head(frame: str | bytes) -> Head:
    """What a WebSocket text frame claims to be, and its lane, so that whatever is wrong with the rest can be
    said there. An absent or null `stream_id` is the default lane (None).

    Raises RequestError: not JSON, not an object, a bad `stream_id`. RecursionError: nested too deeply.
    """
    try:
        head = _HEAD.decode(frame)
    except msgspec.DecodeError as error:
        message = f"This is not a JSON object: {error}"
        raise RequestError(message, code="invalid_json") from error
    if head.stream_id is not None and not (
        isinstance(head.stream_id, str) and STREAM_ID.fullmatch(head.stream_id)
    ):
        raise RequestError(
            "The 'stream_id' field must be a non-empty string with at most 256 characters and may only "
            "contain letters, numbers, underscores, hyphens, and periods.",
            code="invalid_stream_id",
            param="stream_id",
        )
    return head


def decode_client_event(head: Head, frame: str | bytes) -> ClientEvent:
    """The frame with this head as a client event. Raises RequestError: an unknown type, a bad field (with its
    path).
    """
    decoder = _CLIENT_EVENTS.get(head.type) if isinstance(head.type, str) else None
    if decoder is None:
        known = ", ".join(_CLIENT_EVENTS)
        raise RequestError(
            f"Unknown event type {repr(head.type)[:MAX_SHOWN]}. Known types: {known}.",
            code="unknown_event_type",
            param="type",
        )
    return _decode(decoder, frame, "")


def decode_create(body: bytes) -> Create:
    """The body of a POST: a `response.create` whose `type` may be left out. Raises RequestError: not JSON in
    UTF-8, a bad field. RecursionError: nested too deeply.
    """
    try:
        decode_head(body.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"This is not UTF-8: {error}.", code="invalid_json") from error
    return _decode(_CREATE, body, "")


def unknown_fields(frame: str | bytes, ignored: list[str]) -> None:
    """List the top-level keys of a create that no field of ours takes in `ignored`."""
    for key in sorted(_KEYS.decode(frame).keys() - {*Create.__struct_fields__, "type"}):
        _note(ignored, key)


_T = TypeVar("_T")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _decode(decoder: msgspec.json.Decoder[_T], data: str | bytes | msgspec.Raw, at: str) -> _T:
    """Decode, turning msgspec's error path into `param` below the path `at`."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        what, _, path = str(error).partition(" - at `$")
        param = (at + path.rstrip("`")).lstrip(".")
        if missing := _MISSING.match(what):
            param = f"{param}.{missing[1]}".lstrip(".")
            raise RequestError(
                f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param
            ) from error
        raise RequestError(
            f"Invalid value for '{param}': {what}.", code="invalid_value", param=param or None
        ) from error


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
        head = _decode(_ITEM_HEAD, each, at)
        if head.type is None and head.role is not None:
            each = msgspec.Raw(b'{"type":"message",' + bytes(each).lstrip()[1:])
        elif head.type not in _ITEM_TYPES:
            _note(ignored, f"{at}: item of type {head.type}")
            continue
        item = _decode(_ITEM, each, at)
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
        kind = _decode(_TOOL_HEAD, each, at).type
        if kind == "namespace":
            tools.append(_parse_namespace(each, ignored, at))
        elif kind in _TOOL_TYPES:
            tools.append(_decode(_TOOL, each, at))
        else:
            _note(ignored, f"{at}: tool of type {kind}")
    return tools


def _parse_namespace(raw: msgspec.Raw, ignored: list[str], at: str) -> NamespaceTool:
    group = _decode(_NAMESPACE, raw, at)
    members = parse_tools(group.tools, ignored, f"{at}.tools")
    inner = [tool for tool in members if not isinstance(tool, NamespaceTool)]
    if len(inner) < len(members):
        raise RequestError("A namespace cannot be in a namespace.", param=f"{at}.tools")
    return NamespaceTool(group.name, group.description, inner)


def _note(ignored: list[str], what: str) -> None:
    if len(ignored) < MAX_IGNORED:
        ignored.append(what[:MAX_SHOWN])


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


# ---- the Response object ----


class InputTokensDetails(msgspec.Struct):
    """`cached_tokens`: input tokens whose KV was already there."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """`reasoning_tokens`: output tokens that were reasoning."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of a leg (in `response.done`) or of a run (in a terminal event)."""

    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = msgspec.field(default_factory=InputTokensDetails)
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = msgspec.field(default_factory=OutputTokensDetails)
    total_tokens: int = 0


class OutputText(msgspec.Struct, tag="output_text"):
    """The text of an output message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """The text of an output reasoning item."""

    text: str


class OutputMessage(msgspec.Struct, tag="message"):
    """A message that the model made."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """Reasoning that the model made."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []


class OutputFunctionCall(msgspec.Struct, tag="function_call"):
    """A function call that the model made."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A custom tool call that the model made."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
OutputCall: TypeAlias = OutputFunctionCall | OutputCustomCall
OutputType: TypeAlias = Literal["function_call_output", "custom_tool_call_output"]
Status: TypeAlias = Literal["in_progress", "completed", "failed", "incomplete"]

OUTPUT_TYPES: dict[type[OutputCall], OutputType] = {
    OutputFunctionCall: "function_call_output",
    OutputCustomCall: "custom_tool_call_output",
}
"""The type of item that answers each kind of call."""


class RequiredInput(msgspec.Struct):
    """One thing that a held run waits for."""

    type: OutputType
    call_id: str
    name: str


class ErrorDetail(msgspec.Struct):
    """Why a Response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a Response is incomplete."""

    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The Response object, as it stands at one event."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: Usage | None = None
    error: ErrorDetail | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    tools: list[msgspec.Raw] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    temperature: float = 1.0
    top_p: float = 1.0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    store: bool = True
    background: bool = False
    completed_at: int | None = None
    service_tier: str = "default"
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_logprobs: int = 0
    lifecycle: str
    work: dict[str, Any] | UnsetType = UNSET


# ---- server events ----


class ServerEvent(msgspec.Struct, kw_only=True):
    """An event of a Response. The log gives it its number when it is appended."""

    sequence_number: int = -1
    terminal: ClassVar[bool] = False


class Created(ServerEvent, tag="response.created"):
    """The Response exists."""

    response: Response


class InProgress(ServerEvent, tag="response.in_progress"):
    """A leg began, or goes on without anything to show (heartbeat)."""

    response: Response


class Done(ServerEvent, tag="response.done"):
    """The run is held: it waits for `required_input`."""

    response: Response
    required_input: list[RequiredInput]


class Completed(ServerEvent, tag="response.completed"):
    """The end of a Response that said all it had to say."""

    terminal = True
    response: Response


class Incomplete(ServerEvent, tag="response.incomplete"):
    """The end of a Response that was cut; `incomplete_details.reason` says by what."""

    terminal = True
    response: Response


class Failed(ServerEvent, tag="response.failed"):
    """The end of a Response that broke; `error` says how."""

    terminal = True
    response: Response


class ItemAdded(ServerEvent, tag="response.output_item.added"):
    """An output item was begun."""

    output_index: int
    item: OutputItem


class ItemDone(ServerEvent, tag="response.output_item.done"):
    """An output item is whole."""

    output_index: int
    item: OutputItem


class PartAdded(ServerEvent, tag="response.content_part.added"):
    """A part of a message or reasoning item was begun."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class PartDone(ServerEvent, tag="response.content_part.done"):
    """A part of a message or reasoning item is whole."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class Delta(ServerEvent):
    """More text of one item. Neighbouring deltas of the same kind and item can be read as one."""

    item_id: str
    output_index: int
    delta: str


class TextDelta(Delta, tag="response.output_text.delta"):
    """More of a message."""

    content_index: int = 0
    logprobs: list[Any] = []


class ReasoningDelta(Delta, tag="response.reasoning_text.delta"):
    """More of the reasoning."""

    content_index: int = 0


class ArgumentsDelta(Delta, tag="response.function_call_arguments.delta"):
    """More of a function call's arguments."""


class CustomInputDelta(Delta, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool call's input."""


class TextDone(ServerEvent, tag="response.output_text.done"):
    """The whole text of a message."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[Any] = []


class ReasoningDone(ServerEvent, tag="response.reasoning_text.done"):
    """The whole text of the reasoning."""

    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDone(ServerEvent, tag="response.function_call_arguments.done"):
    """The whole arguments of a function call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDone(ServerEvent, tag="response.custom_tool_call_input.done"):
    """The whole input of a custom tool call."""

    item_id: str
    output_index: int
    input: str


class SteerRef(msgspec.Struct, omit_defaults=True):
    """What an answer to `response.steer` or `response.inject` speaks of."""

    previous_response_id: str
    id: str | None = None
    input: Any = None


class SteerAccepted(ServerEvent, tag="response.steer.accepted"):
    """The steering message is queued for the run."""

    steer: SteerRef


_ENCODER = msgspec.json.Encoder()


def encode(event: ServerEvent) -> str:
    """One event as the text of a frame (or of an SSE `data:` line)."""
    return _ENCODER.encode(event).decode()


def encode_any(frame: dict[str, Any]) -> str:
    """A frame that belongs to no Response, as text."""
    return _ENCODER.encode(frame).decode()


def error_frame(error: RequestError, stream_id: str | None = None) -> str:
    """An `error` frame: status, code and param are always there, `stream_id` only for a named lane."""
    frame: dict[str, Any] = {"type": "error", "status": error.status}
    if stream_id is not None:
        frame["stream_id"] = stream_id
    frame["error"] = {
        "type": error.type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    return _ENCODER.encode(frame).decode()
