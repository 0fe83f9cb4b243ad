"""The engine's side of a conversation, and the leg that it is in: values, which only a scheduler changes.

They know neither the other sequences nor how tokens are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kv import Table
from engine.messages import Sample

if TYPE_CHECKING:
    from engine.sampler import History


@dataclass(slots=True, eq=False)
class Leg:
    """From the first `Extend` or `Sample` after a stop to the next stop: what to do, and what it has cost."""

    requested_at: float
    resumed: bool  # there was something in KV before it
    sample: Sample | None = None
    only_prefills: bool = False
    stop_tokens: frozenset[int] = frozenset()
    history: History | None = None  # for a draw with penalties
    began_at: float | None = None
    announce: bool = True  # the next tokens forwarded are the first of an extension
    prefilled: int = 0
    reused: int = 0
    prefill_seconds: float = 0.0
    decode_started_at: float = 0.0
    sampled: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A conversation's tokens and blocks."""

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

    def append(self, tokens: list[int], *, sampled: bool) -> None:
        """Add tokens, and note whether the model sampled them."""
        start = len(self.tokens)
        self.tokens += tokens
        if not sampled:
            return
        if self.sampled_spans and self.sampled_spans[-1][1] == start:
            self.sampled_spans[-1][1] = len(self.tokens)
        else:
            self.sampled_spans.append([start, len(self.tokens)])

    def cut(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        del self.tokens[length:]
        while self.sampled_spans and self.sampled_spans[-1][1] > length:
            self.sampled_spans[-1][1] = length
            if self.sampled_spans[-1][0] >= length:
                self.sampled_spans.pop()

    def sampled_tokens(self) -> list[int]:
        """Those that the model sampled."""
        return [token for start, stop in self.sampled_spans for token in self.tokens[start:stop]]
