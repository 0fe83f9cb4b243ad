"""A conversation's tokens: its ledger, and the engine's copy of it.

It knows tokens and the engine, no items and no events. The ledger is the truth. The engine has a prefix of
it, in a sequence that is opened when first needed and opened again when an engine died: then the whole ledger
is sent, and a leg that was being sampled goes on where its ledger ends. Starting, resuming, and recovering
are thus one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import msgspec

from engine.handle import Engine, EngineSequence, SequenceLost
from engine.messages import Event, Failed, Sampled, Sampling, Stopped
from protocol.ledger import Ledger


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one leg, from where the ledger stood when the leg began."""

    start: int  # length of the ledger when the leg began
    max_tokens: int  # 0: only prefill what is there
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    forced: list[int] | None = None  # the whole leg's, from `start` on


class Conversation:
    """One ledger and its KV. `namespace` is what its KV may be shared within."""

    def __init__(self, ledger: Ledger, engine: Engine, namespace: str) -> None:
        self.ledger = ledger
        self.restarts = 0  # times that its sequence was lost
        self.handed_over = monotonic()  # when tokens were last given to the engine, on its clock
        self._engine = engine
        self._namespace = namespace
        self._sequence: EngineSequence | None = None
        self._sent = 0  # tokens of the ledger that the engine has, the sampled ones included
        self._leg: LegRequest | None = None  # the one that is being sampled

    def note(self, tokens: Sequence[int]) -> None:
        """Append rendered tokens, for the engine to get along with what is added next."""
        self.ledger.append(tokens, sampled=False)

    def add(self, tokens: Sequence[int]) -> None:
        """Append rendered tokens; they, and those noted before, are prefilled as soon as the engine's
        schedule allows. Never waits.
        """
        self.note(tokens)
        if self._sequence is None and self._engine.state == "ready":
            self._open()
        if self._sequence is not None:
            self._send(self._sequence)

    def begin(self, leg: LegRequest) -> None:
        """Sample a leg. What was sampled of it already, before a restart, stands in the ledger and is not
        sampled again.
        """
        self._leg = leg
        if self._sequence is not None:
            self._send(self._sequence)
            self._sample(self._sequence, leg)

    async def events(self) -> list[Event]:
        """What the engine made of the leg since the last call; waits for at least one event. Sampled tokens
        are in the ledger.

        The leg is over with `Stopped`, or with `Failed` (the sequence is then gone, the ledger is not). When
        the engine dies this waits for the next one, which is bounded by nothing but the caller's scope.
        Cancellation loses nothing. Raises EngineUnavailable when there will be no other engine.
        """
        assert self._leg is not None, "events belong to a leg"
        while True:
            if over := self._over_already(self._leg):
                return self._record([over])
            sequence = self._sequence
            if sequence is None:
                await self._engine.wait_ready()
                sequence = self._open()
                self._send(sequence)
                self._sample(sequence, self._leg)
            try:
                return self._record(await sequence.events())
            except SequenceLost:
                self._sequence = None
                self.restarts += 1

    async def cut(self, length: int) -> list[Event]:
        """Stop the leg and drop what was sampled beyond `length` tokens of ledger. Waits for at most one
        engine step; returns what the engine still had to say.

        If the engine dies meanwhile the leg is over too. Cancelled, it leaves the leg to be released.
        """
        events: list[Event] = []
        sequence = self._sequence
        if self._leg is not None and sequence is not None:
            sequence.pause()
            try:
                while self._leg is not None:
                    events += self._record(await sequence.events())
            except SequenceLost:
                self._sequence = None
                self.restarts += 1
        self._leg = None
        self.ledger.cut(length)
        if self._sequence is not None:
            self._sequence.truncate(length)
            self._sent = length
        return events

    @property
    def has_kv(self) -> bool:
        """Whether the engine has any of it."""
        return self._sequence is not None

    def succeed(self, *, fork: bool) -> Conversation:
        """A conversation that goes on from here, with a ledger of its own. It takes the KV over, or, as a
        fork, shares it. Not while a leg is sampled.
        """
        assert self._leg is None
        successor = Conversation(self.ledger.copy(), self._engine, self._namespace)
        if self._sequence is not None:
            successor._sent = self._sent
            if fork:
                successor._sequence = self._sequence.fork()
            else:
                successor._sequence, self._sequence = self._sequence, None
        return successor

    def release(self) -> None:
        """Give the KV back. The ledger stays. Idempotent."""
        if self._sequence is not None:
            self._sequence.release()
            self._sequence = None

    def _open(self) -> EngineSequence:
        self._sequence = self._engine.open(self._namespace)
        self._sent = 0
        return self._sequence

    def _send(self, sequence: EngineSequence) -> None:
        self.handed_over = monotonic()
        for tokens, sampled in self.ledger.since(self._sent):
            sequence.extend(tokens, sampled=sampled)
        self._sent = len(self.ledger)

    def _sample(self, sequence: EngineSequence, leg: LegRequest) -> None:
        if leg.max_tokens == 0:
            return sequence.prefill()
        done = len(self.ledger) - leg.start
        return sequence.sample(
            leg.sampling,
            max_tokens=leg.max_tokens - done,
            stop_tokens=leg.stop_tokens,
            forced=None if leg.forced is None else leg.forced[done:],
        )

    def _over_already(self, leg: LegRequest) -> Stopped | None:
        """A leg whose last token stands in the ledger but whose end was lost with an engine or a server."""
        done = len(self.ledger) - leg.start
        if self._sequence is not None or done == 0:
            return None
        if self.ledger.tokens[-1] in leg.stop_tokens or (leg.forced is not None and done >= len(leg.forced)):
            return Stopped(0, "stop", 0.0)
        return Stopped(0, "length", 0.0) if done >= leg.max_tokens else None

    def _record(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Sampled):
                self.ledger.append(event.tokens, sampled=True)
                self._sent = len(self.ledger)
            elif isinstance(event, Stopped | Failed):
                self._leg = None
                if isinstance(event, Failed):
                    self._sequence = None
        return events
