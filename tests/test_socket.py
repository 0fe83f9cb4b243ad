"""One WebSocket, from the upgrade to the last byte: what peers and the library under it do wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from edge_fakes import UPGRADE, ask, echo, get, make_server, over_memory, over_tcp, until_eof, websocket
from hypothesis import given, settings
from hypothesis import strategies as st
from trio_websocket import ConnectionClosed, ConnectionRejected
from wsproto import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.frame_protocol import FrameProtocol, Opcode

from protocol.edge.socket import BinaryFrame, Socket, SocketClosed

GREETING = "local False"
Clock = trio.testing.MockClock


def frames(*events: Event) -> bytes:
    """Masked frames as a client sends them."""
    client = Connection(ConnectionType.CLIENT)
    return b"".join(client.send(event) for event in events)


def raw_frame(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    """A frame that a proper client would not make; masked with zeros."""
    assert len(payload) < 126
    return bytes([0x80 * final | opcode, 0x80 | len(payload)]) + bytes(4) + payload


class RawClient:
    """A client that is told byte by byte what to do, over `stream`, after a proper upgrade."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._frames = Connection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    async def upgrade(self, early: bytes = b"") -> None:
        await self.stream.send_all(get("/v1/responses", *UPGRADE) + early)
        data = b""
        while b"\r\n\r\n" not in data:
            data += bytes(await self.stream.receive_some(1))
        assert data.startswith(b"HTTP/1.1 101 ")
        assert await self.event() == TextMessage(GREETING)

    async def event(self) -> Event | None:
        """The next event from the server, None at the end of the stream."""
        while not self._events:
            if not (data := bytes(await self.stream.receive_some(65536))):
                return None
            self._frames.receive_data(data)
            self._events += self._frames.events()
        return self._events.pop(0)


async def test_what_is_sent_comes_back(autojump_clock: Clock) -> None:
    async with over_memory(make_server()) as stream, websocket(stream) as client:
        assert await client.get_message() == GREETING
        for text in ("", "one", "dreißig €", "x" * 100_000):
            await client.send_message(text)
            assert await client.get_message() == text
        await client.aclose(1000)
    assert client.closed.code == 1000


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/v1/responses?model=x"])
async def test_the_upgrade_works_after_another_request_on_the_connection(
    path: str, autojump_clock: Clock
) -> None:
    async with over_memory(make_server()) as stream:
        assert (await ask(stream, get("/healthz")))[0] == 200
        async with websocket(stream, path) as client:
            assert await client.get_message() == GREETING


@pytest.mark.parametrize(
    ("beta", "prototype"),
    [
        ("responses_websockets=2026-02-04", True),
        ("other=1, responses_websockets=2026-02-04", True),
        ("responses_websockets=2026-02-06", False),
    ],
)
async def test_clients_of_the_prototype_are_told_apart(
    beta: str, prototype: bool, autojump_clock: Clock
) -> None:
    async with (
        over_memory(make_server()) as stream,
        websocket(stream, headers=[(b"OpenAI-Beta", beta.encode())]) as client,
    ):
        assert await client.get_message() == f"local {prototype}"


async def test_the_key_says_who_is_served(autojump_clock: Clock) -> None:
    server = make_server(api_keys=("one", "two"))
    names = set()
    for key in (b"one", b"two", b"one"):
        async with (
            over_memory(server) as stream,
            websocket(stream, headers=[(b"Authorization", b"Bearer " + key)]) as client,
        ):
            names.add(await client.get_message())
    assert len(names) == 2
    assert not any("one" in name or "two" in name for name in names)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/responses", [(b"Authorization", b"Bearer wrong")], 401),
        ("/v1/responses", [(b"Authorization", b"Bearer right"), (b"Origin", b"https://evil.example")], 403),
        ("/v1/nowhere", [(b"Authorization", b"Bearer right")], 404),
    ],
)
async def test_a_refused_upgrade_is_an_http_error(
    path: str, headers: list[tuple[bytes, bytes]], status: int, autojump_clock: Clock
) -> None:
    async with over_memory(make_server(api_keys=("right",))) as stream:
        with pytest.RaisesGroup(
            pytest.RaisesExc(ConnectionRejected, check=lambda e: e.status_code == status)
        ):
            async with websocket(stream, path, headers):
                pass


@pytest.mark.parametrize(
    "headers",
    [
        UPGRADE[:2],
        UPGRADE[:3],
        (*UPGRADE[:2], UPGRADE[3]),
        (*UPGRADE[:3], "Sec-WebSocket-Key: c2hvcnQ="),
        (*UPGRADE[:3], "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=*"),
        (*UPGRADE[:3], "Sec-WebSocket-Key: \xe4\xf6\xfc"),
        (*UPGRADE[:2], "Sec-WebSocket-Version: 8", UPGRADE[3]),
    ],
)
async def test_a_bad_upgrade_is_answered_and_closed(headers: tuple[str, ...], autojump_clock: Clock) -> None:
    async with over_memory(make_server()) as stream:
        await stream.send_all(get("/v1/responses", *headers))
        reply = await until_eof(stream)
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"bad_upgrade"' in reply


@pytest.mark.parametrize("host", ["xn--\xff", "xn--a", "a" * 300, "localhost:99999999", "", "@", "[::1"])
async def test_no_host_harms_an_upgrade(host: str, autojump_clock: Clock) -> None:
    server = make_server(host="0.0.0.0", insecure=True)
    async with over_memory(server) as stream:
        await stream.send_all(get("/v1/responses", *UPGRADE, host=host))
        assert bytes(await stream.receive_some(13)) in (b"HTTP/1.1 101 ", b"HTTP/1.1 400 ")
    async with over_memory(server) as stream:
        assert (await ask(stream, get("/healthz")))[0] == 200


async def test_an_upgrade_has_no_body(autojump_clock: Clock) -> None:
    async with over_memory(make_server()) as stream:
        assert (await ask(stream, get("/v1/responses", *UPGRADE, "Content-Length: 1") + b"x"))[0] == 413


async def test_frames_that_come_with_the_upgrade_are_not_lost(autojump_clock: Clock) -> None:
    for _ in range(30):  # in whatever order the tasks happen to run
        async with over_memory(make_server()) as stream:
            client = RawClient(stream)
            await client.upgrade(early=frames(TextMessage("first"), TextMessage("second")))
            assert await client.event() == TextMessage("first")
            assert await client.event() == TextMessage("second")


@given(
    texts=st.lists(st.text(max_size=40), max_size=5),
    cuts=st.lists(st.integers(1, 60), max_size=20),
)
@settings(deadline=None, max_examples=30)
async def test_any_cut_of_the_stream_gives_the_same_messages(texts: list[str], cuts: list[int]) -> None:
    wire = get("/v1/responses", *UPGRADE) + frames(*map(TextMessage, texts))
    async with over_memory(make_server()) as stream:
        with trio.fail_after(5):
            position = 0
            for cut in [*cuts, len(wire)]:
                await stream.send_all(wire[position : position + cut])
                await trio.testing.wait_all_tasks_blocked()
                position += cut
            while not (await stream.receive_some(1) == b"\r" and await stream.receive_some(3) == b"\n\r\n"):
                pass
            client = RawClient(stream)
            assert [await client.event() for _ in range(1 + len(texts))] == [
                *map(TextMessage, [GREETING, *texts])
            ]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (raw_frame(Opcode.TEXT, b"\xff\xfe"), 1007),
        (raw_frame(Opcode.TEXT, b"\xc3") + raw_frame(Opcode.TEXT, b""), 1007),
        (raw_frame(0x3, b"?"), 1002),
        (raw_frame(Opcode.CONTINUATION, b"of nothing"), 1002),
        (raw_frame(Opcode.PING, b"x", final=False), 1002),
        (bytes([0x81, 0x02]) + b"no", 1002),  # not masked
        (bytes([0xC1, 0x82]) + bytes(4) + b"no", 1002),  # compressed, which was not agreed on
        (raw_frame(Opcode.CLOSE, b"\x00\x01"), 1002),
        (frames(TextMessage("x" * 1001)), 1009),
        (frames(TextMessage("x" * 600, message_finished=False), TextMessage("x" * 600)), 1009),
    ],
)
async def test_a_broken_frame_is_answered_with_its_code(
    sent: bytes, code: int, autojump_clock: Clock
) -> None:
    async with over_memory(make_server(max_message=1000)) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await stream.send_all(sent)
        event = await client.event()
        assert isinstance(event, CloseConnection)
        assert event.code == code
        assert await client.event() is None


async def test_a_message_over_the_limit_is_told_so_while_it_is_still_being_sent() -> None:
    async with over_tcp(make_server(max_message=100_000)) as address:
        stream = await trio.open_tcp_stream(*address)
        client = RawClient(stream)
        await client.upgrade()
        with trio.fail_after(10):
            await stream.send_all(frames(TextMessage("x" * 2_000_000)))
            event = await client.event()
        assert isinstance(event, CloseConnection)
        assert event.code == 1009
        await stream.aclose()


async def test_the_largest_message_of_the_public_service_is_taken() -> None:
    async with over_tcp(make_server()) as address:
        stream = await trio.open_tcp_stream(*address)
        client = RawClient(stream)
        await client.upgrade()
        length = 0
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.send_all, frames(TextMessage("x" * 16 * 1024 * 1024)))
                while length < 16 * 1024 * 1024:
                    event = await client.event()
                    assert isinstance(event, TextMessage)
                    length += len(event.data)
        await stream.aclose()


async def test_frames_that_never_make_a_message_are_not_collected(autojump_clock: Clock) -> None:
    async with over_memory(make_server(max_message=1000)) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await stream.send_all(raw_frame(Opcode.TEXT, b"", final=False))
        flood = raw_frame(Opcode.CONTINUATION, b"", final=False) * 20_000
        await stream.send_all(flood)
        assert await client.event() is None


async def test_many_messages_are_no_flood(autojump_clock: Clock) -> None:
    async with over_memory(make_server(max_message=1000)) as stream:
        client = RawClient(stream)
        await client.upgrade()
        for _ in range(100):
            await stream.send_all(frames(TextMessage("x" * 1000)))
            assert await client.event() == TextMessage("x" * 1000)


def greeting_then(handle: Callable[[Socket], Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    async def serve(socket: Socket, **_: object) -> None:
        await socket.send(GREETING)
        await handle(socket)

    return serve


async def test_a_binary_message_is_the_callers_to_refuse(autojump_clock: Clock) -> None:
    async def refuse(socket: Socket) -> None:
        with pytest.raises(BinaryFrame):
            await socket.recv()
        await socket.send("no")
        await socket.aclose(1003, "text only")

    async with over_memory(make_server(serve_socket=greeting_then(refuse))) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await stream.send_all(frames(BytesMessage(b"\x00")))
        assert await client.event() == TextMessage("no")
        assert await client.event() == CloseConnection(1003, "text only")


async def test_pings_are_answered_while_the_handler_is_busy(autojump_clock: Clock) -> None:
    async def busy(socket: Socket) -> None:
        await trio.sleep(60)

    async with over_memory(make_server(serve_socket=greeting_then(busy))) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await stream.send_all(frames(Ping(b"alive?")))
        event = await client.event()
        assert isinstance(event, Pong)
        assert bytes(event.payload) == b"alive?"


async def heartbeat(socket: Socket) -> None:
    while True:
        await trio.sleep(20)
        await socket.ping(20)


async def test_a_half_open_peer_is_dropped_at_the_first_missed_pong(autojump_clock: Clock) -> None:
    outcome: list[SocketClosed] = []

    async def watch(socket: Socket) -> None:
        with pytest.raises(SocketClosed) as raised:
            await heartbeat(socket)
        outcome.append(raised.value)

    async with over_memory(make_server(serve_socket=greeting_then(watch))) as stream:
        client = RawClient(stream)
        await client.upgrade()
        assert isinstance(await client.event(), Ping)
        assert await client.event() is None
        assert trio.current_time() == pytest.approx(40)
    assert outcome[0].code == 1006


async def test_a_peer_that_answers_pings_is_kept(autojump_clock: Clock) -> None:
    server = make_server(serve_socket=greeting_then(heartbeat))
    async with over_memory(server) as stream, websocket(stream) as client:
        assert await client.get_message() == GREETING
        with trio.move_on_after(70):
            await client.get_message()
        assert client.closed is None
    # The handler ended with SocketClosed, at the ping after the client had left.
    assert server.statistics()["server"]["connections_failed_total"] == 0


async def test_a_cancelled_handler_leaves_a_socket_that_can_still_be_closed(autojump_clock: Clock) -> None:
    client, stream = trio.testing.memory_stream_pair()
    raw = RawClient(client)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_server(serve_socket=greeting_then(heartbeat)).serve_stream, stream)
        await raw.upgrade()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            assert isinstance(await raw.event(), CloseConnection)
            await client.send_all(frames(CloseConnection(1001)))
            assert await raw.event() is None
    assert trio.current_time() < 1


class Stalling(trio.abc.HalfCloseableStream):
    """A stream whose other end stops reading after `taken` bytes."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, taken: int) -> None:
        self._stream = stream
        self._taken = taken
        self._closed = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        part = bytes(data)[: self._taken]
        self._taken -= len(part)
        await self._stream.send_all(part)
        if len(part) < len(data):
            await self._closed.wait()
            raise trio.ClosedResourceError

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        self._closed.set()
        await self._stream.aclose()


@pytest.mark.parametrize(("how", "seconds"), [("deadline", 30), ("cancelled", 7), ("ping", 3)])
async def test_an_unfinished_send_ends_the_connection(
    how: str, seconds: float, autojump_clock: Clock
) -> None:
    """After half a frame nothing else may leave: not another message, not even a close frame."""

    async def half_a_frame(socket: Socket) -> None:
        if how == "cancelled":
            with trio.move_on_after(7):
                await socket.send("A" * 5000)
        elif how == "ping":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_in_vain, socket)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(SocketClosed):
                    await socket.ping(3)
        else:
            await send_in_vain(socket)
        with pytest.raises(SocketClosed):
            await socket.send("second")
        with pytest.raises(SocketClosed):
            await socket.recv()

    async def send_in_vain(socket: Socket) -> None:
        with pytest.raises(SocketClosed):
            await socket.send("A" * 5000)

    client, stream = trio.testing.memory_stream_pair()
    server = make_server(serve_socket=greeting_then(half_a_frame))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_stream, Stalling(stream, 1000))
        await client.send_all(get("/v1/responses", *UPGRADE))
        data = await until_eof(client)
    assert len(data) == 1000
    assert data.endswith(b"A")
    assert trio.current_time() == pytest.approx(seconds)
    assert server.statistics()["server"]["connections_failed_total"] == 0


@pytest.mark.parametrize("sends_ping", [False, True])
async def test_a_peer_that_ignores_the_close_is_left_after_five_seconds(
    sends_ping: bool, autojump_clock: Clock
) -> None:
    async def say_goodbye(socket: Socket) -> None:
        await socket.aclose(1000, "goodbye")

    server = make_server(serve_socket=greeting_then(say_goodbye))
    async with over_memory(server) as stream:
        client = RawClient(stream)
        await client.upgrade()
        assert await client.event() == CloseConnection(1000, "goodbye")
        if sends_ping:
            await stream.send_all(frames(Ping()))
        assert await client.event() is None
        assert trio.current_time() == pytest.approx(5)
    assert server.statistics()["server"]["connections_failed_total"] == 0


async def test_the_end_of_the_handler_closes_the_socket(autojump_clock: Clock) -> None:
    async def leave(socket: Socket) -> None: ...

    async with (
        over_memory(make_server(serve_socket=greeting_then(leave))) as stream,
        websocket(stream) as client,
    ):
        await client.get_message()
        with pytest.raises(ConnectionClosed):
            await client.get_message()
        assert client.closed.code == 1000


async def test_a_bug_in_the_handler_is_1011_and_ends_one_connection(autojump_clock: Clock) -> None:
    async def fail(socket: Socket) -> None:
        raise KeyError("secret detail")

    server = make_server(serve_socket=greeting_then(fail))
    async with over_memory(server) as stream:
        client = RawClient(stream)
        await client.upgrade()
        assert await client.event() == CloseConnection(1011, "internal error")
        await stream.send_all(frames(CloseConnection(1011)))
        assert await client.event() is None
    assert server.statistics()["server"]["connections_failed_total"] == 1


async def test_a_peer_that_vanishes_ends_its_handler(autojump_clock: Clock) -> None:
    outcome: list[int] = []

    async def wait(socket: Socket) -> None:
        with pytest.raises(SocketClosed) as raised:
            await socket.recv()
        outcome.append(raised.value.code)

    async with over_memory(make_server(serve_socket=greeting_then(wait))) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await trio.aclose_forcefully(stream)
    assert outcome == [1006]


async def test_a_peer_that_closes_is_answered_with_its_code(autojump_clock: Clock) -> None:
    async with over_memory(make_server(serve_socket=echo)) as stream:
        client = RawClient(stream)
        await client.upgrade()
        await stream.send_all(frames(CloseConnection(4321, "bye")))
        event = await client.event()
        assert isinstance(event, CloseConnection)
        assert event.code == 4321
        assert await client.event() is None


def test_the_raw_frames_are_frames() -> None:
    protocol = FrameProtocol(client=False, extensions=[])
    protocol.receive_bytes(raw_frame(Opcode.TEXT, b"text"))
    assert next(protocol.received_frames()).payload == "text"
