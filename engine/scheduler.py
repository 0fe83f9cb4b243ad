"""The engine: commands in, one step of work for all sequences, events out.

A plain synchronous object. It knows token ids, blocks and steps; not text, processes or sockets.

Strategy. Each step makes one batch: a row for every decoding sequence, and the rows of one pass of tokens
that wait to be prefilled. One forward pass over all rows, one draw for every sequence whose rows reach its
end. Nothing done per step is proportional to the history; penalties, which need counts of it, are the
exception, once a leg.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from engine.batch import Batch
from engine.books import Books
from engine.commands import obey
from engine.loading import load
from engine.messages import Command, EngineConfig, EngineStatistics, Step
from engine.sampler import Draw, History, has_penalties, sample


class Scheduler:
    """A loaded model and its sequences. ModelError if the model cannot be loaded."""

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        self._decoder, folder = load(config)
        dtype = str(self._decoder.dtype).removeprefix("torch.")
        self._books = Books(config, self._decoder.config, dtype)
        self._kv = self._decoder.kv_tensors(self._books.pool.blocks * config.block_size)
        self.info = self._books.describe(
            path=f"own decoder, which runs {self._decoder.config.architecture}",
            folder=folder,
            device=str(self._decoder.device),
            parameters=self._decoder.parameters,
            load_seconds=time.monotonic() - started,
            simulated=False,
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do or say anything."""
        return self._books.has_work

    def submit(self, commands: Iterable[Command]) -> None:
        """Obey commands in order; their work is done by the steps that follow. Raises as `obey` does."""
        now = time.monotonic()
        for command in commands:
            obey(self._books, command, now)

    def step(self) -> Step:
        """Do one step of work, if there is any. An exception is a bug of ours and leaves nothing usable."""
        started = time.monotonic()
        batch = self._schedule()
        if batch.parts:
            chosen = self._forward(batch)
            self._settle(batch, chosen, started)
        return self._books.report(time.monotonic() - started)

    def statistics(self) -> EngineStatistics:
        """A picture of now; costs nothing that grows with the number of sequences or blocks."""
        return self._books.statistics()

    def check_integrity(self) -> None:
        """Recount blocks and queues; AssertionError where the books are wrong."""
        self._books.check_integrity()

    def _schedule(self) -> Batch:
        batch, books = Batch(), self._books
        by_length = sorted(books.decoding.values(), key=lambda sequence: sequence.table.length)
        for sequence in by_length:  # neighbours attend together
            table = sequence.table
            full = table.length == table.blocks * books.pool.block_size
            if not full or books.grow(sequence, table.length + 1):
                batch.add(sequence, 1, books.pool)
        books.begin_pass()
        for sequence, rows in books.under_way.items():
            batch.add(sequence, rows, books.pool)
        return batch

    def _forward(self, batch: Batch) -> list[int]:
        """Run the batch through the model; the tokens drawn for the sequences in `batch.sampling`."""
        books = self._books
        for copy in books.copies:
            self._kv.copy_block(copy, books.pool.block_size)
        books.copies.clear()
        books.announce_pass(time.monotonic())
        logits = self._decoder.forward(
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.parts,
            batch.logit_rows if len(batch.logit_rows) < len(batch.tokens) else None,
            self._kv,
        )
        return sample(logits, self._draws(batch)) if batch.sampling else []

    def _draws(self, batch: Batch) -> list[Draw]:
        """How to choose the next token of each sequence that samples."""
        draws = []
        for sequence in batch.sampling:
            leg = sequence.leg
            assert leg is not None
            assert leg.sample is not None
            if leg.sampled == 0 and has_penalties(leg.sample.sampling):
                leg.history = History.of(
                    sequence.tokens,
                    sequence.sampled_tokens(),
                    self.info.vocabulary,
                    self._decoder.device,
                )
            draws.append(Draw(leg.sample.sampling, len(sequence.tokens), leg.history))
        return draws

    def _settle(self, batch: Batch, chosen: list[int], started: float) -> None:
        """Enter what the forward pass wrote and what was drawn."""
        books = self._books
        now = time.monotonic()
        books.steps += 1
        books.end_pass(now - started, now)
        for sequence, token in zip(batch.sampling, chosen, strict=True):
            leg = sequence.leg
            assert leg is not None
            assert leg.sample is not None
            if leg.sample.forced is not None:
                token = leg.sample.forced[leg.sampled]
            if leg.history is not None:
                leg.history.add(token)
            books.sampled(sequence, [token], now)
