"""A client for Responses over one WebSocket: runs on lanes, their events in, results of tools out.

It knows frames, lanes and the states of a run. It does not know what tools do, nor how a run looks on a
screen. Strategy: the reader decodes each frame once and puts it into the bounded inbox of the run whose lane
it names. The writer alone touches the sending side of the socket, because a send that is cancelled half way
leaves half a frame behind. Both are shielded and are ended by the connection, so that a caller who is
cancelled can still say goodbye. A run whose events nobody reads is given up after a while: it must not stop
the others.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from types import TracebackType
from typing import Any, TypeAlias
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection, wrap_client_stream
from wsproto.utilities import ProtocolError

from protocol.views import Event, Reason, decode_event

MAX_MESSAGE_SIZE = 64 * 2**20  # characters; a terminal event carries every item of its run
RECEIVE_BUFFER = 64 * 2**10  # bytes; the library's 4 KiB cost 2.5 times as much for a large frame
LANES = 32  # named lanes that a server grants to one connection
INBOX = 1024  # events of one run that wait to be read
OUTBOX = 64  # frames that wait to be sent
CONNECT_TIMEOUT = 10.0  # s, for name and TCP connection, and again for TLS and the handshake
SEND_TIMEOUT = 30.0  # s, for one frame; a peer that takes no byte for so long is gone
SILENCE_TIMEOUT = 60.0  # s; a server that works on a leg sends something every 15 s
STALL_TIMEOUT = 10.0  # s that a full inbox may stop the reader; servers miss a pong after 20 s
GOODBYE_TIMEOUT = 2.0  # s, for the answer to a cancel, and again for the closing handshake

Frame: TypeAlias = dict[str, Any]
Items: TypeAlias = Sequence[Mapping[str, Any]]


class ClientError(Exception):
    """What can go wrong between this client and its server."""


class ConnectionLost(ClientError):
    """There is no connection (any more), or nothing has come over it for too long."""


class ServerError(ClientError):
    """The server refused something: an `error` frame, or a refused handshake."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message, code, param)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def __str__(self) -> str:
        about = ", ".join(str(part) for part in (self.status, self.code, self.param) if part)
        return f"{self.message} ({about})"


@asynccontextmanager
async def connect(
    url: str,
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    silence_timeout: float = SILENCE_TIMEOUT,
    stream: trio.abc.Stream | None = None,
) -> AsyncIterator[Connection]:
    """Opens a connection to a `ws://` or `wss://` URL; at the end, sends what is queued and closes it.

    `silence_timeout` (s) bounds every wait for a server that has something to do. `stream` is used in place
    of a new TCP connection. Raises ConnectionLost, ServerError (a refused handshake), ValueError (not such a
    URL). Exceptions of the body come out as they are. Cancellation takes `GOODBYE_TIMEOUT` at most.
    """
    address = urlsplit(url)
    if address.scheme not in ("ws", "wss") or not address.hostname:
        raise ValueError(f"not a ws:// or wss:// URL: {url}")
    given = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    given |= headers or {}
    connection = Connection(silence_timeout)
    stream = stream or await _dial(address)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection._serve, stream, address, given)
            try:
                await connection._shook_hands.wait()
                if connection._loss is not None:
                    raise connection._loss
                yield connection
            finally:
                await connection._close()
    except ExceptionGroup as group:  # of one: the background raises nothing
        raise group.exceptions[0] from group.exceptions[0].__cause__


async def list_models(url: str, *, api_key: str | None = None) -> list[str]:
    """The ids of the models of the server that answers `url` (as for `connect`), in its order.

    Raises ConnectionLost, ServerError. Cancellation: the request goes on in its thread, within
    `CONNECT_TIMEOUT`.
    """
    models = url.replace("ws", "http", 1).removesuffix("/responses") + "/models"
    request = Request(models, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    return await trio.to_thread.run_sync(_get_models, request, abandon_on_cancel=True)


class Connection:
    """One WebSocket to a server, made by `connect`. All methods are for any task."""

    def __init__(self, silence_timeout: float) -> None:
        self.silence_timeout = silence_timeout
        self._runs: dict[str, Run] = {}
        self._idle_lanes = [f"lane-{number}" for number in range(LANES, 0, -1)]
        self._lanes = trio.Semaphore(LANES)
        self._outbox_in, self._outbox = trio.open_memory_channel[str](OUTBOX)
        self._loss: ClientError | None = None
        self._last_refusal: ServerError | None = None
        self._background = trio.CancelScope()
        self._shook_hands = trio.Event()
        self._writer_done = trio.Event()

    async def create(self, **fields: Any) -> Run:
        """Asks for a Response and waits for its `response.created`. `fields` are those of the API, flat.

        Raises ServerError when the server refuses it, ConnectionLost. Waits without a deadline for a free
        lane: one comes free whenever a run of this connection ends. Cancellation: a Response that was already
        asked for is cancelled.
        """
        await self._lanes.acquire()
        run = Run(self, self._idle_lanes.pop())
        self._runs[run.lane] = run
        try:
            await self._send({"type": "response.create", "stream_id": run.lane, **fields})
        except BaseException:  # nothing was sent
            self._free(run)
            raise
        try:
            with trio.fail_after(self.silence_timeout):
                await run._begun.wait()
        except trio.TooSlowError:
            run._abandon()
            raise ConnectionLost(f"No answer to a create within {self.silence_timeout:g} s.") from None
        except trio.Cancelled:
            await run.aclose()
            raise
        if run._failure is not None:
            raise run._failure
        return run

    async def held(self, **fields: Any) -> Run:
        """`create` with the held lifecycle: the run pauses at tool calls and goes on after appends."""
        return await self.create(lifecycle="held", **fields)

    async def _send(self, frame: Frame) -> None:
        try:
            await self._outbox_in.send(msgspec.json.encode(frame).decode())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._loss or ConnectionLost("The connection is closed.") from None

    def _send_soon(self, frame: Frame) -> None:
        """For a goodbye, which may not wait. If the outbox is full or closed, so is the connection, soon."""
        with suppress(trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            self._outbox_in.send_nowait(msgspec.json.encode(frame).decode())

    async def _serve(self, stream: trio.abc.Stream, address: SplitResult, headers: Mapping[str, str]) -> None:
        """The background, from the handshake to `_close` or the peer's end. Its errors become the loss."""
        try:
            with self._background:
                async with trio.open_nursery() as nursery:
                    with trio.fail_after(CONNECT_TIMEOUT):
                        websocket = await wrap_client_stream(
                            nursery,
                            stream,
                            address.netloc.rpartition("@")[2],
                            (address.path or "/") + (f"?{address.query}" if address.query else ""),
                            extra_headers=[(name.encode(), text.encode()) for name, text in headers.items()],
                            max_message_size=MAX_MESSAGE_SIZE,
                            receive_buffer_size=RECEIVE_BUFFER,
                        )
                    self._background.shield = True  # from here on `_close` ends it
                    self._shook_hands.set()
                    nursery.start_soon(self._write, websocket, stream)
                    await self._read(websocket)
                    await self._writer_done.wait()
                    nursery.cancel_scope.cancel()
        except* ConnectionRejected as group:
            rejected = _first(group)
            otherwise = "The server refused the WebSocket handshake."
            self._lose(_refusal(rejected.status_code, rejected.body, otherwise))
        except* trio.TooSlowError:
            self._lose(ConnectionLost(f"No WebSocket handshake within {CONNECT_TIMEOUT:g} s."))
        except* ProtocolError as group:
            self._lose(ConnectionLost(f"The server broke the WebSocket protocol: {_first(group)}"))
        finally:
            self._lose(ConnectionLost("The connection is closed."))
            self._shook_hands.set()
            self._writer_done.set()
            await trio.aclose_forcefully(stream)

    async def _read(self, websocket: WebSocketConnection) -> None:
        try:
            while True:
                event = decode_event(await websocket.get_message())
                if run := self._runs.get(event.stream_id or ""):
                    await run._deliver(event)
                    if run.over:
                        self._free(run)
                elif event.type == "error" and event.stream_id is None:
                    self._refused(_server_error(event))
        except ConnectionClosed as closed:
            self._lose(self._last_refusal or ConnectionLost(f"The server is gone: {_close_reason(closed)}."))
        except msgspec.DecodeError as error:
            self._lose(ConnectionLost(f"The server sent a frame that is no event: {error}"))

    async def _write(self, websocket: WebSocketConnection, stream: trio.abc.Stream) -> None:
        """Sends until `_close` or `_lose` closes the outbox, then says goodbye."""
        try:
            with suppress(trio.ClosedResourceError):
                async for frame in self._outbox:
                    with trio.fail_after(SEND_TIMEOUT):
                        await websocket.send_message(frame)
            await websocket.aclose()
        except trio.TooSlowError:
            self._lose(ConnectionLost(f"The server took no byte for {SEND_TIMEOUT:g} s."))
            await trio.aclose_forcefully(stream)
        except ConnectionClosed:
            return  # the reader has the reason
        finally:
            self._writer_done.set()

    def _refused(self, error: ServerError) -> None:
        """An error that names no lane answers creates that could not be given one."""
        self._last_refusal = error
        for run in [run for run in self._runs.values() if not run.id]:
            run._end(error)
            self._free(run)

    def _lose(self, error: ClientError) -> None:
        """The first loss counts: every run fails with it, and so does whatever is sent later."""
        if self._loss is not None:
            return
        self._loss = error
        self._outbox.close()
        for run in list(self._runs.values()):
            run._end(error)
            self._free(run)

    def _free(self, run: Run) -> None:
        if self._runs.pop(run.lane, None) is not None:
            self._idle_lanes.append(run.lane)
            self._lanes.release()

    async def _close(self) -> None:
        with trio.move_on_after(GOODBYE_TIMEOUT, shield=True):
            self._outbox_in.close()
            await self._writer_done.wait()
        self._background.cancel()


class Run:
    """One Response being made. Iterate over it for its events, again after a break: each comes once.

    As an async context manager it cancels the run if that is not over at the end. All methods are for any
    task, but only one may iterate at a time.
    """

    def __init__(self, connection: Connection, lane: str) -> None:
        self.id = ""
        self.lane = lane
        self.over = False
        self._connection = connection
        self._arrivals, self._inbox = trio.open_memory_channel[Event | ServerError](INBOX)
        self._failure: ClientError | None = None
        self._begun = trio.Event()
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
            with trio.fail_after(math.inf if self.held else self._connection.silence_timeout):
                arrival = await self._inbox.receive()
        except trio.EndOfChannel:
            if self._failure is not None:
                raise self._failure from None
            raise StopAsyncIteration from None
        except trio.TooSlowError:
            seconds = self._connection.silence_timeout
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
        await self._connection._send(frame if event_id is None else frame | {"event_id": event_id})
        self._appended = True

    async def cancel(self) -> None:
        """Asks the server to end the run; its terminal event (`incomplete`, `cancelled`) still comes.

        Raises ConnectionLost. Cancellation: sent whole or not at all.
        """
        await self._connection._send(self._goodbye)

    async def steer(self, input: str | Items) -> None:
        """Sends more user input to a run that is going on. The answer is an event, `response.steer.…`.

        Raises ConnectionLost. Cancellation: sent whole or not at all.
        """
        frame = {"type": "response.steer", "previous_response_id": self.id, "input": input}
        await self._connection._send(frame)

    async def aclose(self) -> None:
        """Drops what is unread. Cancels the run if it is not over, and waits for its end.

        It waits `GOODBYE_TIMEOUT` at most, also when it is cancelled.
        """
        self._abandon()
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

    def _abandon(self) -> None:
        self._inbox.close()
        self._cancel_soon()

    def _cancel_soon(self) -> None:
        """Once. A run that has no id yet is cancelled when it gets one."""
        if not self._abandoned and self.id and not self.over:
            self._connection._send_soon(self._goodbye)
        self._abandoned = True

    async def _deliver(self, event: Event) -> None:
        """The reader's part of a run: waits `STALL_TIMEOUT` at most for room in the inbox."""
        if event.response is not None and self.id and event.response.id != self.id:
            return  # of a Response that was on this lane before
        self._appended = False
        if event.type == "error":
            if self.id:
                await self._put(_server_error(event))
            else:
                self._end(_server_error(event))
            return
        if event.response is not None and not self.id:
            self.id = event.response.id
            self._begun.set()
            if self._abandoned:
                self._connection._send_soon(self._goodbye)
        if event.type in ("response.done", "response.in_progress"):
            self._paused = event.type == "response.done"
        await self._put(event)
        if event.terminal:
            self._end(None)

    async def _put(self, arrival: Event | ServerError) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # nobody reads any more
            try:
                self._arrivals.send_nowait(arrival)
            except trio.WouldBlock:
                with trio.move_on_after(STALL_TIMEOUT) as patience:
                    await self._arrivals.send(arrival)
                if patience.cancelled_caught:
                    self._failure = ConnectionLost(f"Given up: nobody read this run for {STALL_TIMEOUT:g} s.")
                    self._arrivals.close()
                    self._cancel_soon()

    def _end(self, failure: ClientError | None) -> None:
        self.over = True
        self._failure = self._failure or failure
        self._arrivals.close()
        self._begun.set()
        self._ended.set()


async def _dial(address: SplitResult) -> trio.abc.Stream:
    host = address.hostname or ""
    port = address.port or (443 if address.scheme == "wss" else 80)
    try:
        with trio.fail_after(CONNECT_TIMEOUT):
            if address.scheme == "wss":
                return await trio.open_ssl_over_tcp_stream(host, port, https_compatible=True)
            return await trio.open_tcp_stream(host, port)
    except (OSError, trio.TooSlowError) as error:
        reason = error if isinstance(error, OSError) else f"no connection within {CONNECT_TIMEOUT:g} s"
        raise ConnectionLost(f"Cannot connect to {host}:{port}: {reason}") from error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _get_models(request: Request) -> list[str]:
    opener = build_opener(ProxyHandler({}))  # as the WebSocket, which knows no proxies
    try:
        with opener.open(request, timeout=CONNECT_TIMEOUT) as answer:
            return [model.id for model in msgspec.json.decode(answer.read(), type=_Models).data]
    except HTTPError as error:
        raise _refusal(error.code, error.read(), "The server does not list its models.") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConnectionLost(f"Cannot get {request.full_url}: {reason}") from error
    except msgspec.DecodeError as error:
        raise ServerError(200, f"{request.full_url} is no list of models: {error}") from error


def _first(group: BaseExceptionGroup[Any]) -> Any:
    """The first exception in a group of groups."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _server_error(event: Event) -> ServerError:
    why = event.error or Reason()
    return ServerError(event.status or 500, why.message or "The server gave no reason.", why.code, why.param)


class _Refusal(msgspec.Struct):
    error: Reason


def _refusal(status: int, body: bytes | None, otherwise: str) -> ServerError:
    """An HTTP answer that is an error; its reason from the body, if that tells one."""
    try:
        why = msgspec.json.decode(body or b"", type=_Refusal).error
    except msgspec.DecodeError:
        why = Reason()
    return ServerError(status, why.message or otherwise, why.code, why.param)


def _close_reason(closed: Any) -> str:
    reason = closed.reason
    if reason is None or reason.code == 1006:
        return "the connection broke"
    return f"closed with {reason.code} ({reason.reason or reason.name})"
