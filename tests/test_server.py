"""The server as a whole: what no peer can do to it, how many it serves, how it stops."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from edge_fakes import (
    UPGRADE,
    FakeBackend,
    ask,
    echo,
    get,
    make_server,
    over_memory,
    over_tcp,
    read_replies,
    until_eof,
    websocket,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio_websocket import ConnectionClosed
from wsproto import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, TextMessage

from protocol.edge.server import ListenError
from protocol.edge.socket import Socket

HEALTH = get("/healthz")
_client = Connection(ConnectionType.CLIENT)
FRAMES = b"".join(
    map(_client.send, (TextMessage("one"), Ping(b"?"), TextMessage("two"), CloseConnection(1000)))
)
GOOD_WIRES = (
    HEALTH * 3,
    get("/v1/responses", "Content-Length: 5", "Expect: 100-continue", method="POST") + b"hello" + HEALTH,
    get("/v1/models", "Transfer-Encoding: chunked", "TE: trailers")
    + b"3;x=y\r\nabc\r\n0\r\nA: b\r\n\r\n"
    + HEALTH,
    get("/v1/responses", *UPGRADE, "Origin: http://localhost", "Sec-WebSocket-Protocol: a, b") + FRAMES,
    get("/v1/responses", *UPGRADE, "Sec-WebSocket-Extensions: permessage-deflate; x") + FRAMES,
)
FRAGMENTS = (
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\x00",
        b"\xff",
        b"xn--\xff",
        b": ",
        b",",
        b"HTTP/1.1",
        b"HTTP/9.9",
        b"Host: a\r\n",
    ),
    *(
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: chunked\r\n",
    ),
    *(
        b"Upgrade: websocket\r\n",
        b"Upgrade: h2c\r\n",
        b"Connection: upgrade\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"http://[",
        b"%",
        b"%ff",
        b"..",
        b"\x81\xfe\xff\xff",
        b"\x88\x80\x00\x00\x00\x00",
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good sequence of requests with a few cuts, insertions and replacements."""
    wire = bytearray(draw(st.sampled_from(GOOD_WIRES)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(wire)))
        removed = draw(st.integers(0, 12))
        wire[position : position + removed] = draw(st.sampled_from(FRAGMENTS) | st.binary(max_size=4))
    return bytes(wire)


async def survives(wire: bytes) -> None:
    """Send `wire` in two parts and hang up: the server's task ends, and nothing of it was our failure."""
    server = make_server(max_body=10_000, max_message=1000)
    with trio.fail_after(20):
        async with over_memory(server) as client, trio.open_nursery() as nursery:
            nursery.start_soon(until_eof, client)
            try:
                await client.send_all(wire[: len(wire) // 2])
                await trio.testing.wait_all_tasks_blocked()
                await client.send_all(wire[len(wire) // 2 :])
                await client.send_eof()
            except trio.BrokenResourceError:
                pass  # the server has already hung up
        async with over_memory(server) as client:
            assert (await ask(client, HEALTH))[0] == 200
    statistics = server.statistics()["server"]
    assert statistics["connections_failed_total"] == 0
    assert statistics["connections_open"] == 0
    assert statistics["sockets_open"] == 0


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
async def test_random_bytes_do_no_harm(wire: bytes) -> None:
    await survives(wire)


@given(mutated())
@example(get("/v1/responses", *UPGRADE, host="xn--\xff"))
@example(get("/healthz", host="xn--\xff"))
@example(get("/v1/responses", *UPGRADE, "Content-Length: 99999999999999999999999"))
@settings(deadline=None, max_examples=200)
async def test_mutated_requests_do_no_harm(wire: bytes) -> None:
    await survives(wire)


async def test_good_requests_survive_the_same_treatment() -> None:
    for wire in GOOD_WIRES:
        await survives(wire)


async def test_a_handler_that_fails_takes_nobody_with_it() -> None:
    async def fail(socket: Socket, **_: object) -> None:
        raise RuntimeError

    server = make_server(serve_socket=fail)
    async with over_tcp(server) as address:
        async with websocket(await trio.open_tcp_stream(*address)) as client:
            with pytest.raises(ConnectionClosed):
                await client.get_message()
            assert client.closed.code == 1011
        assert (await ask(await trio.open_tcp_stream(*address), HEALTH))[0] == 200


async def test_one_connection_too_many_is_told_so() -> None:
    async with over_tcp(make_server(max_connections=2)) as address:
        kept = [await trio.open_tcp_stream(*address) for _ in range(2)]
        for stream in kept:
            assert (await ask(stream, HEALTH))[0] == 200
        stream = await trio.open_tcp_stream(*address)
        [(status, headers, body)] = await read_replies(stream, ["GET"])
        assert status == 503
        assert b"server_is_overloaded" in body
        assert headers["connection"] == "close"
        await kept.pop().aclose()
        while (await _try(address)) == 503:  # until the server has noticed that one is gone
            await trio.lowlevel.checkpoint()


async def _try(address: tuple[str, int]) -> int:
    stream = await trio.open_tcp_stream(*address)
    try:
        await stream.send_all(HEALTH)
    except trio.BrokenResourceError:
        return 503
    try:
        return (await read_replies(stream, ["GET"]))[0][0]
    except trio.BrokenResourceError:
        return 503
    finally:
        await stream.aclose()


async def test_a_port_in_use_is_named() -> None:
    async with over_tcp(make_server()) as (_, port):
        with pytest.raises(ListenError, match=f"127.0.0.1 port {port}: .*--port"):
            await make_server(port=port).run(trio.Event())


async def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        await make_server(host="192.0.2.1", insecure=True).run(trio.Event())


async def test_a_backend_that_fails_ends_the_server() -> None:
    class Broken(FakeBackend):
        async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            raise RuntimeError("ours")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="ours"), flatten_subgroups=True):
        await make_server(Broken()).run(trio.Event())


async def echo_in_a_nursery(socket: Socket, **about: Any) -> None:
    """A handler with tasks of its own: cancelled, it raises a group."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await echo(socket, **about)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("serve_socket", [echo, echo_in_a_nursery])
async def test_it_stops_in_order(serve_socket: Any) -> None:
    backend = FakeBackend()
    backend.let_drain = trio.Event()
    server = make_server(backend, serve_socket)
    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(server.run, stop)
            address = ("127.0.0.1", int(addresses[0].rpartition(":")[2]))
            assert backend.has_run
            fresh = await trio.open_tcp_stream(*address)
            idle = await trio.open_tcp_stream(*address)
            assert (await ask(idle, HEALTH))[0] == 200
            async with websocket(await trio.open_tcp_stream(*address)) as client:
                await client.get_message()

                stop.set()
                assert await until_eof(idle) == b""
                assert await until_eof(fresh) == b""
                with pytest.raises(OSError, match=r"refused|connect"):
                    await trio.open_tcp_stream(*address)
                assert backend.is_draining
                await client.send_message("still served")
                assert await client.get_message() == "still served"

                backend.let_drain.set()
                with pytest.raises(ConnectionClosed):
                    await client.get_message()
                assert client.closed.code == 1001


async def test_what_the_last_run_says_reaches_the_client() -> None:
    send_words, receive_words = trio.open_memory_channel[str](1)

    class LastWords(FakeBackend):
        async def drain(self) -> None:
            send_words.send_nowait("the last words")

    async def pass_on(socket: Socket, **_: object) -> None:
        await socket.send("hello")
        await socket.send(await receive_words.receive())
        await trio.sleep_forever()

    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            [address] = await nursery.start(make_server(LastWords(), pass_on).run, stop)
            async with websocket(
                await trio.open_tcp_stream("127.0.0.1", int(address.rpartition(":")[2]))
            ) as client:
                assert await client.get_message() == "hello"
                stop.set()
                assert await client.get_message() == "the last words"


async def test_the_grace_period_is_the_longest_it_takes() -> None:
    backend = FakeBackend()
    backend.let_drain = trio.Event()
    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(make_server(backend, grace=0).run, stop)
            async with websocket(
                await trio.open_tcp_stream("127.0.0.1", int(addresses[0].rpartition(":")[2]))
            ) as client:
                await client.get_message()
                stop.set()
                with pytest.raises(ConnectionClosed):
                    await client.get_message()
                assert client.closed.code == 1001


async def test_a_request_in_progress_is_answered_and_not_kept_alive() -> None:
    backend = FakeBackend()
    backend.let_drain = trio.Event()
    stop = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(make_server(backend).run, stop)
            stream = await trio.open_tcp_stream("127.0.0.1", int(addresses[0].rpartition(":")[2]))
            await stream.send_all(get("/v1/models", "Content-Length: 3", "Expect: 100-continue"))
            await stream.receive_some(4096)  # 100 Continue: the head has been read
            stop.set()
            while not backend.is_draining:
                await trio.lowlevel.checkpoint()
            status, headers, _ = await ask(stream, b"abc")
            assert (status, headers["connection"]) == (200, "close")
            backend.let_drain.set()


async def test_the_sdk_lists_the_models() -> None:
    openai = pytest.importorskip("openai")
    async with over_tcp(make_server(api_keys=("sk-1",))) as (host, port):
        async with openai.AsyncOpenAI(
            base_url=f"http://{host}:{port}/v1", api_key="sk-1", max_retries=0
        ) as sdk:
            assert [model.id async for model in sdk.models.list()] == ["tiny", "org/large"]
            assert (await sdk.models.retrieve("org/large")).id == "org/large"
            with pytest.raises(openai.NotFoundError) as raised:
                await sdk.models.retrieve("huge")
            assert raised.value.code == "model_not_found"
        async with openai.AsyncOpenAI(
            base_url=f"http://{host}:{port}/v1", api_key="sk-2", max_retries=0
        ) as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.models.list()
