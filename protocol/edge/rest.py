"""Responses over HTTP: one POST, one run; and the routes that look at, list, end and delete what was made.

It knows requests, replies and runs. It knows neither sockets nor how a Response is made.

Strategy. A run goes on only while the exchange that asked for it does: whatever ends that early, a client
that leaves or one that stalls, ends the run within a step. Streaming or not, the answer comes from the run's
event log; a reader that is slow finds its deltas merged there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TypeAlias
from urllib.parse import parse_qs, unquote

import structlog
import trio

from protocol import wire
from protocol.edge.access import Caller
from protocol.edge.http import Exchange, Reply, error_reply, json_reply
from protocol.edge.listing import input_page
from protocol.edge.routes import RESPONSES_PATH, nothing_at, route_of, wrong_method
from protocol.errors import RequestError, nested_too_deeply, server_error
from protocol.lanes import Lane, events_expired
from protocol.log import Cursor, EventsExpired
from protocol.response import Run
from protocol.service import Service
from protocol.state import RunState
from protocol.store import Record

SEND_SIZE = 64 * 1024  # bytes of events that go out together when so many are there

Handler: TypeAlias = Callable[[Exchange, Caller], Awaitable[Reply | None]]

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.edge.rest")


class Rest:
    """Answers everything at and below /v1/responses that is no upgrade. Called as `HttpHandler` says."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._in_flight: Counter[str] = Counter()  # requests that make a Response, by caller

    async def __call__(self, exchange: Exchange, *, caller: Caller) -> Reply | None:
        """The whole reply; None if it was sent in parts. Raises RequestError, until a part is sent."""
        request = exchange.request
        handlers = self._handlers([unquote(part) for part in route_of(request).split("/")[2:]])
        if not handlers:
            raise nothing_at(request)
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            if route_of(request) == RESPONSES_PATH and request.method in ("GET", "HEAD"):
                return _upgrade_required()
            return wrong_method(request, handlers)
        return await handler(exchange, caller)

    def _handlers(self, path: list[str]) -> dict[str, Handler]:
        """What can be done with this path below /responses, by method."""
        match path:
            case []:
                return {"POST": self._create}
            case ["input_tokens"]:
                return {"POST": self._count}
            case [response_id] if response_id != "compact":
                retrieve, delete = partial(self._retrieve, response_id), partial(self._delete, response_id)
                return {"GET": retrieve, "DELETE": delete}
            case [response_id, "input_items"]:
                return {"GET": partial(self._list_input, response_id)}
            case [response_id, "cancel"]:
                return {"POST": partial(self._cancel, response_id)}
        return {}

    # ---- making one ----

    async def _create(self, exchange: Exchange, caller: Caller) -> Reply | None:
        with self._counted(caller):
            request = _decode(exchange)
            run, is_new = self._service.create(request, frame=exchange.body, caller=caller, over_http=True)
            if is_new:
                run.received = exchange.received
                run.state.leg_work.times_ms.transport += (monotonic() - exchange.received) * 1e3
                self._continue(run, caller)
                self._service.start(run)
            if not isinstance(run.owner, Lane):  # the request of a WebSocket, sent again here, stays there
                run.owner = exchange
            try:
                if request.stream:
                    return await self._stream(exchange, run)
                return await self._whole(run)
            finally:
                if run.owner is exchange:
                    run.interrupt("cancelled")  # no effect on one that has ended

    def _continue(self, run: Run, caller: Caller) -> None:
        previous = run.state.request.previous_response_id
        if previous is not None:
            run.find_past = partial(self._service.find_past, previous, caller)

    @contextmanager
    def _counted(self, caller: Caller) -> Iterator[None]:
        limit = self._service.settings.max_in_flight
        if self._in_flight[caller.name] >= limit:
            raise RequestError(
                f"You have {limit} requests in flight over HTTP, this server's limit. "
                "Wait for one of them, or please try again in 1s.",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
            )
        self._in_flight[caller.name] += 1
        try:
            yield
        finally:
            self._in_flight[caller.name] -= 1
            self._in_flight += Counter()  # drops those who have none

    async def _stream(self, exchange: Exchange, run: Run) -> Reply | None:
        """Show the run's events as they come. A run that was refused has none: its error is the reply."""
        try:
            cursor = run.log.cursor()
        except EventsExpired:
            raise events_expired(run) from None
        try:
            frame = await cursor.next()
            if run.log.refusal is not None:
                return error_reply(run.log.refusal)
            while frame is not None:
                events = _server_sent(frame, cursor)
                begin = monotonic()
                await exchange.send_events(events)
                if not run.log.ended:
                    run.state.leg_work.times_ms.transport += (monotonic() - begin) * 1e3
                frame = await cursor.next()
        except EventsExpired:
            log.warning("reader_too_far_behind", response=run.state.id)
            raise trio.BrokenResourceError("the peer is too far behind") from None
        finally:
            cursor.close()
        return None

    async def _whole(self, run: Run) -> Reply:
        """Wait for the end of a run, however long that takes, and reply with its Response or its refusal."""
        if not run.log.ended:
            ended = trio.Event()
            cursor = run.log.cursor(
                after=run.log.next_number - 1, on_ready=lambda: ended.set() if run.log.ended else None
            )
            try:
                await ended.wait()
            finally:
                cursor.close()
        if run.response is None:
            return error_reply(run.log.refusal or server_error())
        return json_reply(run.response)

    async def _count(self, exchange: Exchange, caller: Caller) -> Reply:
        with self._counted(caller):
            count = await self._service.count_input(_decode(exchange), caller)
        return json_reply({"object": "response.input_tokens", "input_tokens": count})

    # ---- what was made, or is being made ----

    async def _retrieve(self, response_id: str, exchange: Exchange, caller: Caller) -> Reply:
        if parse_qs(exchange.request.query).get("stream", ["false"])[-1] != "false":
            raise RequestError(
                "A response that exists cannot be streamed again by this server.",
                code="unsupported_parameter",
                param="stream",
            )
        if (run := self._service.find(response_id, caller)) is not None:
            return json_reply(self._service.response_of(run))
        return Reply(200, (await self._stored(response_id, caller)).response)

    async def _delete(self, response_id: str, exchange: Exchange, caller: Caller) -> Reply:
        if self._service.find(response_id, caller) is not None:
            raise RequestError(
                f"Response {response_id!r} is in progress: cancel it first.", code="response_in_progress"
            )
        if not await self._service.store.delete(response_id, caller.name):
            raise no_response(response_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def _list_input(self, response_id: str, exchange: Exchange, caller: Caller) -> Reply:
        run = self._service.find(response_id, caller)
        state = RunState.load((await self._stored(response_id, caller)).state) if run is None else run.state
        return json_reply(input_page(response_id, state.input_items, exchange.request.query))

    async def _cancel(self, response_id: str, exchange: Exchange, caller: Caller) -> Reply:
        """End a run that goes on, whichever way it came. One that has ended stays as it is."""
        if (run := self._service.find(response_id, caller)) is not None:
            run.interrupt("cancelled")
            return await self._whole(run)
        return Reply(200, (await self._stored(response_id, caller)).response)

    async def _stored(self, response_id: str, caller: Caller) -> Record:
        record = await self._service.store.get(response_id, caller.name)
        if record is None:
            raise no_response(response_id)
        return record


def no_response(response_id: str) -> RequestError:
    """There is no such Response, or not for this caller, who is not told which."""
    return RequestError(
        f"Response with id '{response_id[:100]}' not found.",
        status=404,
        code="response_not_found",
        param="response_id",
    )


def _decode(exchange: Exchange) -> wire.Create:
    encoding = exchange.request.header("content-encoding") or "identity"
    if encoding.strip().lower() != "identity":
        raise RequestError(
            f"A body with Content-Encoding {encoding[:100]!r} is not supported by this server.",
            status=415,
            code="unsupported_parameter",
        )
    try:
        return wire.decode_create(exchange.body)
    except RecursionError:
        raise nested_too_deeply() from None


def _server_sent(frame: str, cursor: Cursor) -> bytes:
    """This frame and those behind it that are there already, up to SEND_SIZE, as server-sent events."""
    events = [_server_sent_event(frame)]
    size = len(frame)
    while size < SEND_SIZE and (following := cursor.take()) is not None:
        events.append(_server_sent_event(following))
        size += len(following)
    return "".join(events).encode()


def _server_sent_event(frame: str) -> str:
    _, _, _, event_type, _ = frame.split('"', 4)  # the type is an event's first field
    return f"event: {event_type}\ndata: {frame}\n\n"


def _upgrade_required() -> Reply:
    error = RequestError(
        "POST a request to this path, or connect to it with a WebSocket.", status=426, code="upgrade_required"
    )
    return error_reply(error, [("upgrade", "websocket"), ("connection", "upgrade")])
