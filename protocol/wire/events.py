"""What the server says: events as structs, each encoded at most once."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from protocol.errors import RequestError
from protocol.wire.objects import OutputItem, OutputText, ReasoningText, RequiredInput, Response


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


class SteerPending(ServerEvent, tag="response.steer.pending"):
    """The steering message is queued for the create that brings `required_input`."""

    steer: SteerRef
    required_input: list[RequiredInput]
    reason: str = "waiting_for_required_input"


_ENCODER = msgspec.json.Encoder()


def encode(event: ServerEvent) -> str:
    """One event as the text of a frame (or of an SSE `data:` line)."""
    return _ENCODER.encode(event).decode()


def wire_size(frame: str | bytes) -> int:
    """Bytes of a frame on the wire."""
    if isinstance(frame, bytes) or frame.isascii():
        return len(frame)
    return len(frame.encode("utf-8", "surrogatepass"))


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
