"""The engine: commands in, one step of work for all sequences, events out.

A plain synchronous object. It knows token ids, blocks and steps; not text, processes or sockets.

Strategy. Each step makes one batch: a row for every decoding sequence, and up to ``prefill_chunk`` rows of
the tokens that wait to be prefilled, those of resumed legs before those of new prompts. One forward pass over
all rows, one draw for every sequence whose rows reach its end.

What is held of a sequence: all its tokens, and the keys and values of all but at least the last. The last
token is kept back so that a leg always starts with a forward pass, which gives the logits to sample from: the
token sampled last and what was appended go through together, and an ``Extend`` with no ``Sample`` behind it
is prefilled except for its last token. Nothing done per step or per extension is proportional to the history;
penalties, which need counts of it, are the exception, once a leg.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.batch import Batch, Leg, Sequence
from engine.checkpoint import ModelError
from engine.kv import BlockPool, OutOfBlocks
from engine.loading import load
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
from engine.model import Part
from engine.sampler import History, has_penalties, sample

REMEMBERED_FAILURES = 65536  # failed sequences whose commands may still be on their way: more than can be


class Scheduler:
    """A loaded model and its sequences. ModelError if the model cannot be loaded."""

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        if min(config.block_size, config.max_batch, config.prefill_chunk) < 1:
            raise ValueError("block_size, max_batch and prefill_chunk must be at least 1")
        self.config = config
        self._decoder, folder = load(config)
        shape = self._decoder.config
        self._max_context = min(config.max_context or shape.max_context, shape.max_context)
        kv_bytes_per_token = self._decoder.kv_bytes_per_token
        blocks = config.kv_memory // (kv_bytes_per_token * config.block_size)
        if blocks < 1:
            raise ModelError(
                f"kv_memory of {config.kv_memory} bytes is less than a block of {config.block_size} tokens"
                f" of {kv_bytes_per_token} bytes each"
            )
        self._pool = BlockPool(blocks, config.block_size, prefix_cache=config.prefix_cache)
        self._kv = self._decoder.kv_tensors(blocks * config.block_size)
        self.info = ModelInfo(
            model=config.model,
            architecture=shape.architecture,
            path=f"own decoder, which runs {shape.architecture}",
            folder=folder,
            device=str(self._decoder.device),
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            parameters=self._decoder.parameters,
            vocabulary=shape.vocabulary,
            max_context=self._max_context,
            kv_bytes_per_token=kv_bytes_per_token,
            kv_blocks=blocks,
            block_size=config.block_size,
            load_seconds=time.monotonic() - started,
        )
        self._sequences: dict[int, Sequence] = {}
        self._failed: dict[int, None] = {}  # oldest first
        self._decoding: dict[int, Sequence] = {}
        self._resumed: dict[int, Sequence] = {}  # legs to prefill, in the order of their requests
        self._fresh: dict[int, Sequence] = {}
        self._events: list[Event] = []  # to go out with the next step
        self._steps = 0
        self._tokens_prefilled = 0
        self._tokens_reused = 0
        self._tokens_sampled = 0
        self._busy_seconds = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say anything."""
        return bool(self._decoding or self._resumed or self._fresh or self._events)

    def submit(self, commands: Iterable[Command]) -> None:
        """Take commands in order; their work is done by the steps that follow.

        Raises KeyError for a sequence that is not open and ValueError for a command that its state does not
        allow: bugs of whoever sends them. Commands for a sequence that has failed are ignored, since they may
        have crossed the news.
        """
        now = time.monotonic()
        for command in commands:
            if command.sequence in self._failed:
                self._after_failure(command)
                continue
            match command:
                case Open(number, namespace):
                    self._check_unused(number)
                    self._sequences[number] = Sequence(number, self._pool.open(namespace))
                case Extend():
                    self._extend(self._sequences[command.sequence], command, now)
                case Sample():
                    self._sample(self._sequences[command.sequence], command, now)
                case Pause(number):
                    sequence = self._sequences[number]
                    if sequence.sampling:
                        self._stop(sequence, "paused")
                case Truncate(number, length):
                    self._truncate(self._sequences[number], length)
                case Fork(number, child):
                    self._fork(self._sequences[number], child, now)
                case Release(number):
                    self._release(self._sequences[number])
                    self._events = [event for event in self._events if event.sequence != number]

    def step(self) -> Step:
        """Do one step of work, if there is any. An exception is a bug of ours and leaves nothing usable."""
        started = time.monotonic()
        batch = self._schedule()
        if batch.parts:
            self._begin(batch)
            logits = self._decoder.forward(
                batch.tokens,
                batch.positions,
                batch.slots,
                batch.parts,
                batch.logit_rows if len(batch.logit_rows) < len(batch.tokens) else None,
                self._kv,
            )
            chosen = sample(logits, batch.draws()) if batch.sampling else []
            self._settle(batch, chosen, started)
            self._steps += 1
        events, self._events = self._events, []
        self._busy_seconds += time.monotonic() - started
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
        assert not self._failed.keys() & self._sequences.keys()

    # Commands

    def _check_unused(self, number: int) -> None:
        if number in self._sequences:
            raise ValueError(f"sequence {number} is open already")

    def _are_known(self, tokens: list[int]) -> bool:
        return min(tokens) >= 0 and max(tokens) < self.info.vocabulary

    def _extend(self, sequence: Sequence, command: Extend, now: float) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be extended while it is sampling")
        if not command.tokens:
            return
        length = len(sequence.tokens) + len(command.tokens)
        if length > self._max_context:
            message = f"{length} tokens do not fit into a context of {self._max_context}"
            self._fail(sequence, "context_length_exceeded", message)
            return
        if not self._are_known(command.tokens):
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self.info.vocabulary - 1}")
            return
        if command.sampled:
            sequence.mark_sampled(len(sequence.tokens), length)
        sequence.tokens += command.tokens
        self._leg(sequence, now).announce = True
        self._queue(sequence)

    def _sample(self, sequence: Sequence, command: Sample, now: float) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} is sampling already")
        if not sequence.tokens:
            raise ValueError(f"sequence {sequence.number} has no tokens to sample after")
        if command.forced and not self._are_known(command.forced):
            self._fail(sequence, "engine_error", f"token ids must be in 0 to {self.info.vocabulary - 1}")
            return
        leg = self._leg(sequence, now)
        leg.sample = command
        leg.stop_tokens = frozenset(command.stop_tokens)
        if command.max_tokens < 1 or len(sequence.tokens) >= self._max_context:
            self._stop(sequence, "length")
        elif command.forced is not None and not command.forced:
            self._stop(sequence, "stop")
        else:
            if has_penalties(command.sampling):
                sampled = [token for a, b in sequence.sampled_spans for token in sequence.tokens[a:b]]
                leg.history = History.of(sequence.tokens, sampled, self.info.vocabulary, self._decoder.device)
            leg.announce |= leg.began_at is None
            self._queue(sequence)

    def _truncate(self, sequence: Sequence, length: int) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be truncated while it is sampling")
        if not 0 <= length <= len(sequence.tokens):
            raise ValueError(
                f"sequence {sequence.number} has {len(sequence.tokens)} tokens and cannot be cut to {length}"
            )
        del sequence.tokens[length:]
        while sequence.sampled_spans and sequence.sampled_spans[-1][1] > length:
            sequence.sampled_spans[-1][1] = length
            if sequence.sampled_spans[-1][0] >= length:
                sequence.sampled_spans.pop()
        self._pool.truncate(sequence.table, max(0, min(sequence.table.length, length - 1)))
        self._queue(sequence)

    def _fork(self, sequence: Sequence, child_number: int, now: float) -> None:
        if sequence.sampling:
            raise ValueError(f"sequence {sequence.number} cannot be forked while it is sampling")
        self._check_unused(child_number)
        child = self._sequences[child_number] = Sequence(
            child_number,
            self._pool.fork(sequence.table),
            sequence.tokens.copy(),
            [span.copy() for span in sequence.sampled_spans],
        )
        if child.to_prefill > 0:
            self._leg(child, now)
            self._queue(child)

    def _release(self, sequence: Sequence) -> None:
        for queue in (self._decoding, self._resumed, self._fresh):
            queue.pop(sequence.number, None)
        del self._sequences[sequence.number]
        self._pool.release(sequence.table)

    def _fail(self, sequence: Sequence, code: FailureCode, message: str) -> None:
        self._release(sequence)
        self._lose(sequence.number, code, message)

    def _after_failure(self, command: Command) -> None:
        """A command crossed the news that its sequence has failed: nothing to do, but to fail its forks."""
        match command:
            case Fork(number, child):
                self._lose(child, "engine_error", f"sequence {number}, to be forked, has failed before")
            case Release(number):
                del self._failed[number]

    def _lose(self, number: int, code: FailureCode, message: str) -> None:
        self._events.append(Failed(number, code, message))
        self._failed[number] = None
        if len(self._failed) > REMEMBERED_FAILURES:
            del self._failed[next(iter(self._failed))]

    def _leg(self, sequence: Sequence, now: float) -> Leg:
        if sequence.leg is None:
            sequence.leg = Leg(requested_at=now, resumed=sequence.table.length > 0)
        return sequence.leg

    def _queue(self, sequence: Sequence) -> None:
        """Put a sequence into the queue it belongs in, after a command."""
        waiting = sequence.to_prefill > 0
        queue = self._resumed if sequence.leg is not None and sequence.leg.resumed else self._fresh
        if waiting:
            queue[sequence.number] = sequence
        else:
            queue.pop(sequence.number, None)
        self._pool.set_running(sequence.table, waiting)

    def _stop(self, sequence: Sequence, reason: StopReason) -> None:
        """End the leg of a sequence told to sample. What it was given before goes on being prefilled."""
        leg = sequence.leg
        assert leg is not None
        decode_seconds = time.monotonic() - leg.decode_started_at if leg.sampled else 0.0
        self._events.append(Stopped(sequence.number, reason, decode_seconds))
        self._decoding.pop(sequence.number, None)
        leg.sample = leg.history = None
        if leg.sampled:
            sequence.leg = None
        self._queue(sequence)

    # Steps

    def _schedule(self) -> Batch:
        batch = Batch()
        pool, block_size = self._pool, self.config.block_size
        for sequence in list(self._decoding.values()):
            table = sequence.table
            position = table.length
            if position == table.blocks * block_size and not self._grow(sequence, position + 1):
                continue
            runs = pool.slots(table, 0, position + 1)
            batch.parts.append(Part(len(batch.tokens), 1, runs))
            batch.tokens.append(sequence.tokens[position])
            batch.positions.append(position)
            batch.slots.append(runs[-1][1] - 1)
            batch.decoding.append(sequence)
        batch.sampling += batch.decoding
        batch.logit_rows += range(len(batch.decoding))
        room = self.config.prefill_chunk
        for sequence in [*self._resumed.values(), *self._fresh.values()]:
            if room == 0 or len(batch.sampling) == self.config.max_batch:
                break
            room -= self._schedule_prefill(batch, sequence, room)
        return batch

    def _schedule_prefill(self, batch: Batch, sequence: Sequence, room: int) -> int:
        """Put up to `room` tokens of a sequence into the batch; how many."""
        leg, table, pool = sequence.leg, sequence.table, self._pool
        assert leg is not None
        if not table.blocks:
            leg.reused += pool.match(table, sequence.tokens)
            self._tokens_reused += table.length
            if sequence.to_prefill <= 0:
                self._queue(sequence)
                return 0
        start = table.length
        rows = min(room, sequence.to_prefill)
        if not self._grow(sequence, start + rows):
            return 0
        if leg.announce:
            leg.announce = False
            batch.beginning.append(sequence)
        first_row = len(batch.tokens)
        for run_start, run_stop in pool.slots(table, start, start + rows):
            batch.slots += range(run_start, run_stop)
        batch.parts.append(Part(first_row, rows, pool.slots(table, 0, start + (rows == 1))))
        batch.tokens += sequence.tokens[start : start + rows]
        batch.positions += range(start, start + rows)
        batch.prefilling.append((sequence, rows))
        if leg.sample is not None and rows == sequence.to_prefill:
            batch.sampling.append(sequence)
            batch.logit_rows.append(first_row + rows - 1)
        return rows

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Make room for `length` tokens; False: there is none, and the sequence has failed."""
        try:
            copy = self._pool.grow(sequence.table, length, expected=len(sequence.tokens))
        except OutOfBlocks as error:
            self._fail(sequence, "out_of_kv", f"no room for {length} tokens: {error}")
            return False
        if copy is not None:
            self._kv.copy_block(copy, self.config.block_size)
        return True

    def _begin(self, batch: Batch) -> None:
        """Say whose extensions enter the forward pass that comes next."""
        now = time.monotonic()
        for sequence in batch.beginning:
            leg = sequence.leg
            assert leg is not None
            leg.began_at = leg.began_at or now
            self._events.append(Began(sequence.number, now))

    def _settle(self, batch: Batch, chosen: list[int], started: float) -> None:
        """Enter what the forward pass wrote and what was drawn."""
        now = time.monotonic()
        for sequence in batch.decoding:
            self._pool.wrote(sequence.table, sequence.tokens, sequence.table.length + 1)
        for sequence, rows in batch.prefilling:
            leg = sequence.leg
            assert leg is not None
            self._pool.wrote(sequence.table, sequence.tokens, sequence.table.length + rows)
            self._tokens_prefilled += rows
            leg.prefilled += rows
            leg.prefill_seconds += now - started
            if sequence.to_prefill == 0:
                self._prefilled(sequence, leg, now)
        for sequence, token in zip(batch.sampling, chosen, strict=True):
            self._sampled(sequence, token)

    def _prefilled(self, sequence: Sequence, leg: Leg, now: float) -> None:
        """All is forwarded that was to be: on to decoding, or to rest."""
        if leg.sample is None:
            self._queue(sequence)
            return
        del (self._resumed if leg.resumed else self._fresh)[sequence.number]
        self._decoding[sequence.number] = sequence
        leg.decode_started_at = now
        assert leg.began_at is not None
        queue_seconds = leg.began_at - leg.requested_at
        self._events.append(
            Prefilled(sequence.number, leg.prefilled, leg.reused, queue_seconds, leg.prefill_seconds)
        )

    def _sampled(self, sequence: Sequence, token: int) -> None:
        leg = sequence.leg
        assert leg is not None
        assert leg.sample is not None
        forced = leg.sample.forced
        if forced is not None:
            token = forced[leg.sampled]
        leg.sampled += 1
        self._tokens_sampled += 1
        sequence.tokens.append(token)
        length = len(sequence.tokens)
        sequence.mark_sampled(length - 1, length)
        if leg.history is not None:
            leg.history.add(token)
        self._events.append(Sampled(sequence.number, [token]))
        if leg.sampled == len(forced) if forced is not None else token in leg.stop_tokens:
            self._stop(sequence, "stop")
        elif leg.sampled >= leg.sample.max_tokens or length >= self._max_context:
            self._stop(sequence, "length")
