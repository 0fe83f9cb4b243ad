"""Server events as a client reads them: one light struct for all of them, decoded once.

It knows the names of fields and nothing of connections. Strategy: a client acts on few fields and few types
of event, and must put up with servers that send more than it knows. So `Event` has every field that is acted
on, with defaults, and what an unknown event carries is skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.wire import RequiredInput, Usage

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
ACTED_ON = TERMINAL | {
    *("error", "response.created", "response.in_progress", "response.done"),
    *("response.output_item.added", "response.output_item.done"),
    *("response.output_text.delta", "response.reasoning_text.delta"),
    *("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"),
}


class Part(msgspec.Struct):
    """A part of an output message or of reasoning."""

    type: str
    text: str | None = None


class Item(msgspec.Struct):
    """An output item of any kind."""

    type: str
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    content: list[Part] | None = None


class Reason(msgspec.Struct):
    """Why: the `error` of a failed Response or of a frame, the `incomplete_details` of a cut one."""

    type: str | None = None
    code: str | None = None
    message: str | None = None
    reason: str | None = None
    param: str | None = None


class ResponseView(msgspec.Struct):
    """The Response object as far as a client reads it. `work` is empty on servers other than ours."""

    id: str
    status: str | None = None
    model: str | None = None
    output: list[Item] = []
    usage: Usage | None = None
    work: dict[str, Any] = {}
    error: Reason | None = None
    incomplete_details: Reason | None = None


class Event(msgspec.Struct, kw_only=True):
    """A server event of any kind; fields that it does not have keep their defaults."""

    type: str
    sequence_number: int = -1
    stream_id: str | None = None
    response: ResponseView | None = None
    output_index: int | None = None
    item_id: str | None = None
    item: Item | None = None
    delta: str = ""
    required_input: list[RequiredInput] = []
    status: int | None = None
    error: Reason | None = None

    @property
    def terminal(self) -> bool:
        """Whether the run is over with this event."""
        return self.type in TERMINAL


class _Head(msgspec.Struct):
    type: str
    stream_id: str | None = None


_EVENT = msgspec.json.Decoder(Event)
_HEAD = msgspec.json.Decoder(_Head)


def decode_event(frame: str | bytes) -> Event:
    """One frame as an event. An event of an unknown type whose fields look odd is an event without fields.

    Raises msgspec.DecodeError: not JSON, no `type`, or a known event with a field that it cannot have.
    """
    try:
        return _EVENT.decode(frame)
    except msgspec.ValidationError:
        head = _HEAD.decode(frame)
        if head.type in ACTED_ON:
            raise
        return Event(type=head.type, stream_id=head.stream_id)
