"""One WebSocket connection: lanes of runs, one reader, one writer. It knows client events and runs, not how
either is made.

Strategy. The reader never waits for work: it hands frames to a dispatcher through a short queue and refuses
what does not fit. The writer is the only task that sends. It visits lanes that have something to read, in
turn, one frame each, so a lane that streams does not starve another; and because it takes a frame from a
run's log only when the socket took the one before, a client that is slow finds its deltas merged and costs
nobody anything.

A lane is one `stream_id`: its runs are strictly one after another. A run has one lane at any time, the last
that asked for it; when the connection goes, the runs of its lanes are cancelled.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import monotonic

import structlog
import trio

from protocol import wire
from protocol.access import Caller
from protocol.errors import RequestError, nested_too_deeply, server_error
from protocol.log import Cursor, EventsExpired
from protocol.past import ConnectionMemory, Past
from protocol.response import Run, nothing_to_append_to
from protocol.service import Service
from protocol.socket import BinaryFrame, Socket, SocketClosed
from protocol.state import Phase
from protocol.work import Work

MAX_LANES = 32  # named stream ids of one connection, as at the public service
MAX_ACTIVE = 16  # responses of one connection that prepare or sample at once, as at the public service
MAX_QUEUED = 32  # creates that wait on one connection
FRAMES_AHEAD = 32  # frames read before the dispatcher has looked at them
MAX_ERRORS = 64  # error frames that wait to be sent: a client that makes more and reads none is flooding

STEER_ERRORS = {
    "response_not_found": "response_not_found",
    "steering_not_supported": "steering_not_supported",
    "previous_response_not_found": "response_not_active",  # it ended while the input was being looked at
}
"""What errors are called in `response.steer.failed`; all others are `invalid_input`."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.websocket")


async def serve_connection(
    socket: Socket, *, service: Service, caller: Caller, prototype: bool, connection_id: str
) -> None:
    """Serve until the socket is gone, then cancel the runs that it owned. `prototype`: the client knows only
    part of the protocol (see `RunState.prototype`). Raises nothing for what a client does.
    """
    connection = Connection(socket, service, caller, prototype)
    try:
        await connection.serve()
    except* SocketClosed:
        pass  # the edge, which opened the socket, logs its end
    finally:
        connection.leave()


class Lane:
    """One `stream_id` of a connection. `name` is None for the default lane."""

    def __init__(self, name: str | None, connection: Connection) -> None:
        self.name = name
        self.connection = connection
        self.waiting: deque[Run] = deque()
        self.run: Run | None = None  # the last one that was started
        self.is_ready = False  # stands in the connection's queue of lanes that can be read
        self._reading: deque[tuple[Run, Cursor]] = deque()
        self._suffix = "}" if name is None else f',"stream_id":"{name}"}}'

    @property
    def live_run(self) -> Run | None:
        """The one of its runs that is going on or held, if there is one."""
        return self.run if self.run is not None and self.run.state.phase is not Phase.ENDED else None

    def accept(self, run: Run, cursor: Cursor) -> None:
        """Have this run go on, and be shown, after those before it."""
        self.waiting.append(run)
        self._reading.append((run, cursor))

    def let_go(self, run: Run) -> None:
        """Another lane has this run from now on."""
        if run in self.waiting:
            self.waiting.remove(run)
        elif self.run is run:
            self.run = None
        for reading in [each for each in self._reading if each[0] is run]:
            reading[1].close()
            self._reading.remove(reading)

    def take(self) -> tuple[Run, str] | None:
        """The next frame of this lane, and whose it is. Raises EventsExpired, or _Unasked for an end nobody
        may be told.
        """
        while self._reading:
            run, cursor = self._reading[0]
            frame = cursor.take()
            if cursor.finished:
                cursor.close()
                self._reading.popleft()
                if frame is not None and run.state.prototype and run.state.ended_unasked:
                    raise _Unasked(run)
            if frame is not None:
                return run, frame[:-1] + self._suffix
            if not cursor.finished:
                break
        return None

    def runs(self) -> list[Run]:
        """Its runs that have not ended, those that wait included."""
        runs = (self.live_run, *self.waiting)
        return [run for run in runs if run is not None and run.state.phase is not Phase.ENDED]

    def close(self) -> None:
        """Nobody reads this lane any more."""
        for _, cursor in self._reading:
            cursor.close()
        self._reading.clear()


class _Unasked(Exception):
    """A prototype's run ended between its legs: such a client would take the frame for the answer to its next
    request.
    """

    def __init__(self, run: Run) -> None:
        self.run = run


class Connection:
    """One client's connection. `serve` it, then `leave`."""

    def __init__(self, socket: Socket, service: Service, caller: Caller, prototype: bool) -> None:
        self._socket = socket
        self._service = service
        self._caller = caller
        self._prototype = prototype
        self._lanes: dict[str | None, Lane] = {}
        self._memory = ConnectionMemory(service.shelf)
        self._ready: deque[Lane] = deque()
        self._errors: deque[str] = deque()
        self._close: tuple[int, str] | None = None  # once everything is said
        self._last_words: str | None = None  # a frame to say then
        self._something_to_send = trio.Event()
        self._expired = False

    async def serve(self) -> None:
        """Read, dispatch, write and ping, until the socket is closed by either side. Raises SocketClosed, in
        a group.
        """
        send_frame, receive_frame = trio.open_memory_channel[tuple[str, float]](FRAMES_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dispatch_all, receive_frame)
            nursery.start_soon(self._write)
            nursery.start_soon(self._ping)
            nursery.start_soon(self._grow_old)
            while True:
                try:
                    frame = await self._socket.recv()
                except BinaryFrame:
                    self._say(RequestError("Frames are JSON text, never binary.", code="invalid_json"), None)
                    self._give_up((1003, "binary frames are not supported"))
                    continue
                try:
                    send_frame.send_nowait((frame, monotonic()))
                except trio.WouldBlock:
                    self._say(flooded(FRAMES_AHEAD), None)

    def leave(self) -> None:
        """Give up everything: the runs of this connection are cancelled within a step."""
        for lane in self._lanes.values():
            lane.close()
            for run in lane.runs():
                run.on_change = None
                run.keep = Past.release
                run.interrupt("cancelled")
                if not run.is_started:
                    self._service.forget(run)
        self._lanes.clear()
        self._memory.release()

    # ---- what the client says ----

    async def _dispatch_all(self, frames: trio.MemoryReceiveChannel[tuple[str, float]]) -> None:
        async for frame, received in frames:
            stream_id = None
            try:
                head = wire.decode_head(frame)
                stream_id = head.stream_id
                await self._dispatch(wire.decode_client_event(head, frame), frame, received)
            except RequestError as error:
                self._say(error, stream_id)
            except RecursionError:
                self._say(nested_too_deeply(), stream_id)
            except Exception:  # ours: one frame is answered with an error, everything else goes on
                log.exception("dispatch_failed")
                self._say(server_error(), stream_id)

    async def _dispatch(self, event: wire.ClientEvent, frame: str, received: float) -> None:
        match event:
            case wire.Create():
                self._create(event, frame, received)
            case wire.Append():
                await self._append(event, frame, received)
            case wire.Cancel():
                self._find(event.response_id, waiting=True).interrupt("cancelled")
            case wire.Steer():
                await self._steer(event)
            case wire.Inject():
                failure = {
                    "code": "response_not_found",
                    "message": "No response of this connection takes injections.",
                }
                self._say_failed(
                    "response.inject.failed", failure, response_id=event.response_id, input=event.input
                )
            case wire.Processed():
                pass

    def _create(self, request: wire.Create, frame: str, received: float) -> None:
        if self._expired:
            raise connection_expired()
        lane = self._lane(request.stream_id)
        if sum(len(each.waiting) for each in self._lanes.values()) >= MAX_QUEUED:
            raise flooded(MAX_QUEUED)
        run, is_new = self._service.create(
            request, frame=frame, caller=self._caller, prototype=self._prototype
        )
        if is_new:
            run.state.leg_work.times_ms.transport += (monotonic() - received) * 1e3
            run.received = received
            self._continue(run, lane)
        elif run in lane.runs():
            return  # it is being shown, or will be
        try:
            cursor = run.log.cursor(on_ready=lambda: self._mark_ready(lane))
        except EventsExpired:
            raise events_expired(run) from None
        if isinstance(run.owner, Lane):
            run.owner.let_go(run)
            run.owner.connection.lose(run, run.owner)
        run.owner = lane
        run.keep = partial(self._keep, lane)
        held = lane.live_run
        if held is not None and held.state.phase is Phase.HELD:
            held.interrupt("superseded")
        lane.accept(run, cursor)
        self._start_waiting()

    def _continue(self, run: Run, lane: Lane) -> None:
        """What a run of this connection continues, and what becomes of it when it has ended."""
        previous = run.state.request.previous_response_id
        if previous is None:
            return

        async def find_past() -> Past:
            return self._memory.take(lane, previous) or await self._service.find_past(previous, self._caller)

        run.find_past = find_past
        run.past = self._memory.pin(lane, previous) or run.past

    def _keep(self, lane: Lane, past: Past) -> None:
        previous = past.state.request.previous_response_id
        if past.state.ending is not None and past.state.ending.status == "failed":
            past.release()
            if previous is not None:
                self._memory.evict(lane, previous)
            return
        if past.state.lifecycle == "held":
            past.release()  # held for as long as the run; a later turn finds what the pool still has
        self._memory.keep(lane, past)

    def lose(self, run: Run, lane: Lane) -> None:
        """A run of this connection was asked for by another lane, maybe of another connection."""
        if run.state.phase is not Phase.ENDED:
            self._say(taken_over(run), lane.name)
        self._start_waiting()

    async def _append(self, event: wire.Append, frame: str, received: float) -> None:
        try:
            run = self._addressee(event)
            ignored: list[str] = []
            items = wire.parse_items(event.input, ignored)
            work = Work(bytes_in=len(frame), ignored=ignored)
            work.times_ms.transport = (monotonic() - received) * 1e3
            await run.append(items, event_id=event.event_id, work=work, received=received)
        except RequestError as error:
            if self._prototype and error.code == "previous_response_not_found":
                # These clients give up at a 400, and start over with a full create at a 500.
                error = RequestError(error.message, status=500, type="server_error", code=error.code)
            raise error

    def _addressee(self, event: wire.Append) -> Run:
        """The run that an append is for: by its id, else the one of its lane. Raises RequestError."""
        if event.response_id is not None:
            try:
                run = self._find(event.response_id)
            except RequestError:
                raise nothing_to_append_to(event.response_id) from None
        else:
            lane = self._lanes.get(event.stream_id)
            found = lane.live_run if lane is not None else None
            if found is None:
                raise nothing_to_append_to(None)
            run = found
        if run.state.lifecycle != "held":
            raise nothing_to_append_to(event.response_id)
        return run

    async def _steer(self, event: wire.Steer) -> None:
        try:
            run = self._find(event.previous_response_id)
            if run.state.lifecycle != "held":
                raise RequestError("Only held responses can be steered here.", code="steering_not_supported")
            await run.steer(wire.parse_items(event.input, []))
        except RequestError as error:
            code = STEER_ERRORS.get(error.code, "invalid_input")
            failure = {"type": "invalid_request_error", "code": code, "message": error.message}
            about = {"previous_response_id": event.previous_response_id, "input": event.input}
            self._say_failed("response.steer.failed", failure, steer=about)

    def _find(self, response_id: str, *, waiting: bool = False) -> Run:
        """A run of this connection that goes on or is held, or also one that waits for its lane. Raises
        RequestError.
        """
        for lane in self._lanes.values():
            for run in lane.runs():
                if run.state.id == response_id and (waiting or run is lane.run):
                    return run
        raise RequestError(
            f"Response {response_id!r} is not going on, on this connection.",
            code="response_not_found",
            param="response_id",
        )

    def _lane(self, stream_id: str | None) -> Lane:
        lane = self._lanes.get(stream_id)
        if lane is None:
            if stream_id is not None and len(self._lanes.keys() - {None}) >= MAX_LANES:
                raise RequestError(
                    "This WebSocket connection has reached its maximum number of distinct stream IDs "
                    f"({MAX_LANES}). Reuse an existing stream_id or open a new WebSocket connection.",
                    code="websocket_stream_limit_reached",
                    param="stream_id",
                )
            lane = self._lanes[stream_id] = Lane(stream_id, self)
        return lane

    def _start_waiting(self) -> None:
        """Start what can be started: the next run of every lane that is free, up to MAX_ACTIVE at work."""
        working = (Phase.PREPARING, Phase.SAMPLING)
        runs = [lane.live_run for lane in self._lanes.values()]
        active = sum(run is not None and run.state.phase in working for run in runs)
        for lane in self._lanes.values():
            while lane.waiting and lane.live_run is None and active < MAX_ACTIVE:
                run = lane.run = lane.waiting.popleft()
                active += run.state.phase in working
                run.on_change = self._start_waiting
                self._service.start(run)
        if self._expired:
            self._close_when_idle()

    # ---- what the client is told ----

    def _mark_ready(self, lane: Lane) -> None:
        if not lane.is_ready:
            lane.is_ready = True
            self._ready.append(lane)
            self._something_to_send.set()

    def _say(self, error: RequestError, stream_id: str | None) -> None:
        log.info("request_refused", code=error.code, param=error.param, message=error.message)
        self._say_frame(wire.error_frame(error, stream_id))

    def _say_failed(self, type: str, error: dict[str, str], **about: object) -> None:
        """The answer to a steer or an inject that came to nothing; it gives back what was sent."""
        self._say_frame(wire.encode_any({"type": type, "sequence_number": 0, "error": error, **about}))

    def _say_frame(self, frame: str) -> None:
        if self._close is not None:
            return  # it comes too late
        self._errors.append(frame)
        self._something_to_send.set()
        if len(self._errors) >= MAX_ERRORS:
            self._give_up((1008, "too many errors, none of them read"))

    def _close_after(self, close: tuple[int, str]) -> None:
        """Close once everything that can be said now is said."""
        self._close = self._close or close
        self._something_to_send.set()

    def _give_up(self, close: tuple[int, str]) -> None:
        """Close as soon as the errors are said; nothing else will be."""
        for lane in self._lanes.values():
            lane.close()
        self._close_after(close)

    async def _write(self) -> None:
        """The only task that sends. Waits for something to send without a deadline; each send has the
        socket's.
        """
        while True:
            await self._something_to_send.wait()
            self._something_to_send = trio.Event()
            while self._errors or self._ready:
                if self._errors:
                    await self._socket.send(self._errors.popleft())
                if self._ready:
                    await self._write_from(self._ready.popleft())
            if self._close is not None:
                if self._last_words is not None:
                    await self._socket.send(self._last_words)
                await self._socket.aclose(*self._close)
                return

    async def _write_from(self, lane: Lane) -> None:
        lane.is_ready = False
        try:
            taken = lane.take()
        except EventsExpired:
            return self._give_up((1008, "the connection is too far behind"))
        except _Unasked as unasked:
            self._mark_ready(lane)
            ending = unasked.run.state.ending
            if ending is None or ending.reason != "superseded":
                self._close_after((1000, "the response ended"))
            return None
        if taken is None:
            return None
        run, frame = taken
        self._mark_ready(lane)
        begin = monotonic()
        await self._socket.send(frame)
        run.state.leg_work.times_ms.transport += (monotonic() - begin) * 1e3
        return None

    async def _ping(self) -> None:
        """Find out about peers that went without a word."""
        settings = self._service.settings
        while True:
            await trio.sleep(settings.ping_interval)
            await self._socket.ping(settings.ping_timeout)

    async def _grow_old(self) -> None:
        """After its lifetime a connection takes no creates; it is closed when its runs have ended, never in
        the middle.
        """
        await trio.sleep(self._service.settings.connection_lifetime)
        self._expired = True
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._close is None and not any(lane.runs() for lane in self._lanes.values()):
            self._last_words = wire.error_frame(connection_expired())
            self._close_after((1001, "connection limit reached"))


def flooded(limit: int) -> RequestError:
    """More at once than one connection may have."""
    return RequestError(
        f"This connection has {limit} requests waiting, its limit; please try again in 1s.",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
    )


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


def connection_expired() -> RequestError:
    """The connection is older than connections get."""
    return RequestError(
        "Responses websocket connection limit reached (60 minutes). "
        "Create a new websocket connection to continue.",
        code="websocket_connection_limit_reached",
    )
