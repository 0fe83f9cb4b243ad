"""A client for Responses over one WebSocket: it opens connections and runs on their lanes.

It knows frames and lanes. What a run is, client_run.py knows; what tools do and how a run looks, others.
Strategy: the reader decodes each frame once and delivers it to the run whose lane it names. The writer alone
touches the sending side of the socket, because a send that is cancelled half way leaves half a frame behind.
Both are shielded and are ended by the connection, so that a caller who is cancelled can still say goodbye.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
import trio
from trio_websocket import ConnectionClosed, ConnectionRejected, WebSocketConnection, wrap_client_stream
from wsproto.utilities import ProtocolError

from protocol.client.errors import (
    ClientError,
    ConnectionLost,
    ServerError,
    close_reason,
    refusal,
    server_error,
)
from protocol.client.run import Frame, Run
from protocol.client.views import decode_event

MAX_MESSAGE_SIZE = 64 * 2**20  # characters; a terminal event carries every item of its run
RECEIVE_BUFFER = 64 * 2**10  # bytes; the library's 4 KiB cost 2.5 times as much for a large frame
LANES = 32  # named lanes that a server grants to one connection
OUTBOX = 64  # frames that wait to be sent
CONNECT_TIMEOUT = 10.0  # s, for name and TCP connection, and again for TLS and the handshake
SEND_TIMEOUT = 30.0  # s, for one frame; a peer that takes no byte for so long is gone
SILENCE_TIMEOUT = 60.0  # s; a server that works on a leg sends something every 15 s
CLOSE_TIMEOUT = 2.0  # s, to send what is queued and for the closing handshake


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
    URL). Exceptions of the body come out as they are. Cancellation takes `CLOSE_TIMEOUT` at most.
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
            await self.send({"type": "response.create", "stream_id": run.lane, **fields})
        except BaseException:  # nothing was sent
            self._free(run)
            raise
        try:
            with trio.fail_after(self.silence_timeout):
                await run.begun.wait()
        except trio.TooSlowError:
            run.abandon()
            raise ConnectionLost(f"No answer to a create within {self.silence_timeout:g} s.") from None
        except trio.Cancelled:
            await run.aclose()
            raise
        if run.failure is not None:
            raise run.failure
        return run

    async def held(self, **fields: Any) -> Run:
        """`create` with the held lifecycle: the run pauses at tool calls and goes on after appends."""
        return await self.create(lifecycle="held", **fields)

    async def send(self, frame: Frame) -> None:
        """Queues a frame. Raises ConnectionLost. Cancellation: queued or not, never in part."""
        try:
            await self._outbox_in.send(msgspec.json.encode(frame).decode())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._loss or ConnectionLost("The connection is closed.") from None

    def send_soon(self, frame: Frame) -> None:
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
            self._lose(refusal(rejected.status_code, rejected.body, otherwise))
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
                    await run.deliver(event)
                    if run.over:
                        self._free(run)
                elif event.type == "error" and event.stream_id is None:
                    self._refused(server_error(event))
        except ConnectionClosed as closed:
            self._lose(self._last_refusal or ConnectionLost(f"The server is gone: {close_reason(closed)}."))
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
            run.end(error)
            self._free(run)

    def _lose(self, error: ClientError) -> None:
        """The first loss counts: every run fails with it, and so does whatever is sent later."""
        if self._loss is not None:
            return
        self._loss = error
        self._outbox.close()
        for run in list(self._runs.values()):
            run.end(error)
            self._free(run)

    def _free(self, run: Run) -> None:
        if self._runs.pop(run.lane, None) is not None:
            self._idle_lanes.append(run.lane)
            self._lanes.release()

    async def _close(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True):
            self._outbox_in.close()
            await self._writer_done.wait()
        self._background.cancel()


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
        raise refusal(error.code, error.read(), "The server does not list its models.") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise ConnectionLost(f"Cannot get {request.full_url}: {reason}") from error
    except msgspec.DecodeError as error:
        raise ServerError(200, f"{request.full_url} is no list of models: {error}") from error


def _first(group: BaseExceptionGroup[Any]) -> Any:
    """The first exception in a group of groups."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
