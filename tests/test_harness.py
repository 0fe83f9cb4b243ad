"""The socket in memory, checked against the real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio_websocket import ConnectionClosed, wrap_client_stream

from protocol.edge.socket import BinaryFrame, Socket, SocketClosed, open_socket
from protocol.settings import Settings
from tests.harness import (
    FakeSocket,
    Peer,
)


@asynccontextmanager
async def real_socket() -> AsyncIterator[tuple[Any, Any]]:
    """A `Socket`, and what its client can do: say, hear, hang up."""
    client_end, server_end = trio.testing.memory_stream_pair()

    class Client:
        async def say(self, message: str | bytes) -> None:
            await connection.send_message(message)

        async def hear(self) -> str:
            return cast(str, await connection.get_message())

        async def hang_up(self) -> None:
            await trio.aclose_forcefully(client_end)

        async def close(self) -> None:
            await connection.aclose(1000, "bye")

        async def closed_with(self) -> int:
            try:
                await connection.get_message()
            except ConnectionClosed as closed:
                return int(closed.reason.code)
            raise AssertionError

    async with trio.open_nursery() as nursery:
        connections: list[Any] = []

        async def connect() -> None:
            connections.append(await wrap_client_stream(nursery, client_end, "localhost", "/"))

        nursery.start_soon(connect)
        request = b""
        while b"\r\n\r\n" not in request:
            request += bytes(await server_end.receive_some(4096))
        key = request.lower().split(b"sec-websocket-key: ")[1].split(b"\r\n")[0].decode()
        start = request.lower().index(key.encode())
        key = request[start : start + len(key)].decode()
        async with open_socket(server_end, key=key, early=b"", settings=Settings()) as socket:
            await trio.testing.wait_all_tasks_blocked()
            connection = connections[0]
            yield socket, Client()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def fake_socket() -> AsyncIterator[tuple[Any, Any]]:
    socket = FakeSocket(send_timeout=30)
    peer = Peer(socket)

    class Client:
        async def say(self, message: str | bytes) -> None:
            peer.say_raw(message)

        async def hear(self) -> str:
            return json.dumps(await peer.next())

        async def hang_up(self) -> None:
            peer.hang_up()

        async def close(self) -> None:
            peer.hang_up(1000)

        async def closed_with(self) -> int:
            return (await peer.until_closed())[0]

    yield cast(Socket, socket), Client()


@pytest.mark.parametrize("make", [real_socket, fake_socket])
async def test_the_socket_in_memory_does_what_the_real_one_does(
    make: Any, autojump_clock: trio.abc.Clock
) -> None:
    with trio.fail_after(600):
        async with make() as (socket, client):
            await client.say("one")
            await client.say("two")
            assert [await socket.recv(), await socket.recv()] == ["one", "two"]
            await client.say(b"x")
            with pytest.raises(BinaryFrame):
                await socket.recv()
            with trio.move_on_after(5) as waiting:
                await socket.recv()
            assert waiting.cancelled_caught
            await socket.send("{}")
            assert await client.hear() == "{}"
            await socket.ping(20)
            assert socket.close_code is None
            await socket.aclose(1001, "over")
            assert socket.close_code == 1001
            assert await client.closed_with() == 1001
            await socket.aclose(1000, "again")
            for verb in (socket.recv(), socket.send("{}"), socket.ping(20)):
                with pytest.raises(SocketClosed) as closed:
                    await verb
                assert closed.value.code == 1001
        for leave, code in (("hang_up", 1006), ("close", 1000)):
            async with make() as (socket, client):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(getattr(client, leave))
                    with pytest.raises(SocketClosed) as closed:
                        await socket.recv()
                assert closed.value.code == code
                with pytest.raises(SocketClosed):
                    await socket.send("{}")
                await socket.aclose(1000, "late")
