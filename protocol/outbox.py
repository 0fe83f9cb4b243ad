"""What one connection is told: the only task that sends.

It knows lanes and frames, and nothing of what they say. Strategy: it visits lanes that have something to
read, in turn, one frame each, so a lane that streams does not starve another; and because it takes a frame
from a lane only when the socket took the one before, a client that is slow finds its deltas merged and costs
nobody anything. Answers that belong to no lane go first.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

import trio

from protocol.edge.socket import Socket
from protocol.lanes import Lane, Unasked
from protocol.log import EventsExpired

MAX_ANSWERS = 64  # frames that wait to be sent: a client that has more made and reads none is flooding


class Outbox:
    """Frames on their way to one socket. `run` it; everything else does not wait."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._ready: deque[Lane] = deque()
        self._answers: deque[str] = deque()
        self._close: tuple[int, str] | None = None  # once everything is said
        self._last_words: str | None = None  # a frame to say then
        self._has_given_up = False
        self._something_to_send = trio.Event()

    @property
    def is_closing(self) -> bool:
        """Whether the socket will be closed as soon as it can be."""
        return self._close is not None

    def mark_ready(self, lane: Lane) -> None:
        """This lane has something to read."""
        if not lane.is_ready and not self._has_given_up:
            lane.is_ready = True
            self._ready.append(lane)
            self._something_to_send.set()

    def say(self, frame: str) -> None:
        """Send this before what the lanes have."""
        if self.is_closing:
            return  # it comes too late
        self._answers.append(frame)
        self._something_to_send.set()
        if len(self._answers) >= MAX_ANSWERS:
            self.give_up((1008, "too many errors, none of them read"))

    def close_after(self, close: tuple[int, str], last_words: str | None = None) -> None:
        """Close once everything that can be said now is said. The first time counts."""
        if self._close is None:
            self._close, self._last_words = close, last_words
        self._something_to_send.set()

    def give_up(self, close: tuple[int, str]) -> None:
        """Close as soon as the answers are said; nothing else will be."""
        self._has_given_up = True
        self._ready.clear()
        self.close_after(close)

    async def run(self) -> None:
        """Send until the socket is to be closed, and close it. Waits for something to send without a
        deadline; each send has the socket's. Raises SocketClosed.
        """
        while True:
            await self._something_to_send.wait()
            self._something_to_send = trio.Event()
            while self._answers or self._ready:
                if self._answers:
                    await self._socket.send(self._answers.popleft())
                if self._ready:
                    await self._send_from(self._ready.popleft())
            if self._close is not None:
                if self._last_words is not None:
                    await self._socket.send(self._last_words)
                await self._socket.aclose(*self._close)
                return

    async def _send_from(self, lane: Lane) -> None:
        lane.is_ready = False
        try:
            taken = lane.take()
        except EventsExpired:
            return self.give_up((1008, "the connection is too far behind"))
        except Unasked as unasked:
            self.mark_ready(lane)
            ending = unasked.run.state.ending
            if ending is None or ending.reason != "superseded":
                self.close_after((1000, "the response ended"))
            return None
        if taken is None:
            return None
        run, frame = taken
        self.mark_ready(lane)
        begin = monotonic()
        await self._socket.send(frame)
        run.state.leg_work.times_ms.transport += (monotonic() - begin) * 1e3
        return None
