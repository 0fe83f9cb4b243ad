"""A lane: the runs of one `stream_id`, one after another, and what is read of them in the same order.

It knows runs and the cursors over their logs, and neither sockets nor client events. Strategy: there are two
queues. `waiting` has the runs that have not been started; the readings have everything that is still to be
shown, run by run. A run that ends out of turn, before it was started, thus keeps its place in what is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from protocol.errors import RequestError
from protocol.log import Cursor, EventsExpired
from protocol.response import Run
from protocol.state import Phase


class Unasked(Exception):
    """A prototype's run ended between its legs: such a client would take the frame for the answer to its next
    request.
    """

    def __init__(self, run: Run) -> None:
        self.run = run


class Reading(NamedTuple):
    """What is to be shown of a run: its log, or one frame that belongs behind it."""

    run: Run
    source: Cursor | str


class Lane:
    """One `stream_id` of a connection. `name` is None for the default lane; `on_ready` is called, without
    waiting, when there is something to take, `on_lost` when another lane took a run of this one.
    """

    def __init__(
        self, name: str | None, *, on_ready: Callable[[Lane], None], on_lost: Callable[[Lane, Run], None]
    ) -> None:
        self.name = name
        self.waiting: deque[Run] = deque()
        self.run: Run | None = None  # the last one that was started
        self.is_ready = False  # stands in the queue of lanes that can be read
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._readings: list[Reading] = []  # in the order in which they are shown

    @property
    def live_run(self) -> Run | None:
        """The one of its runs that is going on or held, if there is one."""
        return self.run if self.run is not None and self.run.state.phase is not Phase.ENDED else None

    @property
    def runs(self) -> list[Run]:
        """Its runs that have not ended, those that wait included."""
        runs = (self.live_run, *self.waiting)
        return [run for run in runs if run is not None and run.state.phase is not Phase.ENDED]

    def accept(self, run: Run, *, after: Run | None = None) -> None:
        """Have this run go on, and be shown, after those before it; or directly `after` the one that goes on
        now. Another lane that had it loses it. Raises RequestError.
        """
        try:
            cursor = run.log.cursor(on_ready=lambda: self._on_ready(self))
        except EventsExpired:
            raise events_expired(run) from None
        if isinstance(run.owner, Lane):
            run.owner._lose(run)
        run.owner = self
        if after is None:
            self.waiting.append(run)
            self._readings.append(Reading(run, cursor))
        else:
            self.waiting.appendleft(run)
            self._insert(after, Reading(run, cursor))

    def say(self, run: Run, *frames: str) -> None:
        """Show these frames behind everything that is shown of this run."""
        for frame in frames:
            self._insert(run, Reading(run, frame))
        self._on_ready(self)

    def hide(self, run: Run) -> None:
        """Show no event of this run from here on."""
        for reading in [each for each in self._readings if each.run is run]:
            if isinstance(reading.source, Cursor):
                reading.source.close()
                self._readings.remove(reading)

    def take(self) -> tuple[Run, str] | None:
        """The next frame of this lane, and whose it is. Raises EventsExpired, or Unasked for an end nobody
        may be told.
        """
        while self._readings:
            run, source = self._readings[0]
            if isinstance(source, str):
                self._readings.pop(0)
                return run, named(source, self.name)
            frame = source.take()
            if source.finished:
                source.close()
                self._readings.pop(0)
                if frame is not None and run.state.prototype and run.state.ended_unasked:
                    raise Unasked(run)
            if frame is not None:
                return run, named(frame, self.name)
            if not source.finished:
                break
        return None

    def close(self) -> None:
        """Nobody reads this lane any more."""
        for reading in self._readings:
            if isinstance(reading.source, Cursor):
                reading.source.close()
        self._readings.clear()

    def _insert(self, run: Run, reading: Reading) -> None:
        behind = [index for index, each in enumerate(self._readings, 1) if each.run is run]
        self._readings.insert(behind[-1] if behind else 0, reading)

    def _lose(self, run: Run) -> None:
        if run in self.waiting:
            self.waiting.remove(run)
        elif self.run is run:
            self.run = None
        self.hide(run)
        self._on_lost(self, run)


def named(frame: str, stream_id: str | None) -> str:
    """The frame with this `stream_id`, if it has one."""
    return frame if stream_id is None else f'{frame[:-1]},"stream_id":"{stream_id}"}}'


def events_expired(run: Run) -> RequestError:
    """The run's log does not reach back to what was asked for."""
    return RequestError(
        f"The first events of response {run.state.id!r} are not kept any more.",
        code="events_expired",
        param="event_id",
    )


def taken_over(run: Run) -> RequestError:
    """A lane loses a run to another one."""
    return RequestError(
        f"Response {run.state.id!r} goes on elsewhere: its request was sent again there.",
        code="response_taken_over",
    )
