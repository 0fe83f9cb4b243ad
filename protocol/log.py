"""The event log of one run, and the cursors that read it: all that stands between a run and whoever looks at
it.

It knows events and their order, and nothing of sockets or of who reads. Append-only, numbered from 0, bounded
in bytes.

Strategy. Every event is encoded once and shared by all cursors, except that the newest may still be an unread
delta: while nobody has read it, the next delta of the same kind and item grows it in place. So a reader that
is behind finds few, large deltas, and a reader that keeps up finds every one; numbers and contents are the
same for both. Once read, or followed by another event, an entry is frozen for ever. When the bound is passed
the oldest entries go, and a cursor that still needed them is told so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from protocol.errors import RequestError
from protocol.wire import Delta, ServerEvent, encode, error_frame, wire_size

LOG_BYTES = 8 << 20  # of encoded events a run keeps; about 40,000 single-token deltas of 200 bytes


class EventsExpired(Exception):
    """A cursor fell so far behind that events it had not read are gone."""


class EventLog:
    """Events of one run. `append` never waits and never fails for a slow reader.

    `next_number` lets a restored log go on where the numbers of an earlier one ended.
    """

    def __init__(self, *, limit_bytes: int = LOG_BYTES, next_number: int = 0) -> None:
        self._frames: deque[str] = deque()
        self._first = next_number  # number of _frames[0]
        self._open: Delta | None = None  # the newest event, while it may still grow; not yet in _frames
        self._parts: list[
            str
        ] = []  # of its delta: joined once, for a long one may be read by nobody for long
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._cursors: list[Cursor] = []
        self.ended = False
        self.refusal: RequestError | None = None
        self.last_append = trio.current_time()

    @property
    def next_number(self) -> int:
        """The number that the next event gets; so far this many were handed out."""
        return self._first + len(self._frames) + (self._open is not None)

    def append(self, event: ServerEvent) -> None:
        """Number the event and show it to every cursor. A terminal event ends the log."""
        assert not self.ended, "a log takes nothing after its terminal event"
        self.last_append = trio.current_time()
        if isinstance(event, Delta):
            newest = self._open
            if newest is not None and type(newest) is type(event) and newest.item_id == event.item_id:
                self._parts.append(event.delta)
                return  # the cursors that have not read it know that it is there
            self._freeze()
            event.sequence_number = self.next_number
            self._open = event
            self._parts = [event.delta]
        else:
            self._freeze()
            event.sequence_number = self.next_number
            self._store(encode(event))
            self.ended = event.terminal
        self._show()

    def refuse(self, error: RequestError) -> None:
        """End a log that has no event yet: the Response never came to be, and `error` is all there is to
        read.
        """
        assert self.next_number == 0, "a Response that was created ends with an event of its own"
        self.refusal = error
        self.break_off(error)

    def break_off(self, error: RequestError) -> None:
        """End a log with an `error` frame where, for a bug of ours, there is no event that could end it."""
        assert not self.ended, "a log takes nothing after its terminal event"
        self._freeze()
        self._store(error_frame(error))
        self.ended = True
        self._show()

    def cursor(self, *, after: int = -1, on_ready: Callable[[], None] | None = None) -> Cursor:
        """A reader of every event whose number is larger than `after`.

        `on_ready` is called, without waiting, whenever there is something to read; without it the reader uses
        `next`. Raises EventsExpired if some of those events are gone.
        """
        if after + 1 < self._first:
            raise EventsExpired
        cursor = Cursor(self, after + 1, on_ready)
        self._cursors.append(cursor)
        if self.next_number > after + 1:
            cursor._notify()
        return cursor

    def statistics(self) -> dict[str, int]:
        """Events handed out, events and bytes kept, cursors reading."""
        kept = len(self._frames) + (self._open is not None)
        return {"events": self.next_number, "kept": kept, "bytes": self._bytes, "cursors": len(self._cursors)}

    def _freeze(self) -> None:
        if self._open is not None:
            event, self._open = self._open, None
            event.delta = "".join(self._parts)
            self._store(encode(event))

    def _store(self, frame: str) -> None:
        self._frames.append(frame)
        self._bytes += wire_size(frame)
        while self._bytes > self._limit_bytes and len(self._frames) > 1:
            self._bytes -= wire_size(self._frames.popleft())
            self._first += 1

    def _show(self) -> None:
        for cursor in self._cursors:
            cursor._notify()

    def _read(self, number: int) -> str | None:
        if number < self._first:
            raise EventsExpired
        if number == self._first + len(self._frames):
            self._freeze()
        index = number - self._first
        return self._frames[index] if index < len(self._frames) else None


class Cursor:
    """A place in a log. Made by `EventLog.cursor`; any number may read one log, each at its own pace."""

    def __init__(self, log: EventLog, position: int, on_ready: Callable[[], None] | None) -> None:
        self._log = log
        self._position = position
        self._on_ready = on_ready
        self._wakeup = trio.Event()

    @property
    def finished(self) -> bool:
        """Everything, the terminal event included, has been read."""
        return self._log.ended and self._position >= self._log.next_number

    def take(self) -> str | None:
        """The next event as a frame, or None if there is none yet. Raises EventsExpired."""
        frame = self._log._read(self._position)
        if frame is not None:
            self._position += 1
        return frame

    async def next(self) -> str | None:
        """The next event as a frame, None after the terminal one.

        Waits without a deadline, because a run may be held for as long as its client likes: the caller's
        scope has it. Cancellation loses nothing. Raises EventsExpired.
        """
        await trio.lowlevel.checkpoint()
        while (frame := self.take()) is None and not self.finished:
            self._wakeup = trio.Event()
            await self._wakeup.wait()
        return frame

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self in self._log._cursors:
            self._log._cursors.remove(self)

    def _notify(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
        else:
            self._wakeup.set()
