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

VOCABULARY = 512
FATAL_TOKEN = 511
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
    leg: Sample | None = None
    leg_sampled: int = 0  # tokens
    leg_prefilled: int = 0  # tokens
    began: bool = False

    @property
    def waiting(self) -> int:
        """Tokens that can be forwarded now."""
        return len(self.ledger) - self.in_kv - (0 if self.leg else 1)

    @property
    def is_running(self) -> bool:
        return self.leg is not None or self.waiting > 0


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
        self._newest = 0
        self._replies: list[Event] = []
        self._steps = self._prefilled = self._sampled = 0
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
        return bool(self._replies) or any(sequence.is_running for sequence in self._sequences.values())

    def submit(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Open):
                self._add(command.sequence, FakeSequence())
            elif command.sequence in self._sequences:
                self._obey(command, self._sequences[command.sequence])
            elif command.sequence > self._newest:
                raise KeyError(f"sequence {command.sequence} was never opened: {command}")
            elif isinstance(command, Fork):
                self._newest = command.child
                self._fail(
                    command.child, "engine_error", f"sequence {command.sequence} has failed before the fork"
                )

    def step(self) -> Step:
        events, self._replies = self._replies, []
        self._steps += 1
        budget = self._config.prefill_chunk
        for number, sequence in list(self._sequences.items()):
            if sequence.is_running:
                budget -= self._advance(number, sequence, budget, events)
        return Step(events=events + self._take_replies(), statistics=self.statistics())

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
            tokens_prefilled=self._prefilled,
            tokens_sampled=self._sampled,
        )

    def check_integrity(self) -> None:
        assert all(0 <= sequence.in_kv <= len(sequence.ledger) for sequence in self._sequences.values())
        assert self.statistics().blocks_free >= 0

    def ledger_of(self, number: int) -> list[int]:
        """What this sequence holds, for tests to compare with the server's ledger."""
        return list(self._sequences[number].ledger)

    def _obey(self, command: Command, sequence: FakeSequence) -> None:
        number = command.sequence
        if isinstance(command, Release):
            del self._sequences[number]
            self._replies = [event for event in self._replies if event.sequence != number]
        elif isinstance(command, Extend):
            self._grow(number, sequence, command.tokens)
        elif isinstance(command, Pause):
            if sequence.leg is not None:
                self._replies.append(self._stop(number, sequence, "paused"))
        else:
            if sequence.leg is not None:
                raise ValueError(f"sequence {number} is sampling: {command}")
            if isinstance(command, Sample):
                sequence.leg, sequence.leg_sampled = command, 0
            elif isinstance(command, Truncate):
                del sequence.ledger[command.length :]
                sequence.in_kv = min(sequence.in_kv, max(command.length - 1, 0))
            elif isinstance(command, Fork):
                self._add(command.child, FakeSequence(list(sequence.ledger), sequence.in_kv))

    def _advance(self, number: int, sequence: FakeSequence, budget: int, events: list[Event]) -> int:
        """Prefill within `budget`, sample if nothing is left to prefill, and return the tokens prefilled."""
        forwarded = sequence.waiting if sequence.leg_sampled else min(budget, sequence.waiting)
        sequence.in_kv += forwarded
        prefilled = 0 if sequence.leg_sampled else forwarded
        if prefilled and not sequence.began:
            events.append(Began(sequence=number, at=self._clock()))
            sequence.began = True
        sequence.leg_prefilled += prefilled
        self._prefilled += prefilled
        if sequence.leg is not None and not sequence.waiting:
            self._sample(number, sequence, sequence.leg, events)
        return prefilled

    def _sample(self, number: int, sequence: FakeSequence, leg: Sample, events: list[Event]) -> None:
        if not sequence.leg_sampled:
            events.append(
                Prefilled(
                    sequence=number,
                    prefilled=sequence.leg_prefilled,
                    reused=0,
                    queue_seconds=0.0,
                    prefill_seconds=0.0,
                )
            )
        if len(sequence.ledger) >= self.info.max_context:
            events.append(self._stop(number, sequence, "length"))
            return
        token = leg.forced[sequence.leg_sampled] if leg.forced else self._next_token(sequence.ledger)
        if not self._grow(number, sequence, [token]):
            return
        sequence.leg_sampled += 1
        self._sampled += 1
        events.append(Sampled(sequence=number, tokens=[token]))
        if token in leg.stop_tokens or (leg.forced and sequence.leg_sampled == len(leg.forced)):
            events.append(self._stop(number, sequence, "stop"))
        elif sequence.leg_sampled >= leg.max_tokens:
            events.append(self._stop(number, sequence, "length"))

    def _stop(self, number: int, sequence: FakeSequence, reason: StopReason) -> Stopped:
        sequence.leg = None
        sequence.leg_sampled = sequence.leg_prefilled = 0
        sequence.began = False
        return Stopped(sequence=number, reason=reason, decode_seconds=0.0)

    def _grow(self, number: int, sequence: FakeSequence, tokens: list[int]) -> bool:
        if len(sequence.ledger) + len(tokens) > self.info.max_context:
            self._fail(number, "context_length_exceeded", f"the context holds {self.info.max_context} tokens")
            return False
        sequence.ledger += tokens
        if sum(map(self._blocks, self._sequences.values())) > self.info.kv_blocks:
            self._fail(number, "out_of_kv", f"all {self.info.kv_blocks} blocks are in use")
            return False
        return True

    def _fail(self, number: int, code: FailureCode, message: str) -> None:
        self._sequences.pop(number, None)
        self._replies.append(Failed(sequence=number, code=code, message=message))

    def _add(self, number: int, sequence: FakeSequence) -> None:
        if number <= self._newest:
            raise ValueError(f"sequence number {number} was used before")
        self._newest = number
        self._sequences[number] = sequence

    def _blocks(self, sequence: FakeSequence) -> int:
        return -(-len(sequence.ledger) // self._config.block_size)

    def _take_replies(self) -> list[Event]:
        replies, self._replies = self._replies, []
        return replies


# What a worker can be started with: "tests.fake_scheduler:NAME".


def make_unusable(config: EngineConfig) -> FakeScheduler:
    """A model that cannot be loaded."""
    raise ValueError(f"{config.model}: there is no such model")


class FaultyScheduler(FakeScheduler):
    """Raises in the step that samples `FATAL_TOKEN`."""

    def step(self) -> Step:
        step = super().step()
        if any(isinstance(event, Sampled) and FATAL_TOKEN in event.tokens for event in step.events):
            raise RuntimeError("the fatal token was sampled")
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
