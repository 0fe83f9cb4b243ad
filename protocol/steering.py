"""Steering of a Response that has one leg: input of the user that its successor begins with.

It knows items and events, and nothing of runs and lanes. Strategy: the Response that is steered says what it
has to say and ends as it would have; nothing of it is cut, so all that its client was shown stays true. What
was accepted meanwhile is passed on with its past, and whatever continues it on its lane begins with it: the
successor that the server makes itself, or, where the client owes results, the client's next create. It is
committed when that one is created; until then it can be given back.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from protocol import wire
from protocol.errors import RequestError

MAX_STEERS = 16  # that wait for one successor: a person who changes their mind, not a stream
MAX_STEERING_BYTES = 1 << 20  # of their input together, which is kept twice until it is committed

SteeringInput: TypeAlias = str | list[msgspec.Raw]


class Steered(msgspec.Struct):
    """One `response.steer` that was accepted and is not part of a conversation yet."""

    id: str
    response_id: str  # of the Response that was steered
    items: list[wire.Item]
    input: SteeringInput  # as it was sent, to be given back

    @property
    def ref(self) -> wire.SteerRef:
        """What answers call it."""
        return wire.SteerRef(previous_response_id=self.response_id, id=self.id)


def new_steered(response_id: str, items: Sequence[wire.Item], sent: SteeringInput) -> Steered:
    """A steer of this Response. Raises RequestError: it is not messages of the user, or they have no text."""
    messages = [item for item in items if isinstance(item, wire.Message) and item.role == "user"]
    if len(messages) < len(items) or not any(wire.item_text(message) for message in messages):
        raise RequestError("Steering takes messages of the user, with text.", param="input")
    return Steered(f"steer_{secrets.token_hex(16)}", response_id, list(items), sent)


def check_room(queued: Sequence[Steered], another: Steered) -> None:
    """Whether one more can wait with these. Raises RequestError."""
    size = sum(len(msgspec.json.encode(each.input)) for each in [*queued, another])
    if len(queued) >= MAX_STEERS or size > MAX_STEERING_BYTES:
        raise RequestError(
            f"This response has {len(queued)} steering inputs waiting; {MAX_STEERS} can, with "
            f"{MAX_STEERING_BYTES} bytes together.",
            code="too_many_pending_steers",
        )


def pending_frames(steered: Sequence[Steered], required: list[wire.RequiredInput], number: int) -> list[str]:
    """The Response that was steered has ended, and its client owes results: an event each, from this
    `sequence_number` on.
    """
    return [
        wire.encode(wire.SteerPending(steer=each.ref, required_input=required, sequence_number=at))
        for at, each in enumerate(steered, number)
    ]


def returned_frames(steered: Sequence[Steered], code: str, message: str, number: int) -> list[str]:
    """What was accepted and came to nothing: an event each, from this `sequence_number` on."""
    return [
        failed_frame(code, message, each.response_id, each.input, steer_id=each.id, number=at)
        for at, each in enumerate(steered, number)
    ]


def failed_frame(
    code: str,
    message: str,
    response_id: str,
    sent: SteeringInput,
    *,
    steer_id: str | None = None,
    number: int = 0,
) -> str:
    """`response.steer.failed`, which gives back what was sent. `steer_id` if it had been accepted, `number`
    if it comes after the events of a Response.
    """
    steer = wire.SteerRef(previous_response_id=response_id, id=steer_id, input=sent)
    error = {"type": "invalid_request_error", "code": code, "message": message}
    return wire.encode_any(
        {"type": "response.steer.failed", "sequence_number": number, "error": error, "steer": steer}
    )
