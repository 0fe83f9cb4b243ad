"""Responses over HTTP: whole and streamed, refused and cut short, by clients that are good, slow or gone."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import h11
import pytest
import trio
import trio.testing
from edge_fakes import get, read_replies
from harness import TOOLS, Bench, Json, assembled, call, said, serving, thought, turns, user
from hypothesis import given
from hypothesis import strategies as st
from strict_sdk import check_event

from protocol.edge.http import PIPELINED_LIMIT, READ_SIZE
from protocol.edge.rest import Rest
from protocol.edge.server import Server
from protocol.log import EventLog
from protocol.settings import Settings
from protocol.websocket import serve_connection

Clock = trio.testing.MockClock
Answer = tuple[int, dict[str, str], bytes]

LONG = "word " * 400
IMAGE = {"type": "input_image", "image_url": "data:"}
SCRIPTS = {
    "hello": [[said("hello there")]],
    "look": [[thought("hm"), said("let me look"), call("read_file", path="a")]],
    "long": [[said(LONG)]],
}


def edge_of(bench: Bench, **settings: Any) -> Server:
    """The network edge of a bench's service."""
    serve_socket = partial(serve_connection, service=bench.service)
    bench.service.settings = Settings(**settings) if settings else bench.service.settings
    return Server(bench.service.settings, bench.service, Rest(bench.service), serve_socket)


class Narrow(trio.abc.HalfCloseableStream):
    """The server's end of a stream whose client takes so many more sends and then none, until told to."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, room: float) -> None:
        self._stream = stream
        self.room = room
        self.taken = 0  # bytes that the server read
        self.widened = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.room <= 0:
            await self.widened.wait()
        self.room -= 1
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._stream.receive_some(max_bytes))
        self.taken += len(data)
        return data

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def connected(edge: Server, *, room: float = math.inf) -> AsyncIterator[Any]:
    """The client's end of a connection that the edge serves; it goes without a word in the end. Its `other`
    is the server's end, which takes `room` sends.
    """
    ours, theirs = trio.testing.memory_stream_pair()
    client: Any = ours
    client.other = Narrow(theirs, room)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(edge.serve_stream, client.other)
        yield client
        await trio.aclose_forcefully(ours)


def post(path: str = "/v1/responses", *headers: str, body: bytes | None = None, **fields: Any) -> bytes:
    """A POST whose body is these fields as JSON, or `body`."""
    data = json.dumps(fields).encode() if body is None else body
    return get(path, f"Content-Length: {len(data)}", *headers, method="POST") + data


async def ask(stream: trio.abc.Stream, request: bytes) -> Answer:
    """Send a request and read its reply."""
    await stream.send_all(request)
    return (await read_replies(stream, [request.split(b" ", 1)[0].decode()]))[0]


def events_of(answer: Answer) -> list[Json]:
    """The server-sent events of an answer, checked: each is a type and its data."""
    status, headers, body = answer
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["transfer-encoding"] == "chunked"
    events = []
    for event in body.decode().split("\n\n")[:-1]:
        kind, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert body.endswith(b"\n\n")
    return events


async def test_a_streamed_response_is_its_events(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as stream:
        events = events_of(await ask(stream, post(model="forced:look", input="what?", stream=True)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1]["type"] == "response.completed"
        assert assembled(events) == events[-1]["response"]["output"]
        assert events[-1]["response"]["lifecycle"] == "stateless"
        for event in events:
            check_event(event)
        assert (await ask(stream, get("/healthz")))[0] == 200
        await bench.check_nothing_is_left()


def without_chance(response: Json) -> Json:
    """A Response without what differs from one run to the next: ids, times, and where its KV was found."""
    suffix = response["id"].removeprefix("resp_")
    response = json.loads(json.dumps(response).replace(suffix, "ID"))
    for name in ("created_at", "completed_at", "work", "usage"):
        del response[name]
    return response


@given(
    model=st.sampled_from([f"forced:{name}" for name in SCRIPTS] + ["calling"]),
    request=st.fixed_dictionaries(
        {},
        optional={
            "instructions": st.text(max_size=5),
            "max_output_tokens": st.integers(1, 40),
            "parallel_tool_calls": st.booleans(),
            "metadata": st.just({"a": "b"}),
            "temperature": st.sampled_from([0, 1.5]),
            "store": st.booleans(),
        },
    ),
)
async def test_streamed_or_not_the_response_is_the_same(model: str, request: Json) -> None:
    fields = {"model": model, "seed": 7, "tools": TOOLS, "max_output_tokens": 100, **request}
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as stream:
        events = events_of(await ask(stream, post(**fields, stream=True)))
        status, headers, body = await ask(stream, post(**fields))
        assert (status, headers["content-type"]) == (200, "application/json")
        assert without_chance(json.loads(body)) == without_chance(events[-1]["response"])
        assert json.loads(body)["usage"]["total_tokens"] == events[-1]["response"]["usage"]["total_tokens"]
        await bench.check_nothing_is_left()


async def test_a_warm_up_says_nothing_however_much_of_it_is_warm(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as stream:
        for words in range(10):  # some of these lengths end where a block of KV does
            for _ in range(2):
                warm = {"model": "forced:hello", "instructions": "a " * words, "tools": TOOLS}
                _, _, body = await ask(stream, post(**warm, generate=False))
                assert (json.loads(body)["status"], json.loads(body)["output"]) == ("completed", [])
        await bench.check_nothing_is_left()


async def test_both_paths_and_a_whole_history(autojump_clock: Clock) -> None:
    history = [user("what is in a?"), {**call("read_file", path="a"), "call_id": "c"}]
    history.append({"type": "function_call_output", "call_id": "c", "output": "nothing"})
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as stream:
        for path in ("/v1/responses", "/responses"):
            status, _, body = await ask(stream, post(path, model="forced:hello", input=history, stream=False))
            response = json.loads(body)
            assert (status, response["status"]) == (200, "completed")
            assert response["work"]["bytes_in"] == len(
                json.dumps({"model": "forced:hello", "input": history, "stream": False})
            )
        assert response["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("request_fields", "status", "code", "param"),
    [
        ({}, 400, "missing_required_parameter", "model"),
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": "random", "lifecycle": "held"}, 400, "invalid_value", "lifecycle"),
        ({"model": "random", "lifecycle": "chained"}, 400, "invalid_value", "lifecycle"),
        ({"model": "random", "lifecycle": "stored"}, 400, "invalid_value", "lifecycle"),
        ({"model": "random", "background": True}, 400, "unsupported_parameter", "background"),
        ({"model": "random", "conversation": "c"}, 400, "unsupported_parameter", "conversation"),
        ({"model": "random", "top_logprobs": 2}, 400, "unsupported_parameter", "top_logprobs"),
        ({"model": "random", "temperature": 3}, 400, "invalid_value", "temperature"),
        (
            {
                "model": "random",
                "input": [user("a"), {"type": "message", "role": "user", "content": [IMAGE]}],
            },
            400,
            "unsupported_parameter",
            "input[1].content[0].type",
        ),
        ({"model": "random", "input": "long " * 3000}, 400, "context_length_exceeded", "input"),
        ({"model": "random", "type": "response.append"}, 400, "invalid_value", "type"),
    ],
)
async def test_what_cannot_be_done_is_an_error_with_its_status(
    stream: bool, request_fields: Json, status: int, code: str, param: str, autojump_clock: Clock
) -> None:
    async with serving(SCRIPTS, engine={"max_context": 2048}) as bench:
        async with connected(edge_of(bench)) as client:
            got, headers, body = await ask(client, post(**request_fields, stream=stream))
            error = json.loads(body)["error"]
            assert (got, error["code"], error["param"]) == (status, code, param)
            assert headers["content-type"] == "application/json"
            assert (await ask(client, post(model="forced:hello", input="x")))[0] == 200
        await bench.check_nothing_is_left()


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", (), 400, "invalid_json"),
        (b"[]", (), 400, "invalid_json"),
        (b'{"model": NaN}', (), 400, "invalid_json"),
        (b'{"model": "\xff"}', (), 400, "invalid_json"),
        (b'{"a":' + b"[" * 100_000, (), 400, "invalid_json"),
        (b"{}", ("Content-Encoding: zstd",), 415, "unsupported_parameter"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    body: bytes, headers: tuple[str, ...], status: int, code: str, autojump_clock: Clock
) -> None:
    async with serving() as bench, connected(edge_of(bench)) as client:
        got, _, reply = await ask(client, post("/v1/responses", *headers, body=body))
        assert (got, json.loads(reply)["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("request_bytes", "status", "header"),
    [
        (get("/v1/responses"), 426, ("upgrade", "websocket")),
        (get("/v1/responses", method="DELETE"), 405, ("allow", "POST")),
        (get("/v1/responses/a/b/c"), 404, None),
        (get("/v1/responses/"), 404, None),
        (post("/v1/responses/compact"), 404, None),
    ],
)
async def test_other_ways_to_ask(
    request_bytes: bytes, status: int, header: tuple[str, str] | None, autojump_clock: Clock
) -> None:
    async with serving() as bench, connected(edge_of(bench)) as client:
        got, headers, _ = await ask(client, request_bytes)
        assert got == status
        assert header is None or headers[header[0]] == header[1]


async def test_a_failure_after_the_response_was_created_is_a_response(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS, engine={"kv_memory": 1 << 17}) as bench, connected(edge_of(bench)) as client:
        request = {"model": "forced:long", "input": "x " * 20}
        status, _, body = await ask(client, post(**request))
        assert (status, json.loads(body)["status"]) == (200, "failed")
        assert json.loads(body)["error"]["code"] == "server_is_overloaded"
        assert events_of(await ask(client, post(**request, stream=True)))[-1]["type"] == "response.failed"


async def test_a_server_that_has_no_engine_says_503(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        bench.service.draining = True
        assert (await ask(client, post(model="forced:hello")))[0] == 503


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [trio.aclose_forcefully, trio.StapledStream.send_eof])
async def test_a_client_that_leaves_ends_its_run(stream: bool, leave: Any, autojump_clock: Clock) -> None:
    async with serving({"endless": [[said(LONG * 4)]]}) as bench, connected(edge_of(bench)) as client:
        await client.send_all(post(model="forced:endless", stream=stream))
        while not bench.runs or bench.runs[0].state.sampled < 50:
            await trio.lowlevel.checkpoint()
        [run] = bench.runs
        sampled = run.state.sampled
        await leave(client)
        await bench.check_nothing_is_left()
        assert run.state.sampled - sampled < 10
        assert run.response is not None
        assert run.response.incomplete_details is not None
        assert run.response.incomplete_details.reason == "cancelled"


async def test_a_client_that_stalls_is_dropped_and_its_run_ends(autojump_clock: Clock) -> None:
    async with (
        serving({"endless": [[said(LONG * 4)]]}) as bench,
        connected(edge_of(bench), room=3) as client,
    ):
        await client.send_all(post(model="forced:endless", stream=True))
        await turns(20)
        [run] = bench.runs
        with bench.engine_stopped():
            await trio.sleep(31)
        await bench.check_nothing_is_left()
        assert run.response is not None
        assert run.response.status == "incomplete"


async def test_a_slow_client_finds_large_deltas(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench), room=3) as slow:
        await slow.send_all(post(model="forced:long", stream=True))
        while not bench.service._ended:
            await trio.lowlevel.checkpoint()
        slow.other.room = math.inf
        slow.other.widened.set()
        events = events_of((await read_replies(slow, ["POST"]))[0])
        assert assembled(events) == events[-1]["response"]["output"]
        async with connected(edge_of(bench)) as quick:
            assert len(events) < len(events_of(await ask(quick, post(model="forced:long", stream=True)))) / 10


async def test_a_reader_that_is_too_far_behind_loses_its_connection(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.response.EventLog", partial(EventLog, limit_bytes=2000))
    many = {"many": [[thought("a"), said("b")] * 10]}
    async with serving(many) as bench, connected(edge_of(bench), room=2) as slow:
        await slow.send_all(post(model="forced:many", stream=True))
        while not bench.service._ended:
            await trio.lowlevel.checkpoint()
        slow.other.room = math.inf
        slow.other.widened.set()
        with pytest.raises(h11.RemoteProtocolError, match="without sending complete message"):
            await read_replies(slow, ["POST"])


async def test_what_is_pipelined_meanwhile_is_bounded_and_answered(autojump_clock: Clock) -> None:
    requests = [post(model="forced:hello", padding="x" * 10_000) for _ in range(12)]
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        with bench.engine_stopped():
            await client.send_all(b"".join(requests))
            await bench.settle()
            assert client.other.taken < PIPELINED_LIMIT + 2 * READ_SIZE
        replies = await read_replies(client, ["POST"] * len(requests))
        assert [json.loads(body)["status"] for _, _, body in replies] == ["completed"] * len(requests)


async def test_a_caller_has_so_many_requests_in_flight(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench:
        edge = edge_of(bench, max_in_flight=1, api_keys=("sk-1", "sk-2"))
        mine, other = (f"Authorization: Bearer {key}" for key in ("sk-1", "sk-2"))
        async with connected(edge) as first, connected(edge) as second:
            with bench.engine_stopped():
                await first.send_all(post("/v1/responses", mine, model="forced:hello"))
                await bench.settle()
                status, headers, body = await ask(second, post("/v1/responses", mine, model="forced:hello"))
                assert (status, headers["retry-after"]) == (429, "1")
                assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
                await second.send_all(post("/v1/responses", other, model="forced:hello"))
                await bench.settle()
            for client in (first, second):
                assert (await read_replies(client, ["POST"]))[0][0] == 200
            assert (await ask(second, post("/v1/responses", mine, model="forced:hello")))[0] == 200


async def test_a_repeated_create_is_the_same_run(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench:
        edge = edge_of(bench)
        create = {"model": "forced:long", "event_id": "e"}
        async with connected(edge) as first, connected(edge) as second:
            await first.send_all(post(**create, stream=True))
            await turns(20)
            await second.send_all(post(**create))
            await turns(20)
            assert len(bench.runs) == 1
            await trio.aclose_forcefully(first)  # the second one has it now
            _, _, body = (await read_replies(second, ["POST"]))[0]
            assert json.loads(body)["status"] == "completed"
            events = events_of(await ask(second, post(**create, stream=True)))
            assert events[-1]["response"] == json.loads(body)


async def test_the_request_of_a_socket_keeps_its_turn_and_goes_with_it(autojump_clock: Clock) -> None:
    async with serving({"endless": [[said(LONG * 4)]]}) as bench, connected(edge_of(bench)) as client:
        peer = bench.connect()
        peer.create("forced:endless", lifecycle="chained")
        peer.create("forced:endless", lifecycle="chained", event_id="e")
        await peer.until("response.output_text.delta")
        await client.send_all(post(model="forced:endless", event_id="e"))
        await turns(20)
        assert [run.is_started for run in bench.runs] == [True, False]
        peer.hang_up()
        [(status, headers, _)] = await read_replies(client, ["POST"])
        assert (status, headers["retry-after"]) == (503, "1")
        await bench.check_nothing_is_left()


async def test_a_shutdown_ends_what_still_runs_with_an_event(autojump_clock: Clock) -> None:
    async with serving({"endless": [[said(LONG * 4)]]}) as bench, connected(edge_of(bench)) as client:
        await client.send_all(post(model="forced:endless", stream=True))
        await turns(20)
        with trio.move_on_after(0):
            await bench.service.drain()
        events = events_of((await read_replies(client, ["POST"]))[0])
        assert events[-1]["response"]["incomplete_details"] == {"reason": "shutdown"}


async def test_a_silent_run_sends_heartbeats(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        with bench.engine_stopped():
            await client.send_all(post(model="forced:hello", stream=True))
            await trio.sleep(31)
        events = events_of((await read_replies(client, ["POST"]))[0])
        assert [event["type"] for event in events].count("response.in_progress") == 3


async def test_what_a_socket_makes_can_be_watched_but_not_ended(autojump_clock: Clock) -> None:
    async with (
        serving(SCRIPTS) as bench,
        connected(edge_of(bench)) as first,
        connected(edge_of(bench)) as second,
    ):
        peer = bench.connect()
        peer.create("forced:long", event_id="e", lifecycle="chained")
        await peer.until("response.output_text.delta")
        await first.send_all(post(model="forced:long", event_id="e", stream=True))
        await second.send_all(post(model="forced:long", event_id="e", stream=True))
        await turns(20)
        await trio.aclose_forcefully(first)
        completed = await peer.until("response.completed")
        assert events_of((await read_replies(second, ["POST"]))[0]) == peer.heard
        assert completed["response"]["status"] == "completed"
