"""One WebSocket connection: what its client says, and what becomes of it.

It knows client events, lanes and runs, not how any of them is made. Strategy: the reader never waits for
work: it hands frames to a dispatcher through a short queue and refuses what does not fit. Each frame is done
by the dispatcher in its turn; everything that takes time is a run, in a task of its own. What the client is
told goes through one `Outbox`.

A run has one lane at any time, the last that asked for it; when the connection goes, the runs of its lanes
are cancelled.
"""

from __future__ import annotations

from time import monotonic

import structlog
import trio

from protocol import steering, wire
from protocol.chains import Chains, connection_expired, continuation
from protocol.edge.access import Caller
from protocol.edge.socket import BinaryFrame, Socket, SocketClosed
from protocol.errors import RequestError, nested_too_deeply, server_error
from protocol.lanes import Lane, named, taken_over
from protocol.outbox import Outbox
from protocol.past import Past
from protocol.response import Run, nothing_to_append_to
from protocol.service import Service
from protocol.state import Phase
from protocol.work import Work

MAX_LANES = 32  # named stream ids of one connection, as at the public service
MAX_ACTIVE = 16  # responses of one connection that prepare or sample at once, as at the public service
MAX_QUEUED = 32  # creates that wait on one connection
FRAMES_AHEAD = 32  # frames read before the dispatcher has looked at them

STEER_ERRORS = {
    **{
        code: code
        for code in (
            *("response_not_found", "response_already_completed", "response_not_active"),
            *("steering_not_supported", "too_many_pending_steers"),
        )
    },
    "previous_response_not_found": "response_not_active",  # it ended while the input was being looked at
}
"""What errors are called in `response.steer.failed`; all others are `invalid_input`."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.websocket")


async def serve_connection(socket: Socket, *, service: Service, caller: Caller, prototype: bool) -> None:
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


class Connection:
    """One client's connection. `serve` it, then `leave`."""

    def __init__(self, socket: Socket, service: Service, caller: Caller, prototype: bool) -> None:
        self._socket = socket
        self._service = service
        self._caller = caller
        self._prototype = prototype
        self._lanes: dict[str | None, Lane] = {}
        self._outbox = Outbox(socket)
        self._chains = Chains(service, caller, prototype, self._outbox)

    async def serve(self) -> None:
        """Read, dispatch, write and ping, until the socket is closed by either side. Raises SocketClosed, in
        a group.
        """
        send_frame, receive_frame = trio.open_memory_channel[tuple[str, float]](FRAMES_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dispatch_all, receive_frame)
            nursery.start_soon(self._outbox.run)
            nursery.start_soon(self._ping)
            nursery.start_soon(self._grow_old)
            while True:
                try:
                    frame = await self._socket.recv()
                except BinaryFrame:
                    self._say(RequestError("Frames are JSON text, never binary.", code="invalid_json"), None)
                    self._outbox.give_up((1003, "binary frames are not supported"))
                    continue
                try:
                    send_frame.send_nowait((frame, monotonic()))
                except trio.WouldBlock:
                    self._say(flooded(FRAMES_AHEAD), None)

    def leave(self) -> None:
        """Give up everything: the runs of this connection are cancelled within a step."""
        for lane in self._lanes.values():
            lane.close()
            for run in lane.runs:
                run.on_change = None
                run.keep = Past.release
                run.interrupt("cancelled")
                if not run.is_started:
                    self._service.forget(run)
        self._lanes.clear()
        self._chains.memory.release()

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
                self._cancel(event)
            case wire.Steer():
                await self._steer(event)
            case wire.Inject():
                self._refuse_injection(event)
            case wire.Processed():
                pass

    # ---- new runs ----

    def _create(self, request: wire.Create, frame: str, received: float, *, said: Run | None = None) -> None:
        """A run for this request, on its lane. Items in front that repeat what the run in `said` said are
        dropped. Raises RequestError.
        """
        if self._chains.is_expired:
            raise connection_expired()
        lane = self._lane(request.stream_id)
        if sum(len(each.waiting) for each in self._lanes.values()) >= MAX_QUEUED:
            raise flooded(MAX_QUEUED)
        live = lane.live_run
        held = live if live is not None and live.state.phase is Phase.HELD else None
        run, is_new = self._service.create(
            request, frame=frame, caller=self._caller, prototype=self._prototype, superseded=held
        )
        if is_new:
            run.state.leg_work.times_ms.transport += (monotonic() - received) * 1e3
            run.received = received
            if said is not None:
                run.state.drop_echoes(said.state.output)
            self._chains.link(run, lane)
        elif run in lane.runs:
            return  # it is being shown, or will be
        self._chains.accept(run, lane)
        if held is not None:
            held.interrupt("superseded")
        self._start_waiting()

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
        if self._chains.is_expired:
            self._close_when_idle()

    def _cancel(self, event: wire.Cancel) -> None:
        found = self._look_for(event.response_id)
        if found is None:
            raise RequestError(
                f"Response {event.response_id!r} is not going on, on this connection.",
                code="response_not_found",
                param="response_id",
            )
        lane, run = found
        run.interrupt("cancelled")
        if run in lane.waiting:  # it ends now, and is shown when its turn comes
            lane.waiting.remove(run)
            self._service.start(run)

    def _lose(self, lane: Lane, run: Run) -> None:
        """A run of this connection was asked for by another lane, maybe of another connection."""
        if run.state.phase is not Phase.ENDED:
            self._say(taken_over(run), lane.name)
        self._start_waiting()

    # ---- input for runs that are there ----

    async def _append(self, event: wire.Append, frame: str, received: float) -> None:
        try:
            lane = self._lanes.get(event.stream_id)
            if lane is not None and event.response_id is None and self._chains.can_be_appended_to(lane):
                return self._append_to_ended(lane, event, frame, received)
            run = self._addressee(event)
            ignored: list[str] = []
            positions: list[int] = []
            items = wire.parse_items(event.input, ignored, positions=positions)
            work = Work(bytes_in=wire.wire_size(frame), ignored=ignored)
            work.times_ms.transport = (monotonic() - received) * 1e3
            return await run.append(
                items, positions=positions, event_id=event.event_id, work=work, received=received
            )
        except RequestError as error:
            if self._prototype and error.code == "previous_response_not_found":
                # These clients give up at a 400, and start over with a full create at a 500.
                error = RequestError(error.message, status=500, type="server_error", code=error.code)
            raise error

    def _append_to_ended(self, lane: Lane, event: wire.Append, frame: str, received: float) -> None:
        """A new Response that inherits everything from the lane's last but the input: what the oldest clients
        mean, who know of nothing that is held.
        """
        last = lane.run
        assert last is not None
        request = continuation(last.state)
        request.input, request.event_id, request.stream_id = event.input, event.event_id, lane.name
        self._create(request, frame, received, said=last)

    def _addressee(self, event: wire.Append) -> Run:
        """The run that an append is for: by its id, else the one of its lane. Raises RequestError."""
        found: Run | None = None
        if event.response_id is None:
            lane = self._lanes.get(event.stream_id)
            found = lane.live_run if lane is not None else None
        elif at := self._look_for(event.response_id):
            found = at[1]
        if found is None or found.state.lifecycle != "held" or not found.is_started:
            raise nothing_to_append_to(event.response_id)
        return found

    async def _steer(self, event: wire.Steer) -> None:
        try:
            found = self._look_for(event.previous_response_id)
            if found is None:
                code = self._chains.why_gone(event.previous_response_id)
                raise RequestError("This response takes no input, not here or not any more.", code=code)
            if not found[1].is_started:
                raise RequestError("This response has not begun.", code="response_not_active")
            await found[1].steer(wire.parse_items(event.input, []), event.input)
        except RequestError as error:
            code = STEER_ERRORS.get(error.code, "invalid_input")
            response_id = event.previous_response_id
            self._say_on_its_lane(
                response_id, steering.failed_frame(code, error.message, response_id, event.input)
            )

    def _refuse_injection(self, event: wire.Inject) -> None:
        past = self._chains.memory.find(event.response_id)
        code = "response_not_found" if past is None else "response_already_completed"
        failure = {"code": code, "message": "No response of this connection takes injections."}
        about = {"error": failure, "response_id": event.response_id, "input": event.input}
        frame = wire.encode_any({"type": "response.inject.failed", "sequence_number": 0, **about})
        self._say_on_its_lane(event.response_id, frame)

    # ---- lanes, and runs on them ----

    def _look_for(self, response_id: str) -> tuple[Lane, Run] | None:
        """A run of this connection that goes on, is held, or waits for its turn; and its lane. None if there
        is none.
        """
        return next(
            (
                (lane, run)
                for lane in self._lanes.values()
                for run in lane.runs
                if run.state.id == response_id
            ),
            None,
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
            lane = self._lanes[stream_id] = Lane(
                stream_id, on_ready=self._outbox.mark_ready, on_lost=self._lose
            )
        return lane

    # ---- what the client is told ----

    def _say(self, error: RequestError, stream_id: str | None) -> None:
        log.info("request_refused", code=error.code, param=error.param, message=error.message)
        self._outbox.say(wire.error_frame(error, stream_id))

    def _say_on_its_lane(self, response_id: str, frame: str) -> None:
        """An answer that speaks of this Response, which may be unknown."""
        found, past = self._look_for(response_id), self._chains.memory.find(response_id)
        if found is not None:
            frame = named(frame, found[0].name)
        elif past is not None:
            frame = named(frame, past.lane)
        self._outbox.say(frame)

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
        self._chains.is_expired = True
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if not self._outbox.is_closing and not any(lane.runs for lane in self._lanes.values()):
            self._outbox.close_after(
                (1001, "connection limit reached"), wire.error_frame(connection_expired())
            )


def flooded(limit: int) -> RequestError:
    """More at once than one connection may have."""
    return RequestError(
        f"This connection has {limit} requests waiting, its limit; please try again in 1s.",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
    )
