"""One sequence as the server holds it: verbs that never wait, events that are waited for.

It knows nothing of processes, models or ledgers. A verb queues one command with the engine, all commands of
a turn of the event loop leave in one message. Events gather here until somebody reads them; what gathers is
bounded by the leg: the engine says nothing of a sequence that was not asked to sample, and a leg has its
`max_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard

import trio

from engine.messages import (
    Event,
    Extend,
    Failed,
    Fork,
    Pause,
    Prefill,
    Release,
    Sample,
    Sampled,
    Sampling,
    Stopped,
    Truncate,
)

if TYPE_CHECKING:
    from engine.routing import Engine

SequenceState: TypeAlias = Literal["open", "lost", "failed", "released"]


class SequenceLost(Exception):
    """The engine died and this sequence with it. Open a new one and send the ledger again."""


class EngineSequence:
    """One sequence of the engine; made by `Engine.open` and `fork`.

    Verbs are synchronous, never block, and reach the engine in the order they were called. On a sequence
    that is lost or has failed they do nothing (its reader learns of it from `events`); after `release` they
    raise `trio.ClosedResourceError`. Only `pause` and `release` are for a sequence that is sampling: the
    others raise RuntimeError until its `Stopped` has come or it was told to pause, because the engine would
    take them for a bug and die of it, with everybody's sequences.
    """

    def __init__(self, engine: Engine, number: int, state: SequenceState = "open") -> None:
        self.id = number
        self._engine = engine
        self._state = state
        self._sampling = False  # told to, and neither told to pause nor heard to have stopped
        self._arrived: list[Event] = []
        self._readers = trio.lowlevel.ParkingLot()

    def __repr__(self) -> str:
        return f"<EngineSequence {self.id} {self._state}>"

    @property
    def lost(self) -> bool:
        """Whether the engine died with this sequence in it."""
        return self._state == "lost"

    def extend(self, tokens: Sequence[int], *, sampled: bool = False) -> None:
        """Append tokens. `sampled`: the model itself once sampled them (a ledger that is sent again)."""
        if self._is_heard():
            self._engine.send(Extend(sequence=self.id, tokens=list(tokens), sampled=sampled))

    def sample(
        self,
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_tokens: tuple[int, ...],
        forced: list[int] | None = None,
    ) -> None:
        """Begin a leg; it ends with a `Stopped` or a `Failed` among the events."""
        if self._is_heard():
            self._sampling = True
            self._engine.send(
                Sample(
                    sequence=self.id,
                    sampling=sampling,
                    max_tokens=max_tokens,
                    stop_tokens=stop_tokens,
                    forced=forced,
                )
            )

    def prefill(self) -> None:
        """Begin a leg that samples nothing: it ends with a `Stopped` when all but the last token is in KV."""
        if self._is_heard():
            self._sampling = True
            self._engine.send(Prefill(sequence=self.id))

    def pause(self) -> None:
        """Stop sampling before the next token. Other verbs may follow at once, they are obeyed in order."""
        if self._is_heard(while_sampling=True):
            self._sampling = False
            self._engine.send(Pause(sequence=self.id))

    def truncate(self, length: int) -> None:
        """Cut the sequence back to its first `length` tokens."""
        if self._is_heard():
            self._engine.send(Truncate(sequence=self.id, length=length))

    def fork(self) -> EngineSequence:
        """A copy of this sequence. The copy of a lost or failed one is lost."""
        if not self._is_heard():
            return EngineSequence(self._engine, self._engine.new_number(), "lost")
        child = self._engine.adopt_new_sequence()
        self._engine.send(Fork(sequence=self.id, child=child.id))
        return child

    def release(self) -> None:
        """Forget the sequence and its KV, whatever it is doing; a reader is woken by `events` raising.

        Idempotent, and fine when the sequence is lost or has failed.
        """
        if self._state == "open":
            self._engine.send(Release(sequence=self.id))
            self._arrived.clear()
            self._end("released")

    async def events(self) -> list[Event]:
        """Wait for at least one event and return all that have come, consecutive `Sampled` merged into one.

        There is no deadline here: how long a step or a queue may take is the caller's to know, so put a
        scope around it. Cancellation loses nothing, the events are there for the next call.

        Raises `SequenceLost` when the engine died, after what it had still said has been returned, and
        `trio.ClosedResourceError` when the sequence was released, or failed and that has been returned.
        """
        if self._arrived:
            await trio.lowlevel.checkpoint()
        while not self._arrived:
            if self._state == "lost":
                raise SequenceLost(f"sequence {self.id}: {self._engine.reason}")
            if self._state != "open":
                raise trio.ClosedResourceError(f"sequence {self.id} was {self._state}")
            await self._readers.park()
        arrived, self._arrived = self._arrived, []
        return arrived if len(arrived) == 1 else _merge(arrived)

    # The engine's side of it.

    def arrive(self, event: Event) -> None:
        """Take an event of this sequence."""
        self._arrived.append(event)
        if type(event) is Stopped:
            self._sampling = False
        if type(event) is Failed:
            self._end("failed")
        else:
            self._readers.unpark_all()

    def lose(self) -> None:
        """The engine is dead."""
        self._end("lost")

    def _end(self, state: SequenceState) -> None:
        self._state = state
        self._engine.forget(self)
        self._readers.unpark_all()

    def _is_heard(self, *, while_sampling: bool = False) -> bool:
        """Whether there is somebody to obey a verb. Raises if calling it now is the caller's bug."""
        if self._state == "released":
            raise trio.ClosedResourceError(f"sequence {self.id} was released")
        if self._state != "open":
            return False
        if self._sampling and not while_sampling:
            raise RuntimeError(f"sequence {self.id} is sampling: pause it, or wait for its Stopped")
        return True


def _is_sampled(event: Event) -> TypeGuard[Sampled]:
    return type(event) is Sampled


def _merge(events: list[Event]) -> list[Event]:
    merged: list[Event] = []
    for sampled, group in groupby(events, key=_is_sampled):
        if not sampled:
            merged.extend(group)
            continue
        several = [event for event in group if _is_sampled(event)]
        tokens = [token for event in several for token in event.tokens]
        merged.append(Sampled(sequence=several[0].sequence, tokens=tokens))
    return merged
