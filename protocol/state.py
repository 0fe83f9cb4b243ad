"""All that a run knows, as one value that can be written down; and the phases it goes through.

It knows no tasks, sockets or engines: a `Run` acts, its `RunState` remembers. What is not in here is either
derived (KV and parser state, from the ledger) or does not outlive a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from protocol import wire
from protocol.appended import drop_echoes
from protocol.ledger import Ledger
from protocol.steering import Steered
from protocol.work import Work


class Phase(StrEnum):
    """Where a run stands. Every move is in `MOVES`; any other is a bug."""

    PREPARING = "preparing"  # the request is accepted; nothing was done with it
    SAMPLING = "sampling"  # a leg is queued, prefilling or decoding
    OWING = "owing"  # the leg made calls; the client has not been told yet
    HELD = "held"  # the client was told; KV is kept until its results are in
    FINISHING = "finishing"  # how it ends is known; nobody has been told yet
    ENDED = "ended"  # the terminal event is in the log


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.PREPARING: frozenset({Phase.SAMPLING, Phase.FINISHING}),
    Phase.SAMPLING: frozenset({Phase.SAMPLING, Phase.OWING, Phase.FINISHING}),
    Phase.OWING: frozenset({Phase.HELD, Phase.FINISHING}),
    Phase.HELD: frozenset({Phase.SAMPLING, Phase.FINISHING}),
    Phase.FINISHING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Ending(msgspec.Struct):
    """How a run ends: `incomplete` with a reason, `failed` with an error, or `completed`."""

    status: Literal["completed", "incomplete", "failed"]
    reason: str | None = None
    error: wire.ErrorDetail | None = None


class Arrived(msgspec.Struct):
    """Input that was accepted and is not in the ledger yet."""

    items: list[wire.Item]
    tokens: list[int]


class RunState(msgspec.Struct, kw_only=True):
    """One run, written down. `dump` and `load` are exact."""

    id: str
    owner: str  # name of the API key that made it
    lifecycle: str
    prototype: bool  # the client speaks the prototype's protocol and knows no late frames
    created_at: int  # seconds since the epoch
    request: wire.Create  # without its input
    items: list[wire.Item]  # of the whole conversation, in order; before `prepare` the new ones only
    positions: list[int] = []  # where the request has each of the new items; before `prepare` only
    phase: Phase = Phase.PREPARING
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    opening: int = 0  # tokens of instructions and tools, at the head of the ledger
    inherited: int = 0  # tokens of the ledger that earlier Responses left
    inherited_items: int = 0  # likewise of `items`
    leg_start: int = 0  # length of the ledger when this leg began to sample
    turns: int = 0  # model turns in the conversation before this leg
    output: list[wire.OutputItem] = []  # of all legs that are over
    leg_output: int = 0  # index in `output` of the first item of the leg that ended last
    owed: list[wire.RequiredInput] = []  # calls whose results are not in the ledger, in call order
    arrived: dict[str, Arrived] = {}  # by call id: results that wait for one before them
    messages: list[Arrived] = []  # what goes in after the results
    steers: list[Steered] = []  # for its successor; before `prepare` those that its own items begin with
    event_ids: list[str] = []  # of the appends that were accepted
    next_number: int = 0  # of events
    work: Work = msgspec.field(default_factory=Work)  # of the legs that are over
    leg_work: Work = msgspec.field(default_factory=Work)
    leg_input: int = 0  # tokens in context when this leg began to sample
    reused_at_start: int = 0  # tokens of the first leg whose KV was shared
    reasoning_tokens: int = 0
    leg_reasoning_tokens: int = 0
    ended_unasked: bool = False  # it ended while it was the client's turn
    ending: Ending | None = None

    @property
    def required(self) -> list[wire.RequiredInput]:
        """What the client still has to send."""
        return [each for each in self.owed if each.call_id not in self.arrived]

    @property
    def input_items(self) -> list[wire.Item]:
        """The items of this Response that came from its client."""
        made = {item.id for item in self.output}
        return [item for item in self.items[self.inherited_items :] if item.id not in made]

    @property
    def has_taken_in(self) -> bool:
        """Whether its items are those of a conversation: not if it was stopped before it took them in."""
        return self.work.legs > 0 or (self.ending is not None and self.ending.status == "completed")

    @property
    def rendered(self) -> int:
        """Tokens of the ledger that came in: rendered in this run, or inherited."""
        return len(self.ledger) - self.sampled

    @property
    def sampled(self) -> int:
        """Tokens of the ledger that were sampled, by this run."""
        begin, total = 0, 0
        for span in self.ledger.spans:
            begin = max(begin, self.inherited)
            total += max(0, span.end - begin) if span.sampled else 0
            begin = span.end
        return total

    def drop_echoes(self, said: Sequence[wire.OutputItem]) -> None:
        """Drop new items in front that only repeat what was said. Before `prepare`."""
        items = drop_echoes(self.items, said)
        self.positions = self.positions[len(self.items) - len(items) :]
        self.items = list(items)

    def dump(self) -> bytes:
        """This state as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def load(cls, data: bytes) -> RunState:
        """The state that was dumped. Raises msgspec.DecodeError if it is not one."""
        return msgspec.json.decode(data, type=cls)
