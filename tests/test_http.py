"""HTTP on one stream and over the whole edge: framing, limits, deadlines, routes, access, metrics."""

from __future__ import annotations

import json

import pytest
import trio
from edge_fakes import FakeBackend, ask, get, make_server, over_memory, read_replies, until_eof
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.edge.http import HEAD_LIMIT, HttpConnection, Request, _path_of
from protocol.edge.metrics import Exposition, Histogram
from protocol.edge.server import Server

KEY = "sk-fermata-test"
HEALTH = get("/healthz")


@pytest.fixture
def server() -> Server:
    return make_server(max_body=1000)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (get("/healthz"), 200, None),
        (get("/v1/healthz?verbose=1"), 200, None),
        (get("http://localhost/v1/models"), 200, None),
        (get("/metrics"), 200, None),
        (get("/v1/models/tiny"), 200, None),
        (get("/v1/models/org%2Flarge"), 200, None),
        (get("/v1/models/huge"), 404, "model_not_found"),
        (get("/v1/model"), 404, "not_found"),
        (get("/"), 404, "not_found"),
        (get("*", method="OPTIONS"), 404, "not_found"),
        (get("/v1/models", method="DELETE"), 405, "method_not_allowed"),
        (get("/v1/responses", "Content-Length: 2", method="POST") + b"{}", 200, None),
        (get("/responses/a/b"), 200, None),
        (get("/v1/chat/completions", method="POST"), 404, "not_found"),
        (get("/healthz", host="evil.example"), 403, "host_not_allowed"),
        (get("/healthz", host="["), 403, "host_not_allowed"),
        (get("/healthz", host="127.0.0.1:8765"), 200, None),
        (get("/healthz", host="[::1]:8765"), 200, None),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200, None),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400, "bad_http"),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "bad_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "bad_http"),
        (get("/healthz", "Transfer-Encoding: gzip"), 501, "bad_http"),
        (get("/healthz", "X: " + "a" * 2 * HEAD_LIMIT), 431, "bad_http"),
        (get("/healthz", "Content-Length: 1001"), 413, "payload_too_large"),
        (get("/healthz", "Transfer-Encoding: chunked") + b"3E9\r\n" + b"a" * 1001, 413, "payload_too_large"),
        (get("/healthz", "Transfer-Encoding: chunked") + b"xyz\r\n", 400, "bad_http"),
    ],
)
async def test_a_request_gets_its_status(
    server: Server,
    request_bytes: bytes,
    status: int,
    code: str | None,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with over_memory(server) as client:
        got, headers, body = await ask(client, request_bytes)
        assert got == status
        assert headers["date"].endswith(" GMT")
        if code is not None:
            assert headers["content-type"] == "application/json"
            error = json.loads(body)["error"]
            assert error["code"] == code
            assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("request_bytes", "header", "value"),
    [
        (get("/v1/models", method="DELETE"), "allow", "GET, HEAD"),
        (get("/metrics"), "content-type", "text/plain; version=1.0.0; charset=utf-8"),
        (get("/healthz", "Connection: close"), "connection", "close"),
        (b"GET /healthz HTTP/1.0\r\n\r\n", "connection", "close"),
        (get("/healthz", host="evil.example"), "connection", "close"),
    ],
)
async def test_a_reply_has_its_header(
    server: Server, request_bytes: bytes, header: str, value: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        assert (await ask(client, request_bytes))[1][header] == value


async def test_pipelined_requests_are_answered_in_order_on_one_connection(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    chunked = b"5\r\nhello\r\n0\r\n\r\n"
    async with over_memory(server) as client:
        await client.send_all(
            HEALTH
            + get("/v1/models", method="HEAD")
            + get("/nowhere", "Transfer-Encoding: chunked", method="POST")
            + chunked
            + get("/v1/models/tiny")
        )
        replies = await read_replies(client, ["GET", "HEAD", "POST", "GET"])
        assert [status for status, _, _ in replies] == [200, 200, 404, 200]
        assert replies[1][2] == b""
        assert int(replies[1][1]["content-length"]) > 0
        assert json.loads(replies[3][2])["id"] == "tiny"
        assert (await ask(client, HEALTH))[0] == 200


@given(cuts=st.lists(st.integers(1, 200), max_size=30))
@settings(deadline=None, max_examples=30)
async def test_any_cut_of_the_stream_gives_the_same_replies(cuts: list[int]) -> None:
    wire = HEALTH + get("/v1/models", "Content-Length: 3") + b"abc" + get("/v1/models/tiny", method="HEAD")
    async with over_memory(make_server()) as client:
        position = 0
        with trio.fail_after(5):
            for cut in [*cuts, len(wire)]:
                await client.send_all(wire[position : position + cut])
                await trio.testing.wait_all_tasks_blocked()
                position += cut
            replies = await read_replies(client, ["GET", "GET", "HEAD"])
    assert [(status, len(body) > 0) for status, _, body in replies] == [
        (200, True),
        (200, True),
        (200, False),
    ]


async def test_a_client_that_waits_for_100_continue_gets_it_once(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        await client.send_all(
            get("/v1/responses", "Content-Length: 4", "Expect: 100-continue", method="POST")
        )
        await trio.testing.wait_all_tasks_blocked()
        assert bytes(await client.receive_some(4096)).startswith(b"HTTP/1.1 100 ")
        assert (await ask(client, b"{}{}"))[2] == b"local {}{}"
        assert (await ask(client, HEALTH))[0] == 200


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        head = get("/v1/responses", "Content-Length: 1001", "Expect: 100-continue", method="POST")
        assert (await ask(client, head))[0] == 413


async def test_the_peer_can_read_a_refusal_while_it_still_sends(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        await client.send_all(get("/v1/responses", "Content-Length: 100000", method="POST"))
        for _ in range(100):
            await client.send_all(b"x" * 1000)
        reply = await until_eof(client)
        assert reply.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("sent", "seconds", "reply"),
    [
        (b"", 10, b""),
        (b"GET /healthz HTT", 10, b"HTTP/1.1 408 "),
        (get("/healthz", "Content-Length: 5") + b"abc", 60, b"HTTP/1.1 408 "),
        (HEALTH, 75, b"HTTP/1.1 200 "),
        (HEALTH + b"GET /healthz HTT", 10, b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "half a head", "half a body", "idle after a request", "half a second head"],
)
async def test_a_silent_peer_is_let_go(
    server: Server, sent: bytes, seconds: float, reply: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client:
        await client.send_all(sent)
        started = trio.current_time()
        received = await until_eof(client)
        assert reply in received
        assert bool(reply) == bool(received)
        assert trio.current_time() - started == pytest.approx(seconds)


async def test_a_peer_that_drips_its_head_gets_ten_seconds_in_all(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(server) as client, trio.open_nursery() as nursery:
        nursery.start_soon(_drip, client)
        assert (await until_eof(client)).startswith(b"HTTP/1.1 408 ")
        assert trio.current_time() == pytest.approx(10, abs=3)
        nursery.cancel_scope.cancel()


async def _drip(client: trio.abc.SendStream) -> None:
    for byte in get("/healthz", "X: " + "a" * 500):
        await client.send_all(bytes([byte]))
        await trio.sleep(1)


async def test_a_reader_that_stalls_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    class Stalled(trio.abc.HalfCloseableStream):
        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            await trio.lowlevel.checkpoint()
            return HEALTH

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await trio.sleep_forever()

        async def wait_send_all_might_not_block(self) -> None:
            await trio.sleep_forever()

        async def send_eof(self) -> None: ...

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    await make_server(send_timeout=30).serve_stream(Stalled())
    assert trio.current_time() == pytest.approx(30)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/healthz", [], 200),
        ("/v1/models", [], 401),
        ("/metrics", [], 401),
        ("/v1/nowhere", [], 401),
        ("/v1/models", [f"Authorization: Bearer {KEY}"], 200),
        ("/v1/models", [f"authorization:bearer   {KEY}"], 200),
        ("/v1/models", ["Authorization: Bearer sk-second"], 200),
        ("/v1/models", [f"Authorization: Bearer {KEY}x"], 401),
        ("/v1/models", [f"Authorization: Basic {KEY}"], 401),
        ("/v1/models", [f"Authorization: {KEY}"], 401),
        ("/v1/models", ["Authorization: Bearer \xff\xfe"], 401),
        ("/v1/models", ["Authorization: Bearer "], 401),
    ],
)
async def test_a_key_is_asked_for(
    path: str, headers: list[str], status: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(make_server(api_keys=(KEY, "sk-second"))) as client:
        got, reply_headers, body = await ask(client, get(path, *headers))
        assert got == status
        if status == 401:
            assert reply_headers["www-authenticate"] == "Bearer"
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert KEY.encode() not in body


async def test_a_body_is_not_read_for_somebody_without_a_key(autojump_clock: trio.testing.MockClock) -> None:
    async with over_memory(make_server(api_keys=(KEY,))) as client:
        head = get("/v1/responses", "Content-Length: 10", "Expect: 100-continue", method="POST")
        assert (await ask(client, head))[0] == 401


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8765", 200),
        ("http://LOCALHOST:8765", 200),
        ("https://good.example", 200),
        ("http://localhost:9999", 403),
        ("https://good.example.evil", 403),
        ("null", 403),
        ("ftp://localhost:8765", 403),
        ("", 403),
    ],
)
async def test_a_page_of_another_origin_may_not_post(
    origin: str, status: int, autojump_clock: trio.testing.MockClock
) -> None:
    async with over_memory(make_server(allow_origins=("https://good.example/",))) as client:
        post = get("/v1/responses", f"Origin: {origin}", method="POST", host="localhost:8765")
        assert (await ask(client, post))[0] == status


async def test_an_allowed_origin_may_also_be_the_name_of_the_server(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with over_memory(make_server(allow_origins=("https://good.example:444",))) as client:
        assert (await ask(client, get("/healthz", host="good.example")))[0] == 200


async def test_every_name_is_good_on_a_public_address(autojump_clock: trio.testing.MockClock) -> None:
    async with over_memory(make_server(host="0.0.0.0", api_keys=(KEY,))) as client:
        assert (await ask(client, get("/healthz", host="any.example")))[0] == 200


async def test_health_is_what_the_backend_says(autojump_clock: trio.testing.MockClock) -> None:
    backend = FakeBackend()
    backend.status = 503
    async with over_memory(make_server(backend)) as client:
        status, _, body = await ask(client, HEALTH)
        assert (status, json.loads(body)) == (503, {"status": "loading"})


async def test_a_bug_behind_a_route_is_a_500_and_nothing_more(autojump_clock: trio.testing.MockClock) -> None:
    class Broken(FakeBackend):
        def health(self) -> tuple[int, dict[str, object]]:
            raise KeyError("secret detail")

    async with over_memory(make_server(Broken())) as client:
        status, _, body = await ask(client, HEALTH)
        assert status == 500
        assert b"secret" not in body
        assert (await ask(client, get("/v1/models")))[0] == 200


async def test_metrics_show_the_statistics_of_every_part(autojump_clock: trio.testing.MockClock) -> None:
    async with over_memory(make_server()) as client:
        await ask(client, HEALTH)
        text = (await ask(client, get("/metrics")))[2].decode()
    lines = text.splitlines()
    assert "# TYPE fermata_runs_active gauge" in lines
    assert "fermata_runs_active 3.0" in lines
    assert "# TYPE fermata_runs_ended_total counter" in lines
    assert 'fermata_runs_ended_total{kind="completed"} 5.0' in lines
    assert "fermata_server_connections_open 1.0" in lines
    assert 'fermata_server_replies_total{kind="200"} 1.0' in lines
    assert "# TYPE fermata_loop_lateness_seconds histogram" in lines


def test_a_histogram_counts_a_bound_inside_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    text = Exposition(lambda: {"x": {"seconds": histogram}}).text().decode().splitlines()
    assert 'fermata_x_seconds_bucket{le="1.0"} 2.0' in text
    assert 'fermata_x_seconds_bucket{le="2.0"} 4.0' in text
    assert 'fermata_x_seconds_bucket{le="+Inf"} 5.0' in text
    assert "fermata_x_seconds_count 5.0" in text
    assert "fermata_x_seconds_sum 8.0" in text


def test_tokens_come_from_every_line_of_a_header() -> None:
    request = Request("GET", "/", ((b"connection", b"Keep-Alive, , upgrade"), (b"connection", b"x")))
    assert request.tokens("connection") == {"keep-alive", "", "upgrade", "x"}
    assert request.tokens("upgrade") == frozenset()


@given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E)))
def test_every_target_has_a_path(target: str) -> None:
    assert "?" not in _path_of("/" + target)
    _path_of(target)


async def test_a_connection_can_be_made_to_read_a_head_alone(autojump_clock: trio.testing.MockClock) -> None:
    client, stream = trio.testing.memory_stream_pair()
    await client.send_all(get("/a?b", "X-Y: z", method="PUT"))
    request = await HttpConnection(stream).read_head(idle_timeout=1)
    assert request is not None
    assert (request.method, request.path, request.query, request.header("x-y")) == ("PUT", "/a", "b", "z")
