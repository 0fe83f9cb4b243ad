"""The rows of one forward pass: a value that the scheduler makes, a sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.attention import Part
from engine.kv import BlockPool
from engine.legs import Sequence


@dataclass(slots=True)
class Batch:
    """Tokens, their positions and the slots for their keys and values, one a row."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)  # in the order of logit_rows

    def add(self, sequence: Sequence, rows: int, pool: BlockPool) -> None:
        """Add the next tokens of a sequence. If its last token is among them, it samples."""
        table = sequence.table
        start, first_row = table.length, len(self.tokens)
        if rows == 1:
            runs = pool.slots(table, 0, start + 1)
            self.slots.append(runs[-1][1] - 1)
        else:
            runs = pool.slots(table, 0, start)
            for run_start, run_stop in pool.slots(table, start, start + rows):
                self.slots += range(run_start, run_stop)
        self.parts.append(Part(first_row, rows, runs))
        self.tokens += sequence.tokens[start : start + rows]
        self.positions += range(start, start + rows)
        if start + rows == len(sequence.tokens):
            self.logit_rows.append(first_row + rows - 1)
            self.sampling.append(sequence)
