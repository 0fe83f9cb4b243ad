"""The paced engine: the scheduler's verbs and events at set rates, without a model.

It knows token ids, blocks and a clock; no weights, no tensors, no processes. It takes forced legs only. What
is simulated is time alone: blocks, the prefix index, the order of work and all counts are kept as by the real
scheduler, so what a server sees of it differs in nothing but when.

Strategy. Nothing here sleeps. A step does what has become due by the clock since the last one, and
`seconds_until_due` says how long the next would do nothing, so whoever calls `step` can wait for commands
meanwhile. Every due time is computed from the beginning of its leg, never from the step before: token k of a
leg (from 0) is due k / decode after its prefill, so a step that comes late brings several tokens and the rate
holds. Prefill goes in *passes*, each like a forward pass of the real scheduler: up to `prefill_chunk` tokens,
those of resumed legs first, take tokens / prefill seconds, and the next pass begins where the last one ended.
Sequences decode beside the passes, each at its own rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.kv import BlockPool
from engine.messages import (
    Began,
    Command,
    EngineConfig,
    EngineStatistics,
    ModelInfo,
    Prefilled,
    Sampled,
    Step,
)
from engine.outline import OutlineError, read_outline
from engine.paced_books import PacedBooks, PacedLeg, PacedSequence, Pass


class PacedScheduler(PacedBooks):
    """Sequences of a model that has only a shape and a pace.

    `clock` tells seconds and never goes back. Raises OutlineError if the checkpoint cannot be used and
    ValueError for a configuration that could never work.
    """

    def __init__(self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        if config.pace is None:
            raise ValueError("the paced engine has to be told its pace")
        if min(config.block_size, config.max_batch, config.prefill_chunk) < 1:
            raise ValueError("block_size, max_batch and prefill_chunk must be at least 1")
        started = clock()
        self.config = config
        self._pace = config.pace
        self._clock = clock
        outline = read_outline(config.model)
        max_context = min(config.max_context or outline.max_context, outline.max_context)
        kv_bytes_per_token = outline.kv_bytes_per_token(config.dtype)
        blocks = config.kv_memory // (kv_bytes_per_token * config.block_size)
        if blocks < 1:
            raise OutlineError(
                f"kv_memory of {config.kv_memory} bytes is less than a block of {config.block_size} tokens"
                f" of {kv_bytes_per_token} bytes each"
            )
        super().__init__(
            BlockPool(blocks, config.block_size, prefix_cache=config.prefix_cache),
            vocabulary=outline.vocabulary,
            max_context=max_context,
            now=started,
        )
        self.info = ModelInfo(
            model=config.model,
            architecture=outline.architecture,
            path=f"simulated: no weights, {self._pace.decode:g} tokens/s decoded in each sequence,"
            f" {self._pace.prefill:g} tokens/s prefilled in all",
            folder=str(outline.folder),
            device="none",
            dtype="float32" if config.dtype == "auto" else config.dtype,
            parameters=0,
            vocabulary=outline.vocabulary,
            max_context=max_context,
            kv_bytes_per_token=kv_bytes_per_token,
            kv_blocks=blocks,
            block_size=config.block_size,
            load_seconds=clock() - started,
            simulated=True,
        )
        self._stepped_at = self._now
        self._steps = 0
        self._tokens_prefilled = 0
        self._tokens_reused = 0
        self._tokens_sampled = 0
        self._busy_seconds = 0.0

    @property
    def seconds_until_due(self) -> float:
        """How long a step would do nothing, unless commands come first; 0 if there is something to do.

        Steps that nobody asked for are at least `step` apart, so that tokens of many sequences come together.
        """
        if self._events or (self._pass is None and self._has_room and (self._resumed or self._fresh)):
            return 0.0
        due = [self._due(sequence.leg) for sequence in self._decoding.values() if sequence.leg is not None]
        if self._pass is not None:
            due.append(self._pass.ends_at)
        if not due:
            return 0.0
        return max(0.0, max(min(due), self._stepped_at + self._pace.step) - self._clock())

    def submit(self, commands: Iterable[Command]) -> None:
        """Do what was due before, then enter commands in order. Raises as `obey` does."""
        self._catch_up()
        self.obey(commands)

    def step(self) -> Step:
        """Do all that is due, and begin what waits. Never sleeps."""
        self._catch_up()
        if self._pass is None:
            self._begin_pass(self._now)
        self._stepped_at = self._now
        events, self._events = self._events, []
        self._steps += bool(events)
        self._busy_seconds += self._clock() - self._now
        return Step(events, self.statistics())

    def statistics(self) -> EngineStatistics:
        """A picture of now; costs nothing that grows with the number of sequences or blocks."""
        pool = self._pool
        return EngineStatistics(
            sequences_running=self.running,
            sequences_held=self.held,
            blocks_total=pool.blocks,
            blocks_running=pool.running_blocks,
            blocks_held=pool.held_blocks,
            blocks_cached=pool.cached_blocks,
            blocks_free=pool.free_blocks,
            extents_per_sequence=pool.extents / pool.tables if pool.tables else 0.0,
            steps=self._steps,
            tokens_prefilled=self._tokens_prefilled,
            tokens_reused=self._tokens_reused,
            tokens_sampled=self._tokens_sampled,
            busy_seconds=self._busy_seconds,
        )

    # Time

    def _catch_up(self) -> None:
        """Do what has become due since the last time."""
        self._now = self._clock()
        while self._pass is not None and self._pass.ends_at <= self._now:
            self._end_pass(self._pass)
            self._begin_pass(self._pass.ends_at)
        for sequence in list(self._decoding.values()):
            self._decode_due(sequence)

    def _due(self, leg: PacedLeg) -> float:
        """When the next token of a leg is due."""
        return leg.decode_started_at + leg.sampled / self._pace.decode

    @property
    def _has_room(self) -> bool:
        return len(self._decoding) < self.config.max_batch

    def _begin_pass(self, at: float) -> None:
        """Begin a pass with what waits, if anything does."""
        started = Pass(at)
        room = self.config.prefill_chunk
        ready = len(self._decoding)  # how many will decode when the pass is over
        for sequence in [*self._resumed.values(), *self._fresh.values()]:
            if room == 0 or ready == self.config.max_batch:
                break
            rows = self._begin_prefill(sequence, room, at)
            if rows:
                started.rows[sequence] = rows
                room -= rows
                ready += sequence.sampling and rows == sequence.to_prefill
        seconds = (self.config.prefill_chunk - room) / self._pace.prefill
        started.ends_at = at + max(seconds, self._pace.step)
        self._pass = started if started.rows else None

    def _begin_prefill(self, sequence: PacedSequence, room: int, at: float) -> int:
        """Begin with up to `room` tokens of a sequence; how many."""
        leg, table = sequence.leg, sequence.table
        assert leg is not None
        if not table.blocks:
            leg.reused += self._pool.match(table, sequence.tokens)
            self._tokens_reused += table.length
            if sequence.to_prefill <= 0:
                self._queue(sequence)
                return 0
        rows = min(room, sequence.to_prefill)
        if not self._grow(sequence, table.length + rows):
            return 0
        if leg.announce:
            leg.announce = False
            leg.began_at = at if leg.began_at is None else leg.began_at
            self._events.append(Began(sequence.number, at))
        return rows

    def _end_pass(self, ended: Pass) -> None:
        for sequence, rows in ended.rows.items():
            leg = sequence.leg
            assert leg is not None
            self._pool.wrote(sequence.table, sequence.tokens, sequence.table.length + rows)
            self._tokens_prefilled += rows
            leg.prefilled += rows
            leg.prefill_seconds += ended.ends_at - ended.began_at
            if sequence.to_prefill == 0:
                self._prefilled(sequence, leg, ended.ends_at)

    def _prefilled(self, sequence: PacedSequence, leg: PacedLeg, at: float) -> None:
        """All is forwarded that was to be: on to decoding, or to rest."""
        if leg.saying is None:
            self._queue(sequence)
            return
        del (self._resumed if leg.resumed else self._fresh)[sequence.number]
        self._decoding[sequence.number] = sequence
        leg.decode_started_at = at
        assert leg.began_at is not None
        queue_seconds = leg.began_at - leg.requested_at
        self._events.append(
            Prefilled(sequence.number, leg.prefilled, leg.reused, queue_seconds, leg.prefill_seconds)
        )
        self._sampled(sequence, leg, 1)

    def _decode_due(self, sequence: PacedSequence) -> None:
        """Sample what a sequence is to have said by now, as far as there are blocks for it."""
        leg, table = sequence.leg, sequence.table
        assert leg is not None
        assert leg.saying is not None
        due = leg.sampled
        while due < len(leg.saying) and leg.decode_started_at + due / self._pace.decode <= self._now:
            due += 1
        while leg.sampled < due:
            room = table.blocks * self.config.block_size - table.length
            if room == 0:
                if not self._grow(sequence, table.length + 1):
                    return
                room = self.config.block_size
            self._sampled(sequence, leg, min(room, due - leg.sampled))

    def _sampled(self, sequence: PacedSequence, leg: PacedLeg, count: int) -> None:
        """Sample `count` tokens; all but the last of the sequence are then in KV."""
        assert leg.saying is not None
        tokens = leg.saying[leg.sampled : leg.sampled + count]
        sequence.tokens += tokens
        self._pool.wrote(sequence.table, sequence.tokens, len(sequence.tokens) - 1)
        leg.sampled += count
        self._tokens_sampled += count
        self._events.append(Sampled(sequence.number, tokens))
        if leg.sampled == len(leg.saying):
            self._stop(sequence, leg.end)
