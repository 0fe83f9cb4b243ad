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
from dataclasses import dataclass, field

from engine.kv import BlockPool, OutOfBlocks, Table
from engine.messages import (
    Began,
    Command,
    EngineConfig,
    EngineStatistics,
    Event,
    Extend,
    Failed,
    FailureCode,
    Fork,
    ModelInfo,
    Open,
    Pause,
    Prefilled,
    Release,
    Sample,
    Sampled,
    Step,
    Stopped,
    StopReason,
    Truncate,
)
from engine.outline import OutlineError, read_outline

REMEMBERED_FAILURES = 65536  # failed sequences whose commands may still be on their way: more than can be


@dataclass(slots=True, eq=False)
class PacedLeg:
    """From the first `Extend` or `Sample` after a stop to the next stop."""

    requested_at: float
    resumed: bool  # there was something in KV before it
    saying: list[int] | None = None  # all that the leg will sample; None: not told to sample
    end: StopReason = "stop"  # after the last of these
    began_at: float | None = None
    announce: bool = True  # the next tokens forwarded are the first of an extension
    prefilled: int = 0
    reused: int = 0
    prefill_seconds: float = 0.0
    decode_started_at: float = 0.0
    sampled: int = 0


@dataclass(slots=True, eq=False)
class PacedSequence:
    """A conversation's tokens and blocks."""

    number: int
    table: Table
    tokens: list[int] = field(default_factory=list)
    leg: PacedLeg | None = None

    @property
    def sampling(self) -> bool:
        """Whether it was told to sample and has not stopped since."""
        return self.leg is not None and self.leg.saying is not None

    @property
    def to_prefill(self) -> int:
        """Tokens to forward now: all that are not in KV, but for the last if there is nothing to sample."""
        return len(self.tokens) - self.table.length - (not self.sampling)


@dataclass(slots=True, eq=False)
class Pass:
    """Tokens on their way through the model that is not there."""

    began_at: float
    rows: dict[PacedSequence, int] = field(default_factory=dict)
    ends_at: float = 0.0


class PacedScheduler:
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
        self._max_context = min(config.max_context or outline.max_context, outline.max_context)
        kv_bytes_per_token = outline.kv_bytes_per_token(config.dtype)
        blocks = config.kv_memory // (kv_bytes_per_token * config.block_size)
        if blocks < 1:
            raise OutlineError(
                f"kv_memory of {config.kv_memory} bytes is less than a block of {config.block_size} tokens"
                f" of {kv_bytes_per_token} bytes each"
            )
        self._pool = BlockPool(blocks, config.block_size, prefix_cache=config.prefix_cache)
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
            max_context=self._max_context,
            kv_bytes_per_token=kv_bytes_per_token,
            kv_blocks=blocks,
            block_size=config.block_size,
            load_seconds=clock() - started,
            simulated=True,
        )
        self._now = clock()  # what was due until then is done
        self._stepped_at = self._now
        self._pass: Pass | None = None
        self._sequences: dict[int, PacedSequence] = {}
        self._failed: dict[int, None] = {}  # oldest first
        self._decoding: dict[int, PacedSequence] = {}
        self._resumed: dict[int, PacedSequence] = {}  # legs to prefill, in the order of their requests
        self._fresh: dict[int, PacedSequence] = {}
        self._events: list[Event] = []  # to go out with the next step
        self._steps = 0
        self._tokens_prefilled = 0
        self._tokens_reused = 0
        self._tokens_sampled = 0
        self._busy_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step, sooner or later, would do or say anything."""
        return bool(self._decoding or self._resumed or self._fresh or self._events)

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
        """Take commands in order; their work is done by the steps that follow.

        Raises KeyError for a sequence that is not open and ValueError for a command that its state does not
        allow: bugs of whoever sends them. Commands for a sequence that has failed are ignored, since they may
        have crossed the news.
        """
        self._catch_up()
        for command in commands:
            if command.sequence in self._failed:
                if isinstance(command, Fork):
                    self._lose(
                        command.child, "engine_error", f"sequence {command.sequence} was lost before it"
                    )
                continue
            match command:
                case Open(number, namespace):
                    self._check_unused(number)
                    self._sequences[number] = PacedSequence(number, self._pool.open(namespace))
                case Extend(number, tokens):
                    self._extend(self._sequences[number], tokens)
                case Sample():
                    self._sample(self._sequences[command.sequence], command)
                case Pause(number):
                    sequence = self._sequences[number]
                    if sequence.sampling:
                        self._withdraw(sequence)
                        self._stop(sequence, "paused")
                case Truncate(number, length):
                    self._truncate(self._sequences[number], length)
                case Fork(number, child):
                    self._fork(self._sequences[number], child)
                case Release(number):
                    self._release(self._sequences[number])
                    self._events = [event for event in self._events if event.sequence != number]

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
        running = len(self._decoding) + len(self._resumed) + len(self._fresh)
        return EngineStatistics(
            sequences_running=running,
            sequences_held=len(self._sequences) - running,
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

    def check_integrity(self) -> None:
        """Recount blocks and queues; AssertionError where the books are wrong."""
        self._pool.check_integrity([sequence.table for sequence in self._sequences.values()])
        for number, sequence in self._sequences.items():
            queues = (number in self._decoding) + (number in self._resumed) + (number in self._fresh)
            assert queues <= 1, "a sequence is in one queue at most"
            assert sequence.table.running == bool(queues), "running blocks are those of sequences in a queue"
            assert sequence.table.length < max(1, len(sequence.tokens)), "one token is kept back"
            if number in self._decoding:
                assert sequence.table.length == len(sequence.tokens) - 1, "decoding has one token to forward"
        for sequence, rows in self._pass.rows.items() if self._pass is not None else ():
            assert self._sequences[sequence.number] is sequence, "what is in the pass is open"
            assert rows <= sequence.to_prefill, "nothing is forwarded that is not to be"
        assert not self._failed.keys() & self._sequences.keys()

    # Commands

    def _check_unused(self, number: int) -> None:
        if number in self._sequences:
            raise ValueError(f"sequence {number} is open already")

    def _are_known(self, tokens: list[int]) -> bool:
        return min(tokens) >= 0 and max(tokens) < self.info.vocabulary

    def _extend(self, sequence: PacedSequence, tokens: list[int]) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be extended while it is sampling")
        if not tokens:
            return
        length = len(sequence.tokens) + len(tokens)
        if length > self._max_context:
            message = f"{length} tokens do not fit into a context of {self._max_context}"
            self._fail(sequence, "context_length_exceeded", message)
            return
        if not self._are_known(tokens):
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self.info.vocabulary - 1}")
            return
        sequence.tokens += tokens
        self._leg(sequence).announce = True
        self._queue(sequence)

    def _sample(self, sequence: PacedSequence, command: Sample) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} is sampling already")
        if not sequence.tokens:
            raise ValueError(f"sequence {sequence.number} has no tokens to sample after")
        forced = command.forced
        if forced is None:
            message = "the paced engine has no weights: it takes forced legs only, and this one is not"
            self._fail(sequence, "engine_error", message)
            return
        if forced and not self._are_known(forced):
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self.info.vocabulary - 1}")
            return
        allowed = max(0, min(command.max_tokens, self._max_context - len(sequence.tokens)))
        leg = self._leg(sequence)
        leg.saying = forced[:allowed]
        leg.end = "stop" if 0 < allowed >= len(forced) else "length"
        if not leg.saying:
            self._stop(sequence, leg.end)
            return
        leg.announce |= leg.began_at is None
        self._queue(sequence)

    def _truncate(self, sequence: PacedSequence, length: int) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be truncated while it is sampling")
        if not 0 <= length <= len(sequence.tokens):
            raise ValueError(
                f"sequence {sequence.number} has {len(sequence.tokens)} tokens and cannot be cut to {length}"
            )
        self._withdraw(sequence)
        del sequence.tokens[length:]
        self._pool.truncate(sequence.table, max(0, min(sequence.table.length, length - 1)))
        self._queue(sequence)

    def _fork(self, sequence: PacedSequence, child_number: int) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be forked while it is sampling")
        self._check_unused(child_number)
        self._withdraw(sequence)
        table = self._pool.fork(sequence.table)
        child = self._sequences[child_number] = PacedSequence(child_number, table, sequence.tokens.copy())
        if child.to_prefill > 0:
            self._leg(child)
            self._queue(child)

    def _release(self, sequence: PacedSequence) -> None:
        self._withdraw(sequence)
        for queue in (self._decoding, self._resumed, self._fresh):
            queue.pop(sequence.number, None)
        del self._sequences[sequence.number]
        self._pool.release(sequence.table)

    def _withdraw(self, sequence: PacedSequence) -> None:
        """Take a sequence out of the pass. Its rows are not written, and go into a later one if they must."""
        if self._pass is not None and self._pass.rows.pop(sequence, None) is not None:
            self._pool.truncate(sequence.table, sequence.table.length)

    def _fail(self, sequence: PacedSequence, code: FailureCode, message: str) -> None:
        self._release(sequence)
        self._lose(sequence.number, code, message)

    def _lose(self, number: int, code: FailureCode, message: str) -> None:
        self._events.append(Failed(number, code, message))
        self._failed[number] = None
        if len(self._failed) > REMEMBERED_FAILURES:
            del self._failed[next(iter(self._failed))]

    def _leg(self, sequence: PacedSequence) -> PacedLeg:
        if sequence.leg is None:
            sequence.leg = PacedLeg(requested_at=self._now, resumed=sequence.table.length > 0)
        return sequence.leg

    def _queue(self, sequence: PacedSequence) -> None:
        """Put a sequence into the queue it belongs in, after a command."""
        waiting = sequence.to_prefill > 0
        queue = self._resumed if sequence.leg is not None and sequence.leg.resumed else self._fresh
        if waiting:
            queue[sequence.number] = sequence
        else:
            queue.pop(sequence.number, None)
        self._pool.set_running(sequence.table, waiting)

    def _stop(self, sequence: PacedSequence, reason: StopReason) -> None:
        """End the leg of a sequence told to sample. What it was given before goes on being prefilled."""
        leg = sequence.leg
        assert leg is not None
        decode_seconds = self._now - leg.decode_started_at if leg.sampled else 0.0
        self._events.append(Stopped(sequence.number, reason, decode_seconds))
        self._decoding.pop(sequence.number, None)
        leg.saying = None
        if leg.sampled:
            sequence.leg = None
        self._queue(sequence)

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

    def _grow(self, sequence: PacedSequence, length: int) -> bool:
        """Make room for `length` tokens; False: there is none, and the sequence has failed."""
        try:
            self._pool.grow(sequence.table, length, expected=len(sequence.tokens))
        except OutOfBlocks as error:
            self._fail(sequence, "out_of_kv", f"no room for {length} tokens: {error}")
            return False
        return True
