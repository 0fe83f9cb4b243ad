"""The accounting: how much of each kind of work a Response took, and how long. Filled by the stages that do
the work.

A leg has a `Work` of its own; the run's is the sum of its legs. Counts are exact; times are milliseconds of
wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import msgspec


class Times(msgspec.Struct):
    """Milliseconds by stage.

    transport: decoding frames that came in and writing those that go out. queue: from the end of tokenising
    to the first forward pass with the new tokens. prefill and decode: the engine's. waiting: held, until the
    client's results were in. first_step spans several of these: from the frame that completed a leg's input
    to the first forward pass with it.
    """

    transport: float = 0.0
    validate: float = 0.0
    render: float = 0.0
    tokenise: float = 0.0
    safety_in: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    safety_out: float = 0.0
    post: float = 0.0
    waiting: float = 0.0
    first_step: float = 0.0


class Work(msgspec.Struct):
    """What was done. Every character and token that passes a stage is counted there, each time it passes."""

    bytes_in: int = 0
    items_validated: int = 0
    characters_rendered: int = 0
    characters_tokenised: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0  # input tokens whose KV was already there when the leg's input came
    tokens_sampled: int = 0
    characters_classified: dict[str, int] = {}
    pre_passes: int = 0
    post_passes: int = 0
    legs: int = 0
    malformed_calls: int = 0
    engine_restarts: int = 0
    ignored: list[str] = []
    times_ms: Times = msgspec.field(default_factory=Times)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to `times_ms.<stage>`."""
        start = perf_counter()
        try:
            yield
        finally:
            setattr(self.times_ms, stage, getattr(self.times_ms, stage) + (perf_counter() - start) * 1e3)

    def add(self, other: Work) -> None:
        """Add another's counts and times to these."""
        for field in self.__struct_fields__:
            if field == "times_ms":
                for stage in Times.__struct_fields__:
                    total = getattr(self.times_ms, stage) + getattr(other.times_ms, stage)
                    setattr(self.times_ms, stage, total)
            elif field == "characters_classified":
                for name, characters in other.characters_classified.items():
                    self.characters_classified[name] = self.characters_classified.get(name, 0) + characters
            else:
                setattr(self, field, getattr(self, field) + getattr(other, field))

    def as_json(self) -> dict[str, Any]:
        """As it stands in a Response: times rounded to a microsecond."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        fields["times_ms"] = {stage: round(ms, 3) for stage, ms in fields["times_ms"].items()}
        return fields
