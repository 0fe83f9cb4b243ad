"""What a scheduler keeps: sequences, their queues and blocks, what is on its way through the model, counts.

It knows neither clocks nor how logits are made, and imports no torch: the real scheduler and the paced one
keep the same books, so what they say differs in nothing but times and tokens. `engine.commands` enters what
the server says, a scheduler what comes of it; times are told by them.

Strategy. A sequence with tokens to prefill waits among the resumed legs or the fresh ones; one that has been
prefilled and samples is decoding; any other is held. A *pass* is the tokens that go through the model
together: up to ``prefill_chunk`` of those that wait, those of resumed legs before those of new prompts.
Whoever leaves during a pass is taken out of it, and nothing of it is written.

All tokens of a sequence are kept, and the keys and values of all but at least the last. The last is kept back
so that a leg always starts with a forward pass, which gives the logits to sample from: the token sampled last
and what was appended go through together, and an ``Extend`` with no ``Sample`` behind it is prefilled except
for its last token. Nothing done per step or per extension is proportional to the history.
"""

from __future__ import annotations

from engine.kv import BlockCopy, BlockPool, OutOfBlocks
from engine.legs import Leg, Sequence
from engine.messages import (
    Began,
    EngineConfig,
    EngineStatistics,
    Event,
    Failed,
    FailureCode,
    ModelInfo,
    Prefilled,
    Sampled,
    Step,
    Stopped,
    StopReason,
)
from engine.outline import ModelError, Outline

REMEMBERED_FAILURES = 65536  # failed sequences whose commands may still be on their way: more than can be


class Books:
    """The sequences of one engine. `dtype` is that of keys and values.

    Raises ModelError if `config.kv_memory` is not enough for a block.
    """

    def __init__(self, config: EngineConfig, outline: Outline, dtype: str) -> None:
        self.config = config
        self.outline = outline
        self.dtype = dtype
        kv_bytes_per_token = outline.kv_bytes_per_token(dtype)
        blocks = config.kv_memory // (kv_bytes_per_token * config.block_size)
        if blocks < 1:
            raise ModelError(
                f"kv_memory of {config.kv_memory} bytes is less than a block of {config.block_size} tokens"
                f" of {kv_bytes_per_token} bytes each"
            )
        self.max_context = min(config.max_context or outline.max_context, outline.max_context)
        self.pool = BlockPool(blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.copies: list[BlockCopy] = []  # due before the next write, in this order
        self.sequences: dict[int, Sequence] = {}
        self.decoding: dict[int, Sequence] = {}
        self.resumed: dict[int, Sequence] = {}  # legs to prefill, in the order of their requests
        self.fresh: dict[int, Sequence] = {}
        self.under_way: dict[Sequence, int] = {}  # how many tokens of each are in the pass
        self.failed: dict[int, None] = {}  # oldest first
        self.events: list[Event] = []  # to go out with the next step
        self.steps = 0
        self.tokens_prefilled = 0
        self.tokens_reused = 0
        self.tokens_sampled = 0
        self.busy_seconds = 0.0

    # What there is

    @property
    def has_work(self) -> bool:
        """Whether a step, sooner or later, would do or say anything."""
        return bool(self.decoding or self.resumed or self.fresh or self.events)

    def describe(
        self, *, path: str, folder: str, device: str, parameters: int, load_seconds: float, simulated: bool
    ) -> ModelInfo:
        """What the engine loaded."""
        return ModelInfo(
            model=self.config.model,
            architecture=self.outline.architecture,
            path=path,
            folder=folder,
            device=device,
            dtype=self.dtype,
            parameters=parameters,
            vocabulary=self.outline.vocabulary,
            max_context=self.max_context,
            kv_bytes_per_token=self.outline.kv_bytes_per_token(self.dtype),
            kv_blocks=self.pool.blocks,
            block_size=self.pool.block_size,
            load_seconds=load_seconds,
            simulated=simulated,
        )

    def statistics(self) -> EngineStatistics:
        """A picture of now; costs nothing that grows with the number of sequences or blocks."""
        pool = self.pool
        running = len(self.decoding) + len(self.resumed) + len(self.fresh)
        return EngineStatistics(
            sequences_running=running,
            sequences_held=len(self.sequences) - running,
            blocks_total=pool.blocks,
            blocks_running=pool.running_blocks,
            blocks_held=pool.held_blocks,
            blocks_cached=pool.cached_blocks,
            blocks_free=pool.free_blocks,
            extents_per_sequence=pool.extents / pool.tables if pool.tables else 0.0,
            steps=self.steps,
            tokens_prefilled=self.tokens_prefilled,
            tokens_reused=self.tokens_reused,
            tokens_sampled=self.tokens_sampled,
            busy_seconds=self.busy_seconds,
        )

    def check_integrity(self) -> None:
        """Recount blocks and queues; AssertionError where the books are wrong."""
        self.pool.check_integrity([sequence.table for sequence in self.sequences.values()])
        for number, sequence in self.sequences.items():
            queues = (number in self.decoding) + (number in self.resumed) + (number in self.fresh)
            assert queues <= 1, "a sequence is in one queue at most"
            assert sequence.table.running == bool(queues), "running blocks are those of sequences in a queue"
            assert sequence.table.length < max(1, len(sequence.tokens)), "one token is kept back"
            if number in self.decoding:
                assert sequence.table.length == len(sequence.tokens) - 1, "decoding has one token to forward"
        for sequence, rows in self.under_way.items():
            assert self.sequences[sequence.number] is sequence, "what is in the pass is open"
            assert rows <= sequence.to_prefill, "nothing is forwarded that is not to be"
        assert not self.failed.keys() & self.sequences.keys()

    # What happens to a sequence

    def leg_of(self, sequence: Sequence, now: float) -> Leg:
        """The leg that a sequence is in; a new one if it is in none."""
        if sequence.leg is None:
            sequence.leg = Leg(requested_at=now, resumed=sequence.table.length > 0)
        return sequence.leg

    def queue(self, sequence: Sequence) -> None:
        """Put a sequence that is not decoding into the queue it belongs in."""
        waiting = sequence.to_prefill > 0
        queue = self.resumed if sequence.leg is not None and sequence.leg.resumed else self.fresh
        if waiting:
            queue[sequence.number] = sequence
        else:
            queue.pop(sequence.number, None)
        self.pool.set_running(sequence.table, waiting)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of the pass: its tokens are not written, and wait for another if they must."""
        if self.under_way.pop(sequence, None) is not None:
            self.pool.truncate(sequence.table, sequence.table.length)

    def stop(self, sequence: Sequence, reason: StopReason, now: float) -> None:
        """End the leg of a sequence told to sample. What it was given before goes on being prefilled."""
        leg = sequence.leg
        assert leg is not None
        decode_seconds = now - leg.decode_started_at if leg.sampled else 0.0
        self.events.append(Stopped(sequence.number, reason, decode_seconds))
        self.decoding.pop(sequence.number, None)
        leg.sample = leg.history = None
        if leg.sampled:
            sequence.leg = None
        self.queue(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and give its blocks back."""
        self.withdraw(sequence)
        for queue in (self.decoding, self.resumed, self.fresh):
            queue.pop(sequence.number, None)
        del self.sequences[sequence.number]
        self.pool.release(sequence.table)

    def fail(self, sequence: Sequence, code: FailureCode, message: str) -> None:
        """Release a sequence, and say why."""
        self.release(sequence)
        self.lose(sequence.number, code, message)

    def lose(self, number: int, code: FailureCode, message: str) -> None:
        """Say why there is no sequence of this number."""
        self.events.append(Failed(number, code, message))
        self.failed[number] = None
        if len(self.failed) > REMEMBERED_FAILURES:
            del self.failed[next(iter(self.failed))]

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Make room for `length` tokens; False: there is none, and the sequence has failed."""
        try:
            copy = self.pool.grow(sequence.table, length, expected=len(sequence.tokens))
        except OutOfBlocks as error:
            self.fail(sequence, "out_of_kv", f"no room for {length} tokens: {error}")
            return False
        if copy is not None:
            self.copies.append(copy)
        return True

    # Passes

    def begin_pass(self) -> None:
        """Fill the pass with what waits, so that no more than `max_batch` sequences decode after it."""
        room = self.config.prefill_chunk
        ready = len(self.decoding)
        for sequence in [*self.resumed.values(), *self.fresh.values()]:
            if room == 0 or ready == self.config.max_batch:
                break
            rows = self._admit(sequence, room)
            if rows:
                self.under_way[sequence] = rows
                room -= rows
                ready += sequence.sampling and rows == sequence.to_prefill

    def _admit(self, sequence: Sequence, room: int) -> int:
        """Make room in KV for up to `room` tokens of a sequence; for how many."""
        leg, table = sequence.leg, sequence.table
        assert leg is not None
        if not table.blocks:
            leg.reused += self.pool.match(table, sequence.tokens)
            self.tokens_reused += table.length
            if sequence.to_prefill <= 0:
                self.queue(sequence)
                if leg.only_prefills:
                    self.settled(sequence, leg.requested_at)
                return 0
        rows = min(room, sequence.to_prefill)
        return rows if self.grow(sequence, table.length + rows) else 0

    def announce_pass(self, at: float) -> None:
        """Say whose extensions begin with the pass, which begins at `at`."""
        for sequence in self.under_way:
            leg = sequence.leg
            assert leg is not None
            if leg.announce:
                leg.announce = False
                leg.began_at = at if leg.began_at is None else leg.began_at
                self.events.append(Began(sequence.number, at))

    def end_pass(self, seconds: float, at: float) -> None:
        """Enter that the pass was written, took `seconds` and ended at `at`."""
        for sequence, rows in self.under_way.items():
            leg = sequence.leg
            assert leg is not None
            self.pool.wrote(sequence.table, sequence.tokens, sequence.table.length + rows)
            self.tokens_prefilled += rows
            leg.prefilled += rows
            leg.prefill_seconds += seconds
            if sequence.to_prefill == 0:
                self._prefilled(sequence, leg, at)
        self.under_way.clear()

    def _prefilled(self, sequence: Sequence, leg: Leg, at: float) -> None:
        """All is forwarded that was to be: on to decoding, or to rest."""
        if leg.sample is None:
            self.queue(sequence)
            if leg.only_prefills:
                self.settled(sequence, at)
            return
        del (self.resumed if leg.resumed else self.fresh)[sequence.number]
        self.decoding[sequence.number] = sequence
        leg.decode_started_at = at
        self._say_prefilled(sequence, leg)

    def settled(self, sequence: Sequence, now: float) -> None:
        """A leg that samples nothing is over: all is in KV that was to be."""
        leg = sequence.leg
        assert leg is not None
        leg.began_at = now if leg.began_at is None else leg.began_at
        self._say_prefilled(sequence, leg)
        self.events.append(Stopped(sequence.number, "length", 0.0))
        sequence.leg = None
        self.queue(sequence)

    def _say_prefilled(self, sequence: Sequence, leg: Leg) -> None:
        assert leg.began_at is not None
        queue_seconds = leg.began_at - leg.requested_at
        self.events.append(
            Prefilled(sequence.number, leg.prefilled, leg.reused, queue_seconds, leg.prefill_seconds)
        )

    def sampled(self, sequence: Sequence, tokens: list[int], now: float) -> None:
        """Enter what a decoding sequence sampled, at most to the end of its leg; the last is not in KV."""
        leg = sequence.leg
        assert leg is not None
        assert leg.sample is not None
        forced = leg.sample.forced
        sequence.append(tokens, sampled=True)
        self.pool.wrote(sequence.table, sequence.tokens, len(sequence.tokens) - 1)
        leg.sampled += len(tokens)
        self.tokens_sampled += len(tokens)
        self.events.append(Sampled(sequence.number, tokens))
        if leg.sampled == len(forced) if forced is not None else tokens[-1] in leg.stop_tokens:
            self.stop(sequence, "stop", now)
        elif leg.sampled >= leg.sample.max_tokens or len(sequence.tokens) >= self.max_context:
            self.stop(sequence, "length", now)

    def report(self, seconds: float) -> Step:
        """What has happened since the last report, after a step of `seconds`."""
        events, self.events = self.events, []
        self.busy_seconds += seconds
        return Step(events, self.statistics())
