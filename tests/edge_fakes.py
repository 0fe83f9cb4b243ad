"""A backend without a model and small clients, for the tests of the network edge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio
import trio.testing
from trio_websocket import WebSocketConnection, wrap_client_stream

from protocol.edge.access import Caller
from protocol.edge.backend import HttpHandler
from protocol.edge.http import Exchange, Reply
from protocol.edge.metrics import Sections
from protocol.edge.server import Server
from protocol.edge.socket import Socket, SocketClosed
from protocol.settings import Settings

DEADLINE = 120.0  # s; of a connection in a test, on whatever clock
MODELS = [{"id": "tiny", "object": "model", "created": 0, "owned_by": "fermata"}, {"id": "org/large"}]


class FakeBackend:
    """Has models, runs and health by decree. Drains when `let_drain` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.let_drain = trio.Event()
        self.let_drain.set()
        self.is_draining = False
        self.has_run = False

    def models(self) -> list[dict[str, Any]]:
        return MODELS

    def health(self) -> tuple[int, dict[str, Any]]:
        return self.status, {"status": "ok" if self.status == 200 else "loading"}

    def statistics(self) -> Sections:
        return {"runs": {"active": 3, "ended_total": {"completed": 5, "failed": 1}}}

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.has_run = True
        task_status.started()
        await trio.sleep_forever()

    async def drain(self) -> None:
        self.is_draining = True
        await self.let_drain.wait()


async def echo(socket: Socket, *, caller: Caller, prototype: bool) -> None:
    """Send every message back, after one that says who is served."""
    try:
        await socket.send(f"{caller.name} {prototype}")
        while True:
            await socket.send(await socket.recv())
    except SocketClosed:
        return


async def show(exchange: Exchange, *, caller: Caller) -> Reply | None:
    """Send the body of every request back, after who sent it."""
    await trio.lowlevel.checkpoint()
    return Reply(200, f"{caller.name} ".encode() + exchange.body)


def make_server(
    backend: FakeBackend | None = None,
    serve_socket: Any = echo,
    serve_http: HttpHandler = show,
    **settings: Any,
) -> Server:
    settings.setdefault("port", 0)
    return Server(Settings(**settings), backend or FakeBackend(), serve_http, serve_socket)


@asynccontextmanager
async def over_memory(server: Server) -> AsyncIterator[trio.abc.HalfCloseableStream]:
    """The client's end of one connection to `server`, which has to end when the client is gone."""
    client, stream = trio.testing.memory_stream_pair()
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_stream, stream)
            yield client
            await trio.aclose_forcefully(client)


@asynccontextmanager
async def over_tcp(server: Server) -> AsyncIterator[tuple[str, int]]:
    """Run `server` on a free port of loopback; host and port. Stops it in the end."""
    stop = trio.Event()
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(server.run, stop)
            host, _, port = addresses[0].partition("://")[2].rpartition(":")
            try:
                yield host, int(port)
            finally:
                stop.set()


async def read_replies(
    client: trio.abc.ReceiveStream, methods: list[str]
) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies to requests with these methods: status, headers, body. Raises if one does not come."""
    replies = []
    buffer = b""
    for method in methods:
        connection = h11.Connection(h11.CLIENT)
        connection.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        connection.send(h11.EndOfMessage())
        if buffer:
            connection.receive_data(buffer)
        body = b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await client.receive_some(65536)))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
        headers = {name.decode(): value.decode() for name, value in response.headers}
        replies.append((response.status_code, headers, body))
        buffer = connection.trailing_data[0]
    return replies


async def ask(client: trio.abc.Stream, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send one request as it is and read its reply."""
    await client.send_all(request)
    return (await read_replies(client, ["HEAD" if request.startswith(b"HEAD ") else "GET"]))[0]


def get(path: str, *headers: str, method: str = "GET", host: str = "localhost") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")


UPGRADE = (
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@asynccontextmanager
async def websocket(
    stream: trio.abc.Stream, path: str = "/v1/responses", headers: list[tuple[bytes, bytes]] | None = None
) -> AsyncIterator[WebSocketConnection]:
    """A client that speaks WebSocket over `stream`; the stream is cut, not closed, in the end."""
    async with trio.open_nursery() as nursery:
        connection = await wrap_client_stream(nursery, stream, "localhost", path, extra_headers=headers)
        yield connection
        nursery.cancel_scope.cancel()


async def until_eof(client: trio.abc.ReceiveStream) -> bytes:
    data = b""
    while part := await client.receive_some(65536):
        data += bytes(part)
    return data
