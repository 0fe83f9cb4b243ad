"""One port for HTTP and WebSocket: accept, read a head, answer it or upgrade. It knows nothing of Responses.

Strategy: one task a connection, inside a guard that nothing but cancellation gets out of, since an exception
in a handler would end the server. HTTP is `protocol.edge.http`, what follows an upgrade
`protocol.edge.socket`; who may do either is decided from the head alone, before a body is read or a 101 is
sent.

Shutdown in order: stop accepting; close the connections that wait for a request; let the backend finish its
work, up to the grace period; close the sockets with 1001; end the backend.
"""

from __future__ import annotations

import binascii
import errno
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import structlog
import trio

from protocol.edge.access import Access, Caller
from protocol.edge.backend import Backend, HttpHandler, SocketHandler
from protocol.edge.http import (
    HEAD_TIMEOUT,
    IDLE_TIMEOUT,
    Exchange,
    HttpConnection,
    Reply,
    Request,
    error_reply,
    linger,
)
from protocol.edge.metrics import Exposition, LatenessProbe, Sections, Value
from protocol.edge.routes import RESPONSES_PATH, answer, is_of_responses, route_of
from protocol.edge.socket import SocketClosed, open_socket
from protocol.edge.tls import secured, server_context
from protocol.errors import RequestError, overloaded, server_error
from protocol.settings import Settings

# The beta header of the only clients that speak the prototype's `response.append` and nothing newer.
PROTOTYPE_BETA = "responses_websockets=2026-02-04"
# Asked every few seconds by machines: not worth a line each.
QUIET_ROUTES = frozenset({"/healthz", "/metrics"})
LAST_FRAMES = 0.1  # s from the end of the last run to that of its connection, for what the writer still holds
REFUSAL_TIMEOUT = 1.0  # s to take a refusal, for which a fresh socket has room

log = structlog.get_logger()


class ListenError(Exception):
    """The address cannot be listened on; the message says which and why."""


class Server:
    """One listening server. Make it, then `run` it once. Raises CertificateError."""

    def __init__(
        self, settings: Settings, backend: Backend, serve_http: HttpHandler, serve_socket: SocketHandler
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._serve_http = serve_http
        self._serve_socket = serve_socket
        self._tls = settings.tls and server_context(*settings.tls)
        self._access = Access(settings)
        self._probe = LatenessProbe()
        self._exposition = Exposition(self.statistics)
        self._is_draining = False
        self._waiting: set[trio.CancelScope] = set()  # of connections that wait for a request
        self._numbers = count(1)
        self._open_connections = 0
        self._open_sockets = 0
        self._accepted = 0
        self._refused = 0
        self._failed = 0
        self._replies: dict[str, float] = {}  # by status

    def statistics(self) -> Sections:
        """Everything that /metrics shows."""
        server: dict[str, Value] = {
            "connections_open": self._open_connections,
            "sockets_open": self._open_sockets,
            "connections_accepted_total": self._accepted,
            "connections_refused_total": self._refused,
            "connections_failed_total": self._failed,
            "replies_total": self._replies,
        }
        return {"server": server, "loop": self._probe.statistics(), **self._backend.statistics()}

    async def run(
        self, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and serve until `stop` is set and all is drained. Reports the addresses it listens on.

        Raises `ListenError`. Cancellation skips the draining.
        """
        listeners = await _open_listeners(self._settings)
        async with trio.open_nursery() as backend_nursery:
            await backend_nursery.start(self._backend.run)
            backend_nursery.start_soon(self._probe.run)
            async with trio.open_nursery() as connections:
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(
                        partial(
                            trio.serve_listeners, self.serve_stream, listeners, handler_nursery=connections
                        )
                    )
                    addresses = [self._address(listener) for listener in listeners]
                    log.info("listening", addresses=addresses, model=self._settings.model)
                    task_status.started(addresses)
                    await stop.wait()
                    accepting.cancel_scope.cancel()
                await self._drain()
                connections.cancel_scope.cancel()
            backend_nursery.cancel_scope.cancel()

    def _address(self, listener: trio.SocketListener) -> str:
        host, port = listener.socket.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def _drain(self) -> None:
        self._is_draining = True
        log.info("draining", connections=self._open_connections, grace_seconds=self._settings.grace)
        for scope in self._waiting:
            scope.cancel()
        with trio.move_on_after(self._settings.grace) as scope:
            await self._backend.drain()
        if scope.cancelled_caught:
            log.warning("grace_exceeded", grace_seconds=self._settings.grace)
        if self._open_connections:
            await trio.sleep(LAST_FRAMES)

    async def serve_stream(self, stream: trio.abc.Stream) -> None:
        """Serve one connection and close it. Raises nothing: what goes wrong in here ends here."""
        connection_id = f"conn_{next(self._numbers)}"
        with structlog.contextvars.bound_contextvars(connection=connection_id):
            self._open_connections += 1
            try:
                if self._open_connections > self._settings.max_connections:
                    await self._refuse(stream)
                else:
                    self._accepted += 1
                    inside = stream if self._tls is None else await secured(stream, self._tls)
                    await self._serve_requests(inside)
            except* (trio.BrokenResourceError, trio.ClosedResourceError, SocketClosed):
                log.debug("peer_gone")
            except* Exception as group:
                self._failed += 1
                log.error("connection_failed", exc_info=group)
            finally:
                self._open_connections -= 1
                await trio.aclose_forcefully(stream)

    async def _refuse(self, stream: trio.abc.Stream) -> None:
        self._refused += 1
        log.warning("connection_refused", limit=self._settings.max_connections)
        if self._tls is not None:
            return  # saying why would take a handshake
        reply = error_reply(
            overloaded("This server has as many connections as it takes. Please try again in 1s.")
        )
        await HttpConnection(stream).send(reply, timeout=REFUSAL_TIMEOUT, close=True)

    async def _serve_requests(self, stream: trio.abc.Stream) -> None:
        http = HttpConnection(stream)
        idle_timeout = HEAD_TIMEOUT
        while True:
            request = None
            try:
                with self._cancelled_by_drain():
                    request = await http.read_head(idle_timeout=idle_timeout)
                if request is None:
                    return
                caller = self._access.admit(request)
                if request.wants_websocket and route_of(request) == RESPONSES_PATH:
                    websocket_key = _check_upgrade(request)
                    await http.read_body(request, limit=0)
                    if self._is_draining:
                        raise overloaded("This server is shutting down.")
                    break
                body = await http.read_body(request, limit=self._settings.max_body)
                reply = await self._answer(http, request, body, caller)
                close = self._is_draining or request.wants_websocket
            except RequestError as error:
                reply, close = _error_reply(error), True
            self._count(request, 200 if reply is None else reply.status)
            timeout = self._settings.send_timeout
            if reply is None:
                goes_on = await http.end_parts(timeout=timeout)
            else:
                goes_on = await http.send(reply, timeout=timeout, close=close)
            if not goes_on:
                await linger(stream)
                return
            idle_timeout = IDLE_TIMEOUT
        await self._serve_upgrade(stream, websocket_key, http.unread, request, caller)

    async def _answer(
        self, http: HttpConnection, request: Request, body: bytes, caller: Caller
    ) -> Reply | None:
        """The reply, None if it was sent in parts. Raises what stops a reply in its middle, in a group."""
        if not is_of_responses(request):
            return self._answer_at_once(request)
        close = self._is_draining or request.wants_websocket
        exchange = Exchange(http, request, body, send_timeout=self._settings.send_timeout, close=close)
        async with http.watched():
            try:
                return await self._serve_http(exchange, caller=caller)
            except RequestError as error:
                return error_reply(error)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise
            except Exception:  # ours: the client gets a plain 500, the log the traceback, others nothing
                if not http.can_reply:
                    raise
                log.exception("request_failed", method=request.method, path=request.path)
                return error_reply(server_error())

    def _answer_at_once(self, request: Request) -> Reply:
        try:
            return answer(request, self._backend, self._exposition)
        except Exception:  # ours, as above
            log.exception("request_failed", method=request.method, path=request.path)
            return error_reply(server_error())

    def _count(self, request: Request | None, status: int) -> None:
        self._replies[str(status)] = self._replies.get(str(status), 0) + 1
        if request is None:
            log.info("reply", status=status)
        elif route_of(request) not in QUIET_ROUTES:
            log.info("reply", method=request.method, path=request.path, status=status)

    async def _serve_upgrade(
        self,
        stream: trio.abc.Stream,
        key: str,
        early: bytes,
        request: Request,
        caller: Caller,
    ) -> None:
        prototype = PROTOTYPE_BETA in request.tokens("openai-beta")
        async with open_socket(stream, key=key, early=early, settings=self._settings) as socket:
            self._open_sockets += 1
            opened_at = trio.current_time()
            log.info("socket_opened", caller=caller.name, prototype=prototype)
            has_returned = False
            try:
                await self._serve_socket(socket, caller=caller, prototype=prototype)
                has_returned = True
            finally:
                await socket.aclose(*self._farewell(has_returned))
                self._open_sockets -= 1
                seconds = round(trio.current_time() - opened_at, 3)
                log.info("socket_closed", code=socket.close_code, seconds=seconds)
        await linger(stream)

    def _farewell(self, has_returned: bool) -> tuple[int, str]:
        """Why a socket that is still open when its handler ends is closed."""
        if has_returned:
            return 1000, ""
        if self._is_draining:
            return 1001, "the server is shutting down"
        return 1011, "internal error"

    @contextmanager
    def _cancelled_by_drain(self) -> Iterator[None]:
        with trio.CancelScope() as scope:
            if self._is_draining:
                scope.cancel()
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)


def _check_upgrade(request: Request) -> str:
    """The Sec-WebSocket-Key of a well-formed upgrade. Raises `RequestError`."""
    if request.method != "GET":
        raise RequestError(f"A WebSocket begins with GET, not {request.method}.", code="bad_upgrade")
    if (version := request.header("sec-websocket-version")) != "13":
        raise RequestError(f"Sec-WebSocket-Version has to be 13, not {version}.", code="bad_upgrade")
    key = request.header("sec-websocket-key") or ""
    try:
        is_good = len(b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        is_good = False
    if not is_good:
        raise RequestError("Sec-WebSocket-Key has to be 16 bytes in base64.", code="bad_upgrade")
    return key


def _error_reply(error: RequestError) -> Reply:
    return error_reply(error, [("www-authenticate", "Bearer")] if error.status == 401 else [])


async def _open_listeners(settings: Settings) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(settings.port, host=settings.host)
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        reason = (error.strerror or str(error)).lower()
        raise ListenError(f"cannot listen on {settings.host} port {settings.port}: {reason}{hint}") from error
