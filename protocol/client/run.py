"""A run, as a client sees it: its events in, appends and a cancel out.

It knows the states of a run and not how frames travel. Strategy: the connection delivers into a bounded
inbox, and the iteration takes out of it; appends are only sent, because an answer is an event like any other.
A run whose inbox stays full is given up: it must not stop the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import trio

from protocol.client.errors import ClientError, ConnectionLost, ServerError, server_error
from protocol.client.views import Event

INBOX = 1024  # events of one run that wait to be read
STALL_TIMEOUT = 10.0  # s that a full inbox may stop the reader; servers miss a pong after 20 s
GOODBYE_TIMEOUT = 2.0  # s, for the answer to a cancel

Frame: TypeAlias = dict[str, Any]
Items: TypeAlias = Sequence[Mapping[str, Any]]


class Sender(Protocol):
    """What a run needs of its connection."""

    silence_timeout: float

    async def send(self, frame: Frame) -> None:
        """Queues a frame to be sent. Raises ConnectionLost. Cancellation: queued or not, never in part."""

    def send_soon(self, frame: Frame) -> None:
        """Queues a frame if there is room and a connection."""


class Run:
    """One Response being made. Iterate over it for its events, again after a break: each comes once.

    As an async context manager it cancels the run if that is not over at the end. All methods are for any
    task, but only one may iterate at a time.
    """

    def __init__(self, sender: Sender, lane: str) -> None:
        self.id = ""
        self.lane = lane
        self.over = False
        self._sender = sender
        self._arrivals, self._inbox = trio.open_memory_channel[Event | ServerError](INBOX)
        self.failure: ClientError | None = None
        self.begun = trio.Event()
        self._ended = trio.Event()
        self._abandoned = False
        self._paused = False
        self._appended = False

    @property
    def held(self) -> bool:
        """Whether the run waits for this client, and nothing has been appended since it said so."""
        return self._paused and not self._appended

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Event:
        """The next event; after the terminal one the iteration ends.

        Raises ServerError when the server refused an append or a cancel: the run goes on, and so can the
        iteration. Raises ConnectionLost when the connection ends before the run, or when a leg is silent for
        too long. While the run is held there is no deadline: it is the client's turn. Cancellation loses no
        event.
        """
        try:
            with trio.fail_after(math.inf if self.held else self._sender.silence_timeout):
                arrival = await self._inbox.receive()
        except trio.EndOfChannel:
            if self.failure is not None:
                raise self.failure from None
            raise StopAsyncIteration from None
        except trio.TooSlowError:
            seconds = self._sender.silence_timeout
            raise ConnectionLost(f"The server was silent for {seconds:g} s in the middle of a leg.") from None
        if isinstance(arrival, ServerError):
            raise arrival
        return arrival

    async def append(self, items: Items, *, event_id: str | None = None) -> None:
        """Sends items, as a rule the results of calls. A refusal is raised by the iteration.

        A repeated `event_id` makes the append a retry. Raises ConnectionLost. Cancellation: sent whole or not
        at all.
        """
        frame = {
            "type": "response.append",
            "response_id": self.id,
            "stream_id": self.lane,
            "input": items,
        }
        await self._sender.send(frame if event_id is None else frame | {"event_id": event_id})
        self._appended = True

    async def cancel(self) -> None:
        """Asks the server to end the run; its terminal event (`incomplete`, `cancelled`) still comes.

        Raises ConnectionLost. Cancellation: sent whole or not at all.
        """
        await self._sender.send(self._goodbye)

    async def steer(self, input: str | Items) -> None:
        """Sends more user input to a run that is going on. The answer is an event, `response.steer.…`.

        Raises ConnectionLost. Cancellation: sent whole or not at all.
        """
        frame = {"type": "response.steer", "previous_response_id": self.id, "input": input}
        await self._sender.send(frame)

    async def aclose(self) -> None:
        """Drops what is unread. Cancels the run if it is not over, and waits for its end.

        It waits `GOODBYE_TIMEOUT` at most, also when it is cancelled.
        """
        self.abandon()
        with trio.move_on_after(GOODBYE_TIMEOUT, shield=True):
            await self._ended.wait()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def _goodbye(self) -> Frame:
        return {"type": "response.cancel", "response_id": self.id, "stream_id": self.lane}

    def abandon(self) -> None:
        """Nobody reads the rest: unread events are dropped, the run is cancelled if it is not over."""
        self._inbox.close()
        self._cancel_soon()

    def _cancel_soon(self) -> None:
        """Once. A run that has no id yet is cancelled when it gets one."""
        if not self._abandoned and self.id and not self.over:
            self._sender.send_soon(self._goodbye)
        self._abandoned = True

    async def deliver(self, event: Event) -> None:
        """The connection's part: takes an event in. Waits `STALL_TIMEOUT` at most for room in the inbox."""
        if event.response is not None and self.id and event.response.id != self.id:
            return  # of a Response that was on this lane before
        self._appended = False
        if event.type == "error":
            if self.id:
                await self._put(server_error(event))
            else:
                self.end(server_error(event))
            return
        if event.response is not None and not self.id:
            self.id = event.response.id
            self.begun.set()
            if self._abandoned:
                self._sender.send_soon(self._goodbye)
        if event.type in ("response.done", "response.in_progress"):
            self._paused = event.type == "response.done"
        await self._put(event)
        if event.terminal:
            self.end(None)

    async def _put(self, arrival: Event | ServerError) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # nobody reads any more
            try:
                self._arrivals.send_nowait(arrival)
            except trio.WouldBlock:
                with trio.move_on_after(STALL_TIMEOUT) as patience:
                    await self._arrivals.send(arrival)
                if patience.cancelled_caught:
                    self.failure = ConnectionLost(f"Given up: nobody read this run for {STALL_TIMEOUT:g} s.")
                    self._arrivals.close()
                    self._cancel_soon()

    def end(self, failure: ClientError | None) -> None:
        """The connection's part: nothing more will come. The iteration ends, with `failure` if any."""
        self.over = True
        self.failure = self.failure or failure
        self._arrivals.close()
        self.begun.set()
        self._ended.set()
