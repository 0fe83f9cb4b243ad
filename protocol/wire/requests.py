"""What a client says: events as structs, decoded in two steps.

`decode_head` finds a frame's type and lane, then one decoder a type validates while it decodes. Unknown keys
are ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from protocol.errors import RequestError
from protocol.wire.decoding import MAX_SHOWN, Short, decode, note

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
LARGEST_INTEGER = 2**53 - 1  # of a field: what every JSON reader takes exactly, and every encoder of ours


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
    return decode(decoder, frame, "")


def decode_create(body: bytes) -> Create:
    """The body of a POST: a `response.create` whose `type` may be left out. Raises RequestError: not JSON in
    UTF-8, a bad field. RecursionError: nested too deeply.
    """
    try:
        decode_head(body.decode())
    except UnicodeDecodeError as error:
        raise RequestError(f"This is not UTF-8: {error}.", code="invalid_json") from error
    return decode(_CREATE, body, "")


def unknown_fields(frame: str | bytes, ignored: list[str]) -> None:
    """List the top-level keys of a create that no field of ours takes in `ignored`."""
    for key in sorted(_KEYS.decode(frame).keys() - {*Create.__struct_fields__, "type"}):
        note(ignored, key)
