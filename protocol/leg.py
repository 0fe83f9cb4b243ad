"""One leg as it is sampled: tokens in, output items and their events out, and what it cost.

It knows a parser, an output filter and the run's state, and nothing of how tokens come. The parser's state is
derived: a leg that was interrupted by a restart reads what it had shown once more, silently, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from engine.messages import Began, Event, Prefilled, Sampled, Stopped
from protocol import wire
from protocol.dialects.base import Malformed, Parsed, Parser, ReasoningDelta
from protocol.filters import Filters
from protocol.items import ItemWriter, as_item
from protocol.state import RunState

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.leg")


class Leg:
    """Made when the leg begins to be sampled, or goes on after a restart; `close` it once."""

    def __init__(
        self,
        state: RunState,
        parser: Parser,
        filters: Filters,
        emit: Callable[[wire.ServerEvent], None],
    ) -> None:
        self._state = state
        self._parser = parser
        self._filters = filters
        self._writer = ItemWriter(state.id, len(state.output), emit)
        with self._writer.silent():
            for read in range(state.leg_start, len(state.ledger)):
                self._show(filters.output(parser.feed([state.ledger.tokens[read]])))
                if self.has_its_only_call:  # it stopped while the leg was being cut
                    state.ledger.cut(read + 1)
                    break

    @property
    def has_its_only_call(self) -> bool:
        """Whether a call has ended and the request allows one a turn."""
        return self._state.request.parallel_tool_calls is False and bool(self._writer.calls)

    def read(self, token: int) -> None:
        """Show what one more token makes known."""
        self._take(self._parser.feed([token]))

    def finish(self) -> None:
        """The turn is over: show what was still waiting."""
        self._take(self._parser.finish())
        self.flush()

    def flush(self) -> None:
        """Show what the output filter had kept."""
        self._show(self._filters.flush())

    def close(self, *, complete: bool) -> None:
        """Its items are whole, or as whole as they get: they are the run's from here on."""
        state = self._state
        self._writer.close(complete=complete)
        state.leg_output = len(state.output)
        state.output += self._writer.items
        state.items += map(as_item, self._writer.items)
        state.turns += bool(len(state.ledger) > state.leg_start)

    def account(self, events: Sequence[Event], *, handed_over: float, received: float) -> None:
        """Count what the engine did. `handed_over`: when it got the leg's input; `received`: when we did."""
        work = self._state.leg_work
        for event in events:
            match event:
                case Sampled(tokens=tokens):
                    work.tokens_sampled += len(tokens)
                case Prefilled(prefilled=prefilled, prefill_seconds=seconds):
                    # A warm-up leaves its last token to the leg that samples after it.
                    due = self._state.leg_input - (self._state.request.generate is False)
                    reused = max(0, due - prefilled)
                    work.tokens_prefilled += prefilled
                    work.tokens_reused += reused
                    work.times_ms.prefill += seconds * 1e3
                    if self._state.work.legs == 0:  # the first leg is not over
                        self._state.reused_at_start = reused
                case Stopped(decode_seconds=seconds):
                    work.times_ms.decode += seconds * 1e3
                case Began(at=at) if at > handed_over:  # else of results placed while others were awaited
                    work.times_ms.queue += (at - handed_over) * 1e3
                    work.times_ms.first_step += (at - received) * 1e3

    def _take(self, parsed: Sequence[Parsed]) -> None:
        """Show what the parser read, and count what is remarkable in it."""
        for each in parsed:
            if isinstance(each, Malformed):
                self._state.leg_work.malformed_calls += 1
                log.info("malformed_call", why=each.why)
            elif isinstance(each, ReasoningDelta):
                self._state.leg_reasoning_tokens += 1
        self._show(self._filters.output(parsed))

    def _show(self, parsed: Sequence[Parsed]) -> None:
        for each in parsed:
            self._writer.write(each)
