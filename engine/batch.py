"""What the scheduler moves about: sequences, the leg each is in, and the batch of one step.

Values with no behaviour of their own beyond what they derive; only the scheduler changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv import Table
from engine.messages import Sample
from engine.model import Part
from engine.sampler import Draw, History


@dataclass(slots=True, eq=False)
class Leg:
    """From the first `Extend` or `Sample` after a stop to the next stop: what to do, and what it has cost."""

    requested_at: float
    resumed: bool  # there was something in KV before it
    sample: Sample | None = None
    stop_tokens: frozenset[int] = frozenset()
    history: History | None = None
    began_at: float | None = None
    announce: bool = True  # the next tokens forwarded are the first of an extension
    prefilled: int = 0
    reused: int = 0
    prefill_seconds: float = 0.0
    decode_started_at: float = 0.0
    sampled: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's side of a conversation."""

    number: int
    table: Table
    tokens: list[int] = field(default_factory=list)
    sampled_spans: list[list[int]] = field(default_factory=list)  # [start, stop) of tokens the model sampled
    leg: Leg | None = None

    @property
    def sampling(self) -> bool:
        """Whether it was told to sample and has not stopped since."""
        return self.leg is not None and self.leg.sample is not None

    @property
    def to_prefill(self) -> int:
        """Tokens to forward now: all that are not in KV, but for the last if there is nothing to sample."""
        return len(self.tokens) - self.table.length - (not self.sampling)

    def mark_sampled(self, start: int, stop: int) -> None:
        """Note that the model sampled these tokens."""
        if self.sampled_spans and self.sampled_spans[-1][1] == start:
            self.sampled_spans[-1][1] = stop
        elif stop > start:
            self.sampled_spans.append([start, stop])


@dataclass(slots=True)
class Batch:
    """The rows of one forward pass."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)  # one row each, before all others
    prefilling: list[tuple[Sequence, int]] = field(default_factory=list)  # with how many rows
    beginning: list[Sequence] = field(default_factory=list)  # whose extensions begin with this batch
    sampling: list[Sequence] = field(default_factory=list)  # in the order of logit_rows

    def draws(self) -> list[Draw]:
        """How to choose the next token of each sequence in `sampling`."""
        draws = []
        for sequence in self.sampling:
            leg = sequence.leg
            assert leg is not None
            assert leg.sample is not None
            draws.append(Draw(leg.sample.sampling, len(sequence.tokens), leg.history))
        return draws
