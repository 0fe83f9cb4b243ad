"""What the paced engine was told, and what it keeps of it: sequences, legs, queues, blocks.

It knows neither rates nor clocks: what time it is, `engine.paced` says. What each command means, what is
refused and what fails is as in the real scheduler, word for word but for legs that are not forced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.kv import BlockPool, OutOfBlocks, Table
from engine.messages import (
    Command,
    Event,
    Extend,
    Failed,
    FailureCode,
    Fork,
    Open,
    Pause,
    Release,
    Sample,
    Stopped,
    StopReason,
    Truncate,
)

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


class PacedBooks:
    """Sequences and the blocks that they have; a subclass makes the time pass."""

    def __init__(self, pool: BlockPool, *, vocabulary: int, max_context: int, now: float) -> None:
        self._pool = pool
        self._vocabulary = vocabulary
        self._max_context = max_context
        self._now = now  # seconds; what was due until then is done
        self._pass: Pass | None = None
        self._sequences: dict[int, PacedSequence] = {}
        self._failed: dict[int, None] = {}  # oldest first
        self._decoding: dict[int, PacedSequence] = {}
        self._resumed: dict[int, PacedSequence] = {}  # legs to prefill, in the order of their requests
        self._fresh: dict[int, PacedSequence] = {}
        self._events: list[Event] = []  # to go out with the next step

    @property
    def has_work(self) -> bool:
        """Whether a step, sooner or later, would do or say anything."""
        return bool(self._decoding or self._resumed or self._fresh or self._events)

    @property
    def running(self) -> int:
        """Sequences that prefill or sample, or wait for it."""
        return len(self._decoding) + len(self._resumed) + len(self._fresh)

    @property
    def held(self) -> int:
        """Sequences at rest."""
        return len(self._sequences) - self.running

    def obey(self, commands: Iterable[Command]) -> None:
        """Enter commands in order.

        Raises KeyError for a sequence that is not open and ValueError for a command that its state does not
        allow: bugs of whoever sends them. Commands for a sequence that has failed are ignored, since they may
        have crossed the news.
        """
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
        return min(tokens) >= 0 and max(tokens) < self._vocabulary

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
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self._vocabulary - 1}")
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
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self._vocabulary - 1}")
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

    def _grow(self, sequence: PacedSequence, length: int) -> bool:
        """Make room for `length` tokens; False: there is none, and the sequence has failed."""
        try:
            self._pool.grow(sequence.table, length, expected=len(sequence.tokens))
        except OutOfBlocks as error:
            self._fail(sequence, "out_of_kv", f"no room for {length} tokens: {error}")
            return False
        return True
