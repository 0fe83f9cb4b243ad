"""A scheduler without a model, for tests of everything around the engine: tokens in, predictable tokens
out.

It keeps the contract of `engine.messages` and imports no torch. By default the token sampled at position i
depends on i and the token before it only, so a ledger that is sent again goes on as the lost sequence would
have. `next_token` can be replaced by anything that looks at the ledger, which makes a scripted model. Each
step prefills `prefill_chunk` tokens in all and samples one token of every sequence that is ready; KV is
only counted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

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

VOCABULARY = 1024  # the embedded model has as many, so its tokens can be forced
RAISE, HANG, CLOSE_ALL_AND_HANG = range(1021, 1024)  # see FaultyScheduler
HANGING = "the scheduler hangs as it was told"
KV_BYTES_PER_TOKEN = 1024
DEFAULT_MAX_CONTEXT = 131072

NextToken: TypeAlias = Callable[[list[int]], int]


def hash_of_last(ledger: list[int]) -> int:
    """The default model: the position and the token before it, mixed."""
    previous = ledger[-1] if ledger else 0
    return (31 * previous + 7 * len(ledger) + 1) % VOCABULARY


@dataclass
class FakeSequence:
    ledger: list[int] = field(default_factory=list)
    in_kv: int = 0  # tokens; at least one is kept back, so that `Sample` always has something to forward
    sample: Sample | None = None
    announce: bool = True  # with the next tokens forwarded comes a `Began`
    sampled: int = 0  # tokens of this leg
    prefilled: int = 0  # tokens of this leg

    @property
    def waiting(self) -> int:
        """Tokens that can be forwarded now."""
        return len(self.ledger) - self.in_kv - (self.sample is None)

    @property
    def is_running(self) -> bool:
        return self.waiting > 0


class FakeScheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        next_token: NextToken = hash_of_last,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._next_token = next_token
        self._clock = clock
        self._sequences: dict[int, FakeSequence] = {}
        self.failed: set[int] = set()  # commands for these may have crossed the news
        self._events: list[Event] = []
        self._steps = self._tokens_prefilled = self._tokens_sampled = 0
        self.info = ModelInfo(
            model=config.model,
            architecture="fake",
            path="no model, counted tokens",
            folder="",
            device="cpu",
            dtype="float32",
            parameters=0,
            vocabulary=VOCABULARY,
            max_context=config.max_context or DEFAULT_MAX_CONTEXT,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            kv_blocks=config.kv_memory // (KV_BYTES_PER_TOKEN * config.block_size),
            block_size=config.block_size,
            load_seconds=0.0,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._events) or any(sequence.is_running for sequence in self._sequences.values())

    def submit(self, commands: Iterable[Command]) -> None:
        for command in commands:
            number = command.sequence
            if isinstance(command, Open):
                self._add(number, FakeSequence())
            elif number not in self.failed:
                self._obey(command, number, self._sequences[number])
            elif isinstance(command, Fork):
                self._fail(
                    command.child, "engine_error", f"sequence {number} failed before it could be forked"
                )

    def step(self) -> Step:
        self._steps += self.has_work
        budget = self._config.prefill_chunk
        for number, sequence in list(self._sequences.items()):
            if sequence.sampled:
                sequence.in_kv += 1
            else:
                budget -= self._prefill(number, sequence, budget)
            if sequence.sample is not None and not sequence.waiting:
                self._sample(number, sequence, sequence.sample)
        events, self._events = self._events, []
        return Step(events=events, statistics=self.statistics())

    def statistics(self) -> EngineStatistics:
        running = [sequence for sequence in self._sequences.values() if sequence.is_running]
        held = [sequence for sequence in self._sequences.values() if not sequence.is_running]
        blocks_running = sum(map(self._blocks, running))
        blocks_held = sum(map(self._blocks, held))
        return EngineStatistics(
            sequences_running=len(running),
            sequences_held=len(held),
            blocks_total=self.info.kv_blocks,
            blocks_running=blocks_running,
            blocks_held=blocks_held,
            blocks_free=self.info.kv_blocks - blocks_running - blocks_held,
            extents_per_sequence=1.0 if self._sequences else 0.0,
            steps=self._steps,
            tokens_prefilled=self._tokens_prefilled,
            tokens_sampled=self._tokens_sampled,
        )

    def check_integrity(self) -> None:
        assert all(0 <= sequence.in_kv <= len(sequence.ledger) for sequence in self._sequences.values())
        assert self.statistics().blocks_free >= 0

    def _obey(self, command: Command, number: int, sequence: FakeSequence) -> None:
        if isinstance(command, Release):
            self._forget(number)
            return
        if isinstance(command, Pause):
            if sequence.sample is not None:
                self._stop(number, sequence, "paused")
            return
        if sequence.sample is not None:
            raise ValueError(f"sequence {number} is sampling: {command}")
        if isinstance(command, Extend):
            self._extend(number, sequence, command.tokens)
        elif isinstance(command, Sample):
            self._begin(number, sequence, command)
        elif isinstance(command, Truncate):
            if not 0 <= command.length <= len(sequence.ledger):
                raise ValueError(f"sequence {number} has {len(sequence.ledger)} tokens: {command}")
            del sequence.ledger[command.length :]
            sequence.in_kv = min(sequence.in_kv, max(command.length - 1, 0))
        elif isinstance(command, Fork):
            self._add(command.child, FakeSequence(list(sequence.ledger), sequence.in_kv))

    def _extend(self, number: int, sequence: FakeSequence, tokens: list[int]) -> None:
        if not tokens:
            return
        if len(sequence.ledger) + len(tokens) > self.info.max_context:
            self._fail(number, "context_length_exceeded", f"the context holds {self.info.max_context} tokens")
        elif min(tokens) < 0 or max(tokens) >= VOCABULARY:
            self._fail(number, "engine_error", f"token ids must be in 0 to {VOCABULARY - 1}")
        else:
            sequence.announce = True
            self._append(number, sequence, tokens)

    def _begin(self, number: int, sequence: FakeSequence, sample: Sample) -> None:
        if not sequence.ledger:
            raise ValueError(f"sequence {number} has no tokens to sample after")
        sequence.sample = sample
        if sample.max_tokens < 1 or len(sequence.ledger) >= self.info.max_context:
            self._stop(number, sequence, "length")
        elif sample.forced == []:
            self._stop(number, sequence, "stop")

    def _prefill(self, number: int, sequence: FakeSequence, budget: int) -> int:
        forwarded = max(0, min(budget, sequence.waiting))
        if forwarded and sequence.announce:
            self._events.append(Began(sequence=number, at=self._clock()))
            sequence.announce = False
        sequence.in_kv += forwarded
        sequence.prefilled += forwarded
        self._tokens_prefilled += forwarded
        if sequence.sample is not None and not sequence.waiting:
            self._events.append(
                Prefilled(
                    sequence=number,
                    prefilled=sequence.prefilled,
                    reused=0,
                    queue_seconds=0.0,
                    prefill_seconds=0.0,
                )
            )
        return forwarded

    def _sample(self, number: int, sequence: FakeSequence, leg: Sample) -> None:
        token = leg.forced[sequence.sampled] if leg.forced else self._next_token(sequence.ledger)
        if not self._append(number, sequence, [token]):
            return
        sequence.sampled += 1
        self._tokens_sampled += 1
        self._events.append(Sampled(sequence=number, tokens=[token]))
        if sequence.sampled == len(leg.forced) if leg.forced else token in leg.stop_tokens:
            self._stop(number, sequence, "stop")
        elif sequence.sampled >= leg.max_tokens or len(sequence.ledger) >= self.info.max_context:
            self._stop(number, sequence, "length")

    def _stop(self, number: int, sequence: FakeSequence, reason: StopReason) -> None:
        self._events.append(Stopped(sequence=number, reason=reason, decode_seconds=0.0))
        sequence.sample = None
        if sequence.sampled:
            sequence.sampled = sequence.prefilled = 0
            sequence.announce = True

    def _append(self, number: int, sequence: FakeSequence, tokens: list[int]) -> bool:
        sequence.ledger += tokens
        if sum(map(self._blocks, self._sequences.values())) > self.info.kv_blocks:
            self._fail(number, "out_of_kv", f"all {self.info.kv_blocks} blocks are in use")
            return False
        return True

    def _fail(self, number: int, code: FailureCode, message: str) -> None:
        self._forget(number)
        self.failed.add(number)
        self._events.append(Failed(sequence=number, code=code, message=message))

    def _forget(self, number: int) -> None:
        self._sequences.pop(number, None)
        self._events = [event for event in self._events if event.sequence != number]

    def _add(self, number: int, sequence: FakeSequence) -> None:
        if number in self._sequences:
            raise ValueError(f"sequence {number} is open already")
        self._sequences[number] = sequence

    def _blocks(self, sequence: FakeSequence) -> int:
        return -(-len(sequence.ledger) // self._config.block_size)


# What a worker can be started with: "tests.fake_scheduler:NAME".


def make_unusable(config: EngineConfig) -> FakeScheduler:
    """A model that cannot be loaded."""
    raise ValueError(f"{config.model}: there is no such model")


class FaultyScheduler(FakeScheduler):
    """Goes wrong in the step that samples one of the tokens below; force them."""

    def step(self) -> Step:
        step = super().step()
        sampled = {token for event in step.events if isinstance(event, Sampled) for token in event.tokens}
        if RAISE in sampled:
            raise RuntimeError("the fatal token was sampled")
        if CLOSE_ALL_AND_HANG in sampled:
            os.closerange(3, 1024)
        if sampled & {HANG, CLOSE_ALL_AND_HANG}:
            print(HANGING, file=sys.stderr, flush=True)
            while True:
                signal.pause()
        return step


def make_describing(config: EngineConfig) -> FakeScheduler:
    """Says in `ModelInfo.path` what kind of process it is in."""
    scheduler = FakeScheduler(config)
    facts = {
        "threads": os.environ["OMP_NUM_THREADS"],
        "torch": "torch" in sys.modules,
        "trio": "trio" in sys.modules,
    }
    scheduler.info = msgspec.structs.replace(scheduler.info, path=json.dumps(facts))
    return scheduler
