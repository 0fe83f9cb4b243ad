"""The client against a peer that speaks the protocol over memory streams, on a virtual clock."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from fake_responses import Peer, function_call, peer_over, required, response
from trio_websocket import ConnectionClosed, wrap_server_stream

from protocol.client import Connection, ConnectionLost, Run, ServerError, connect, list_models
from protocol.client import connection as client
from protocol.client import run as client_run
from protocol.client.views import Event, decode_event

URL = "ws://fake.test/v1/responses"


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Connection, Peer]]:
    """A client and its peer, under a deadline."""
    ours, theirs = trio.testing.memory_stream_pair()
    peers: list[Peer] = []

    async def accept() -> None:
        peers.append(await peer_over(theirs, nursery))

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            async with connect(URL, stream=ours, **options) as connection:
                await trio.testing.wait_all_tasks_blocked()
                yield connection, peers[0]
            nursery.cancel_scope.cancel()


async def started(connection: Connection, peer: Peer, id: str = "resp_1", **fields: Any) -> Run:
    """A run whose `created` and `in_progress` are on their way."""
    runs: list[Run] = []

    async def create() -> None:
        runs.append(await connection.held(**fields))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(create)
        await peer.begin(await peer.receive(), id)
    return runs[0]


async def gather(run: Run, events: list[Event]) -> None:
    """All the events that still come, also when they end in an exception."""
    async for event in run:
        events.append(event)


async def until(run: Run, type: str) -> list[Event]:
    """The events up to the first of a type."""
    events = []
    async for event in run:
        events.append(event)
        if event.type == type:
            break
    return events


async def test_a_run_pauses_at_a_call_and_goes_on_with_its_result(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer, model="m", input="Hi")
        call = function_call("call_1", "count", '{"path": "oak"}')
        held = response("resp_1", "in_progress", output=[call])
        await peer.send("response.done", run.lane, response=held, required_input=[required(call)])
        events = await until(run, "response.done")
        assert [event.sequence_number for event in events] == [0, 1, 2]
        assert [(owed.call_id, owed.name) for owed in events[-1].required_input] == [("call_1", "count")]
        assert run.held

        result = {"type": "function_call_output", "call_id": "call_1", "output": "oak: 5 files"}
        await run.append([result], event_id="append_1")
        assert not run.held
        assert await peer.receive() == {
            "type": "response.append",
            "response_id": "resp_1",
            "stream_id": run.lane,
            "event_id": "append_1",
            "input": [result],
        }
        await peer.send("response.completed", run.lane, response=response("resp_1", "completed"))
        assert [event.type async for event in run] == ["response.completed"]
        assert run.over


async def test_the_create_carries_the_fields_flat_and_the_lifecycle(autojump_clock):
    async with connected() as (connection, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: connection.held(model="m", input=[], temperature=0))
            create = await peer.receive()
            await peer.begin(create)
        lane = create.pop("stream_id")
        assert lane.startswith("lane-")
        fields = {"model": "m", "input": [], "temperature": 0, "lifecycle": "held"}
        assert create == {"type": "response.create", **fields}


async def test_parallel_calls_can_be_answered_in_any_order(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        calls = [function_call(f"call_{number}", "count", "{}") for number in (1, 2)]
        held = response("resp_1", "in_progress", output=calls)
        owed = [required(call) for call in calls]
        await peer.send("response.done", run.lane, response=held, required_input=owed)
        await until(run, "response.done")

        await run.append([{"type": "function_call_output", "call_id": "call_2", "output": "b"}])
        assert (await peer.receive())["input"][0]["call_id"] == "call_2"
        await peer.send("response.in_progress", run.lane, response=response("resp_1", "in_progress"))
        await peer.send("response.done", run.lane, response=held, required_input=owed[:1])
        still = (await until(run, "response.done"))[-1]
        assert [one.call_id for one in still.required_input] == ["call_1"]
        assert run.held


async def test_three_lanes_are_told_apart(autojump_clock):
    async with connected() as (connection, peer):
        runs = [await started(connection, peer, f"resp_{name}") for name in "abc"]
        assert len({run.lane for run in runs}) == 3
        for _ in range(5):
            for run, name in zip(runs, "abc", strict=True):
                await peer.send("response.output_text.delta", run.lane, delta=name)
        for run in runs:
            await peer.send("response.completed", run.lane, response=response(run.id, "completed"))
        texts = [[event.delta async for event in run if event.delta] for run in runs]
        assert texts == [["a"] * 5, ["b"] * 5, ["c"] * 5]


async def test_a_lane_is_used_again_and_what_is_late_on_it_is_dropped(autojump_clock):
    async with connected() as (connection, peer):
        first = await started(connection, peer, "resp_old")
        await peer.send("response.completed", first.lane, response=response("resp_old", "completed"))
        await until(first, "response.completed")
        second = await started(connection, peer, "resp_new")
        assert second.lane == first.lane
        await peer.send("response.incomplete", second.lane, response=response("resp_old", "incomplete"))
        await peer.send("response.completed", second.lane, response=response("resp_new", "completed"))
        assert [event.type async for event in second][-1] == "response.completed"


async def test_the_33rd_run_waits_for_a_lane(autojump_clock):
    async with connected() as (connection, peer):
        runs = [await started(connection, peer, f"resp_{number}") for number in range(client.LANES)]
        with trio.move_on_after(1) as patience:
            await connection.held()
        assert patience.cancelled_caught
        await peer.send("response.completed", runs[7].lane, response=response("resp_7", "completed"))
        assert (await started(connection, peer, "resp_32")).lane == runs[7].lane


async def test_a_refused_create_raises_and_frees_its_lane(autojump_clock):
    async with connected() as (connection, peer):

        async def refuse() -> None:
            create = await peer.receive()
            await peer.refuse("model_not_found", create["stream_id"], status=404, param="model")

        for _ in range(client.LANES + 1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refuse)
                with pytest.raises(ServerError, match="model_not_found") as caught:
                    await connection.create(model="nobody")
            assert (caught.value.status, caught.value.param) == (404, "model")


async def test_an_error_without_a_lane_answers_the_creates_that_wait(autojump_clock):
    async with connected() as (connection, peer):
        running = await started(connection, peer)

        async def refuse() -> None:
            await peer.receive()
            await peer.refuse("websocket_connection_limit_reached")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            with pytest.raises(ServerError, match="limit_reached"):
                await connection.create()
        await peer.send("response.completed", running.lane, response=response("resp_1", "completed"))
        assert [event.type async for event in running][-1] == "response.completed"


async def test_a_refused_append_leaves_the_run_held(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await peer.send("response.done", run.lane, response=response("resp_1", "in_progress"))
        await until(run, "response.done")
        await run.append([{"type": "function_call_output", "call_id": "wrong", "output": ""}])
        await peer.receive()
        await peer.refuse("invalid_value", run.lane, param="input[0].call_id")
        with pytest.raises(ServerError, match="call_id"):
            await until(run, "response.done")
        assert run.held
        assert not run.over
        await run.append([{"type": "function_call_output", "call_id": "right", "output": ""}])
        await peer.receive()
        await peer.send("response.completed", run.lane, response=response("resp_1", "completed"))
        assert [event.type async for event in run] == ["response.completed"]


async def test_a_server_that_goes_in_the_middle_of_a_leg(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await peer.text(run.lane, "half a")
        await trio.aclose_forcefully(peer.websocket._stream)
        seen: list[Event] = []
        with pytest.raises(ConnectionLost, match="broke"):
            await gather(run, seen)
        assert "".join(event.delta for event in seen) == "half a "
        with pytest.raises(ConnectionLost):
            await run.append([])
        with pytest.raises(ConnectionLost):
            await connection.create()


async def test_the_close_code_and_reason_are_told(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await peer.websocket.aclose(1001, "shutting down")
        with pytest.raises(ConnectionLost, match=r"1001 \(shutting down\)"):
            await until(run, "response.completed")


async def test_a_silent_leg_has_a_deadline_and_a_held_run_has_none(autojump_clock):
    async with connected(silence_timeout=60) as (connection, peer):
        run = await started(connection, peer)
        with pytest.raises(ConnectionLost, match="silent for 60 s"):
            await until(run, "response.done")
        await peer.send("response.done", run.lane, response=response("resp_1", "in_progress"))
        await until(run, "response.done")
        with trio.move_on_after(900) as patience:
            await run.__anext__()
        assert patience.cancelled_caught


async def test_a_create_that_is_never_answered_has_a_deadline(autojump_clock):
    async with connected(silence_timeout=60) as (connection, peer):
        with pytest.raises(ConnectionLost, match="No answer"):
            await connection.create()
        create = await peer.receive()
        await peer.begin(create, "resp_late")
        assert (await peer.receive())["response_id"] == "resp_late"


async def test_cancel_is_asked_for_and_its_end_still_comes(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await run.cancel()
        frame = await peer.receive()
        assert frame == {"type": "response.cancel", "response_id": "resp_1", "stream_id": run.lane}
        cut = response("resp_1", "incomplete", incomplete_details={"reason": "cancelled"})
        await peer.send("response.incomplete", run.lane, response=cut)
        last = (await until(run, "response.incomplete"))[-1]
        assert last.response.incomplete_details.reason == "cancelled"


async def test_a_create_that_is_cancelled_early_is_cancelled_once_it_has_an_id(autojump_clock):
    async with connected() as (connection, peer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.create)
            create = await peer.receive()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await peer.begin(create)
                assert (await peer.receive())["response_id"] == "resp_1"
                await peer.send(
                    "response.incomplete", create["stream_id"], response=response("resp_1", "incomplete")
                )
        assert trio.current_time() < 1


async def test_steering_names_the_run(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await run.steer("and quickly")
        frame = await peer.receive()
        assert frame == {"type": "response.steer", "previous_response_id": "resp_1", "input": "and quickly"}


async def test_leaving_a_run_cancels_it_and_the_connection_goes_on(autojump_clock):
    async with connected() as (connection, peer):
        with trio.move_on_after(5):
            async with await started(connection, peer) as run:
                await trio.sleep_forever()
        assert (await peer.receive())["type"] == "response.cancel"
        assert not run.over  # the peer never answered; leaving took the goodbye's deadline and no longer
        assert trio.current_time() == pytest.approx(5 + client_run.GOODBYE_TIMEOUT, abs=0.1)
        await started(connection, peer, "resp_2")


async def test_a_cancelled_connection_still_says_goodbye(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    frames = []

    async def serve() -> None:
        peer = await peer_over(theirs, nursery)
        await peer.begin(await peer.receive())
        try:
            while True:
                frames.append((await peer.receive())["type"])
        except ConnectionClosed as closed:
            frames.append(closed.reason.code)

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            with trio.move_on_after(5):
                async with connect(URL, stream=ours) as connection, await connection.held():
                    await trio.sleep_forever()
    assert frames == ["response.cancel", 1000]


async def test_a_run_that_nobody_reads_is_given_up_and_the_others_go_on(autojump_clock, monkeypatch):
    monkeypatch.setattr(client_run, "INBOX", 8)
    async with connected() as (connection, peer):
        unread, read = await started(connection, peer, "resp_1"), await started(connection, peer, "resp_2")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.text, unread.lane, "word " * 20)
            await until(read, "response.in_progress")
            await trio.sleep(client_run.STALL_TIMEOUT + 1)
            frame = await peer.receive()
            assert (frame["type"], frame["response_id"]) == ("response.cancel", "resp_1")
        await peer.send("response.completed", read.lane, response=response("resp_2", "completed"))
        assert [event.type async for event in read] == ["response.completed"]
        seen: list[Event] = []
        with pytest.raises(ConnectionLost, match="nobody read"):
            await gather(unread, seen)
        assert len(seen) == 8


async def test_unknown_events_are_harmless(autojump_clock):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await peer.send("response.hologram", run.lane, delta={"x": 1}, response="what", status="odd")
        await peer.send("response.hologram", "lane-of-nobody")
        await peer.send("keepalive")
        await peer.send("response.completed", run.lane, response=response("resp_1", "completed"))
        types = [event.type async for event in run]
        assert types[-2:] == ["response.hologram", "response.completed"]


@pytest.mark.parametrize(
    "frame", ["nonsense", "[]", '{"type": 1}', '{"type": "response.done", "response": 7}']
)
async def test_a_frame_that_is_no_event_ends_the_connection(autojump_clock, frame):
    async with connected() as (connection, peer):
        run = await started(connection, peer)
        await peer.websocket.send_message(frame)
        with pytest.raises(ConnectionLost, match="no event"):
            await until(run, "response.completed")


async def test_a_refused_handshake_tells_status_and_reason(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    seen: list[tuple[bytes, bytes]] = []

    async def refuse() -> None:
        request = await wrap_server_stream(nursery, theirs)
        seen.extend(request.headers)
        body = b'{"error": {"type": "t", "code": "invalid_api_key", "message": "Wrong key."}}'
        await request.reject(401, body=body)

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            with pytest.raises(ServerError, match=r"Wrong key\. \(401, invalid_api_key\)"):
                async with connect(URL, api_key="k", headers={"X-Test": "1"}, stream=ours):
                    pytest.fail("connected")
            nursery.cancel_scope.cancel()
    assert (b"authorization", b"Bearer k") in [(name.lower(), text) for name, text in seen]
    assert (b"x-test", b"1") in [(name.lower(), text) for name, text in seen]


async def test_a_peer_that_never_shakes_hands_has_a_deadline(autojump_clock):
    ours, _theirs = trio.testing.memory_stream_pair()
    with pytest.raises(ConnectionLost, match="handshake within 10 s"):
        async with connect(URL, stream=ours):
            pytest.fail("connected")


async def test_exceptions_of_the_body_come_out_as_they_are(autojump_clock):
    ours, theirs = trio.testing.memory_stream_pair()
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer_over, theirs, nursery)
            with pytest.raises(KeyError, match="the body's own"):
                async with connect(URL, stream=ours):
                    raise KeyError("the body's own")


@pytest.mark.parametrize("url", ["http://x/v1/responses", "ws://", "nonsense"])
async def test_only_websocket_urls(url):
    with pytest.raises(ValueError, match="not a ws"):
        async with connect(url):
            pytest.fail("connected")


async def test_nobody_listens():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(ConnectionLost, match=f"Cannot connect to 127.0.0.1:{port}"):
        async with connect(f"ws://127.0.0.1:{port}/v1/responses"):
            pytest.fail("connected")


@asynccontextmanager
async def http_answer(status: str, body: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request alike: its URL as for `connect`, and what it was asked."""
    asked: list[bytes] = []

    async def answer(stream: trio.SocketStream) -> None:
        asked.append(await stream.receive_some())
        await stream.send_all(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await stream.aclose()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, answer, 0, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            yield f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/v1/responses", asked
            nursery.cancel_scope.cancel()


async def test_the_models_of_a_server():
    body = '{"object": "list", "data": [{"id": "first", "object": "model"}, {"id": "second"}]}'
    async with http_answer("200 OK", body) as (url, asked):
        assert await list_models(url, api_key="k") == ["first", "second"]
    assert asked[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer k\r\n" in asked[0]


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (
            "401 Unauthorized",
            '{"error": {"code": "invalid_api_key", "message": "Wrong key."}}',
            "Wrong key. (401",
        ),
        ("500 Oh", "oh", "does not list its models. (500)"),
        ("200 OK", "<html>", "is no list of models"),
    ],
)
async def test_a_server_that_does_not_list_its_models(status, body, complaint):
    async with http_answer(status, body) as (url, _asked):
        with pytest.raises(ServerError, match=re.escape(complaint)):
            await list_models(url)


def test_an_event_keeps_what_a_client_acts_on_only():
    event = decode_event(
        '{"type": "response.output_text.delta", "delta": "a", "logprobs": [], "new": {"x": 1}}'
    )
    assert event == Event(type="response.output_text.delta", delta="a")
