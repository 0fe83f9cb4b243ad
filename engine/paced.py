"""The paced engine: the scheduler's verbs and events at set rates, without a model.

It knows token ids, blocks and a clock; no weights, no tensors, no processes. It takes forced legs only. What
is simulated is time alone: its books are those of the real scheduler, so what a server sees of it differs in
nothing but when.

Strategy. Nothing here sleeps. A step does what has become due by the clock since the last one, and
`seconds_until_due` says how long the next would do nothing, so whoever calls `step` can wait for commands
meanwhile. Every due time is computed from the beginning of its leg, never from the step before: token k of a
leg (from 0) is due k / decode after its prefill, so a step that comes late brings several tokens and the rate
holds. A pass of prefills takes tokens / prefill seconds, and the next pass begins where the last one ended.
Sequences decode beside the passes, each at its own rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.books import Books
from engine.commands import obey
from engine.legs import Leg, Sequence
from engine.messages import Command, EngineConfig, EngineStatistics, Sample, Step
from engine.outline import ConfigFile, read_outline, resolve


class Pass(NamedTuple):
    """When tokens went into the model that is not there, and when they come out of it, in seconds."""

    began_at: float
    ends_at: float


class PacedScheduler:
    """Sequences of a model that has only an outline and a pace.

    `clock` tells seconds and never goes back. Raises ModelError if the checkpoint cannot be used and
    ValueError for a configuration without a pace.
    """

    def __init__(self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        if config.pace is None:
            raise ValueError("the paced engine has to be told its pace")
        started = clock()
        self._pace = config.pace
        self._clock = clock
        folder = resolve(config.model, weights=False)
        dtype = "float32" if config.dtype == "auto" else config.dtype
        self._books = Books(config, read_outline(ConfigFile(folder)), dtype)
        self.info = self._books.describe(
            path=f"simulated: no weights, {self._pace.decode:g} tokens/s decoded in each sequence,"
            f" {self._pace.prefill:g} tokens/s prefilled in all",
            folder=str(folder),
            device="none",
            parameters=0,
            load_seconds=clock() - started,
            simulated=True,
        )
        self._now = self._stepped_at = started  # what was due until then is done
        self._pass: Pass | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step, sooner or later, would do or say anything."""
        return self._books.has_work

    @property
    def seconds_until_due(self) -> float:
        """How long a step would do nothing, unless commands come first; 0 if there is something to do.

        Steps that nobody asked for are at least `step` apart, so that tokens of many sequences come together.
        """
        books = self._books
        has_room = len(books.decoding) < books.config.max_batch
        if books.events or (self._pass is None and has_room and (books.resumed or books.fresh)):
            return 0.0
        due = [self._due(sequence.leg) for sequence in books.decoding.values() if sequence.leg is not None]
        if self._pass is not None:
            due.append(self._pass.ends_at)
        if not due:
            return 0.0
        return max(0.0, max(min(due), self._stepped_at + self._pace.step) - self._clock())

    def submit(self, commands: Iterable[Command]) -> None:
        """Do what was due before, then obey commands in order. Raises as `obey` does."""
        self._catch_up()
        for command in commands:
            obey(self._books, command, self._now)
            if isinstance(command, Sample) and command.forced is None:
                self._refuse(command.sequence)

    def step(self) -> Step:
        """Do all that is due, and begin what waits. Never sleeps."""
        self._catch_up()
        if self._pass is None:
            self._begin_pass(self._now)
        self._stepped_at = self._now
        self._books.steps += bool(self._books.events)
        return self._books.report(self._clock() - self._now)

    def statistics(self) -> EngineStatistics:
        """A picture of now; costs nothing that grows with the number of sequences or blocks."""
        return self._books.statistics()

    def check_integrity(self) -> None:
        """Recount blocks and queues; AssertionError where the books are wrong."""
        self._books.check_integrity()

    def _refuse(self, number: int) -> None:
        """Fail a sequence that was told to sample what there is no model for, unless it has stopped since."""
        sequence = self._books.sequences.get(number)
        if sequence is not None and sequence.sampling:
            message = "the paced engine has no weights: it takes forced legs only, and this one is not"
            self._books.fail(sequence, "engine_error", message)

    # Time

    def _catch_up(self) -> None:
        """Do what has become due since the last time."""
        self._now = self._clock()
        while self._pass is not None and self._pass.ends_at <= self._now:
            self._end_pass(self._pass)
            self._begin_pass(self._pass.ends_at)
        for sequence in list(self._books.decoding.values()):
            self._decode_due(sequence)

    def _begin_pass(self, at: float) -> None:
        """Begin a pass with what waits, if anything does."""
        books = self._books
        books.begin_pass()
        books.copies.clear()  # there is nothing to copy
        books.announce_pass(at)
        seconds = sum(books.under_way.values()) / self._pace.prefill
        self._pass = Pass(at, at + max(seconds, self._pace.step)) if books.under_way else None

    def _end_pass(self, ended: Pass) -> None:
        """Enter a pass, and the first tokens of those who begin to decode with it."""
        books = self._books
        sequences = list(books.under_way)
        books.end_pass(ended.ends_at - ended.began_at, ended.ends_at)
        for sequence in sequences:
            if sequence.number in books.decoding:
                self._say(sequence, 1)

    def _due(self, leg: Leg, ahead: int = 0) -> float:
        """When the next token of a leg is due, or the one that is so many `ahead` of it."""
        return leg.decode_started_at + (leg.sampled + ahead) / self._pace.decode

    def _decode_due(self, sequence: Sequence) -> None:
        """Sample what a sequence is to have said by now, as far as there are blocks for it."""
        leg, table, books = sequence.leg, sequence.table, self._books
        assert leg is not None
        left = self._left(sequence, leg)
        due = 0
        while due < left and self._due(leg, due) <= self._now:
            due += 1
        while due:
            room = table.blocks * books.pool.block_size - table.length
            if room == 0:
                if not books.grow(sequence, table.length + 1):
                    return
                room = books.pool.block_size
            said = min(room, due)
            self._say(sequence, said)
            due -= said

    def _left(self, sequence: Sequence, leg: Leg) -> int:
        """How many tokens are left to sample in a leg."""
        sample = leg.sample
        assert sample is not None
        assert sample.forced is not None
        allowed = min(len(sample.forced), sample.max_tokens) - leg.sampled
        return min(allowed, self._books.max_context - len(sequence.tokens))

    def _say(self, sequence: Sequence, count: int) -> None:
        """Sample the next `count` tokens of a leg."""
        leg = sequence.leg
        assert leg is not None
        assert leg.sample is not None
        assert leg.sample.forced is not None
        tokens = leg.sample.forced[leg.sampled : leg.sampled + count]
        self._books.sampled(sequence, tokens, self._now)
