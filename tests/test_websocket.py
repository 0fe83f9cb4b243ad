"""One connection: lanes, limits, retried creates, prototype clients, and how it ends. And the socket in
memory, checked against the real one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio_websocket import ConnectionClosed, wrap_client_stream

from protocol.access import Caller
from protocol.log import EventLog
from protocol.settings import Settings
from protocol.socket import BinaryFrame, Socket, SocketClosed, open_socket
from protocol.websocket import FRAMES_AHEAD, MAX_ACTIVE, MAX_ERRORS, MAX_LANES, MAX_QUEUED
from tests.harness import (
    FakeSocket,
    Json,
    Peer,
    assembled,
    call,
    result,
    results,
    said,
    serving,
    turns,
    user,
)

SCRIPTS = {
    "two": [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")]],
    "long": [[said("word " * 60)], [said("And more.")]],
    "endless": [[said("word " * 5000)]],
    "parallel": [[call("read_file", path="a"), call("run_tests")], [said("Done.")]],
}
ENDS = ("response.completed", "response.incomplete", "response.failed")


def of_lane(peer: Peer, stream_id: str | None) -> list[Json]:
    return [event for event in peer.heard if event.get("stream_id") == stream_id]


async def hear(peer: Peer, count: int, *types: str) -> list[Json]:
    """So many events of these types, whatever comes between."""
    found: list[Json] = []
    while len(found) < count:
        event = await peer.next()
        if event["type"] in types:
            found.append(event)
    return found


# ---- lanes


async def test_runs_of_several_lanes_are_held_and_answered_apart(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        names = [None, "a", "b.c-d_E"]
        for name in names:
            peer.create("forced:two", **({} if name is None else {"stream_id": name}))
        done = {event.get("stream_id"): event for event in await hear(peer, 3, "response.done")}
        assert set(done) == set(names)
        for name in reversed(names):
            peer.append(result(done[name], f"for {name}"), **({} if name is None else {"stream_id": name}))
        await hear(peer, 3, "response.completed")
        for name in names:
            events = of_lane(peer, name)
            if name is None:
                assert all("stream_id" not in event for event in events)
            assert assembled(events) == events[-1]["response"]["output"]
        await bench.check_nothing_is_left()


async def test_an_append_by_id_needs_no_lane(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", stream_id="a")
        done = await peer.until("response.done")
        peer.append(result(done))
        error = await peer.until("error")
        assert error["error"]["code"] == "previous_response_not_found"
        peer.append(result(done), response_id=done["response"]["id"])
        assert (await peer.until("response.completed"))["stream_id"] == "a"


async def test_one_lane_is_first_come_first_served(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for number in range(4):
            peer.create("forced:long", metadata={"number": str(number)})
        ends = [await peer.until("response.completed") for _ in range(4)]
        assert [end["response"]["metadata"]["number"] for end in ends] == ["0", "1", "2", "3"]
        kinds = [event["type"] for event in peer.heard]
        open_runs = 0
        for kind in kinds:
            open_runs += (kind == "response.created") - (kind in ENDS)
            assert open_runs in (0, 1)


async def test_a_lane_that_fails_leaves_the_others_alone(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long", stream_id="good")
        peer.create("nobody", stream_id="bad")
        peer.create("forced:long", stream_id="bad", temperature=5)
        peer.create("forced:long", stream_id="bad", input="word " * 200000)
        errors = await hear(peer, 2, "error")
        assert [error["stream_id"] for error in errors] == ["bad", "bad"]
        if not any(event["type"] in ENDS for event in peer.heard):
            await hear(peer, 1, "response.completed")
        good = of_lane(peer, "good")
        assert assembled(good) == good[-1]["response"]["output"]


async def test_a_connection_has_so_many_lanes(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for number in range(MAX_LANES):
            peer.create("forced:long", stream_id=f"lane{number}", generate=False)
            await peer.until("response.completed")
        peer.create("forced:long", stream_id="one-more")
        error = await peer.until("error")
        assert (error["status"], error["stream_id"]) == (400, "one-more")
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert error["error"]["param"] == "stream_id"
        for stream_id in (None, "lane3"):
            peer.create("forced:long", **({"stream_id": stream_id} if stream_id else {}))
            await peer.until("response.completed")


async def test_so_many_runs_work_at_once_and_held_ones_do_not_count(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        with bench.engine_stopped():
            for number in range(MAX_ACTIVE + 3):
                peer.create("forced:two", stream_id=f"lane{number}")
                await turns(5)
            assert [run.is_started for run in bench.runs] == [True] * MAX_ACTIVE + [False] * 3
        done = await hear(peer, MAX_ACTIVE + 3, "response.done")
        assert len(bench.runs) == MAX_ACTIVE + 3
        for event in done:
            peer.append(result(event), stream_id=event["stream_id"])
        await hear(peer, MAX_ACTIVE + 3, "response.completed")
        await bench.check_nothing_is_left()


async def test_so_many_creates_wait_and_the_next_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for _ in range(MAX_QUEUED + 1):
            peer.create("forced:long", generate=None)
            await turns(3)
        peer.create("forced:two")
        error = (await hear(peer, 1, "error"))[0]
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "try again in" in error["error"]["message"]
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_caller_has_so_many_held_runs(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, max_held=2) as bench:
        peers = [bench.connect() for _ in range(3)]
        done = []
        for peer in peers[:2]:
            peer.create("forced:two")
            done.append(await peer.until("response.done"))
        peers[2].create("forced:two")
        error = await peers[2].until("error")
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        peers[0].append(result(done[0]))
        await peers[0].until("response.completed")
        await bench.settle()
        peers[2].create("forced:two")
        await peers[2].until("response.done")


# ---- frames that are none


BAD_FRAMES = [
    ("", "invalid_json", None),
    ("nope", "invalid_json", None),
    ("[]", "invalid_json", None),
    ('{"type":"response.create","temperature":NaN}', "invalid_json", None),
    ('{"type":"response.create"', "invalid_json", None),
    ("{}", "unknown_event_type", "type"),
    ('{"type":"session.update"}', "unknown_event_type", "type"),
    ('{"type":5}', "unknown_event_type", "type"),
    ('{"type":"response.create","stream_id":""}', "invalid_stream_id", "stream_id"),
    ('{"type":"response.create","stream_id":"a b"}', "invalid_stream_id", "stream_id"),
    ('{"type":"response.append"}', "missing_required_parameter", "input"),
    ('{"type":"response.cancel"}', "missing_required_parameter", "response_id"),
]


@pytest.mark.parametrize(("frame", "code", "param"), BAD_FRAMES)
async def test_a_bad_frame_is_one_error_and_disturbs_nothing(
    frame: str, code: str, param: str | None, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two")
        await peer.until("response.created")
        peer.say_raw(frame)
        error = await peer.until("error")
        assert error["status"] == 400
        assert error["error"]["type"] == "invalid_request_error"
        assert (error["error"]["code"], error["error"]["param"]) == (code, param)
        assert "stream_id" not in error
        peer.append(result(await peer.until("response.done")))
        await peer.until("response.completed")


async def test_a_client_that_says_it_has_read_is_not_answered(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.say("response.processed", response_id="resp_1")
        await bench.settle()
        assert not peer.read_now()


async def test_a_binary_frame_is_the_end(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two")
        await peer.until("response.done")
        peer.say_raw(b"{}")
        assert (await peer.until_closed())[0] == 1003
        assert peer.heard[-1]["type"] == "error"
        await bench.check_nothing_is_left()


async def test_a_flood_of_bad_frames_that_nobody_reads_is_cut_off(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.stall()
        for _ in range(50 * MAX_ERRORS):
            peer.say_raw("nope")
        await trio.sleep(1)
        peer.go_on()
        assert (await peer.until_closed())[0] == 1008
        assert len(peer.heard) <= MAX_ERRORS + 1
        await bench.check_nothing_is_left()


async def test_a_burst_larger_than_the_queue_loses_frames_and_says_so(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for _ in range(FRAMES_AHEAD * 2):
            peer.say("response.processed")
        peer.create("forced:two")
        await bench.settle()
        peer.read_now()
        kinds = {event["type"] for event in peer.heard}
        assert kinds & {"response.done", "error"}
        codes = {event["error"]["code"] for event in peer.heard if event["type"] == "error"}
        assert codes <= {"rate_limit_exceeded"}


# ---- creates that are sent twice


async def test_a_create_sent_twice_on_its_lane_is_one_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for _ in range(3):
            peer.create("forced:two", event_id="e")
        done = await peer.until("response.done")
        assert len(bench.runs) == 1
        peer.create("forced:two", event_id="e")
        await bench.settle()
        assert not peer.read_now()
        peer.append(result(done))
        completed = await peer.until("response.completed")
        assert assembled(peer.heard) == completed["response"]["output"]
        first = list(peer.heard)
        peer.create("forced:two", event_id="e")
        await bench.settle()
        again = peer.read_now()
        assert again[-1] == first[-1], "what has ended is shown once more"
        assert assembled(again) == completed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_a_create_that_is_refused_can_be_sent_again(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("nobody", event_id="e")
        await peer.until("error")
        peer.create("forced:long", event_id="e")
        await peer.until("response.completed")


async def test_other_callers_have_other_event_ids(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peers = [bench.connect(caller=Caller(name)) for name in ("key-1", "key-2")]
        ids = []
        for peer in peers:
            peer.create("forced:long", event_id="e")
            ids.append((await peer.until("response.completed"))["response"]["id"])
        assert ids[0] != ids[1]


async def test_a_create_sent_again_elsewhere_moves_its_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:two", event_id="e")
        await first.until("response.done")
        second.create("forced:two", event_id="e")
        done = await second.until("response.done")
        lost = await first.until("error")
        assert lost["error"]["code"] == "response_taken_over"
        first.hang_up()
        await bench.settle()
        second.append(result(done))
        completed = await second.until("response.completed")
        assert assembled(second.heard) == completed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_the_lane_that_lost_its_run_goes_on_with_the_next(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless", event_id="e")
        await first.until("response.output_text.delta")
        first.create("forced:long", metadata={"next": "yes"})
        await turns(3)
        second.create("forced:endless", event_id="e")
        assert (await first.until("error"))["error"]["code"] == "response_taken_over"
        completed = await first.until("response.completed")
        assert completed["response"]["metadata"] == {"next": "yes"}
        second.create("forced:long")
        await second.until("response.output_text.delta")
        second.say("response.cancel", response_id=bench.runs[0].state.id)
        await second.until("response.incomplete")
        await second.until("response.completed")
        await bench.check_nothing_is_left()


async def test_a_run_that_never_started_moves_too(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless")
        await first.until("response.output_text.delta")
        first.create("forced:two", event_id="e")
        await turns(3)
        second.create("forced:two", event_id="e")
        second.append(result(await second.until("response.done")))
        completed = await second.until("response.completed")
        assert assembled(second.heard) == completed["response"]["output"]
        first.hang_up()
        await bench.check_nothing_is_left()


async def test_a_create_whose_connection_went_before_it_started_is_made_anew(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:endless")
        await first.until("response.output_text.delta")
        first.create("forced:two", event_id="e")
        await turns(3)
        first.hang_up()
        await bench.settle()
        second.create("forced:two", event_id="e")
        await second.until("response.done")
        second.hang_up()
        await bench.check_nothing_is_left()


async def test_a_run_that_ended_with_its_connection_is_shown_to_who_asks_again(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        first, second = bench.connect(), bench.connect()
        first.create("forced:two", event_id="e")
        await first.until("response.done")
        first.hang_up()
        await bench.settle()
        second.create("forced:two", event_id="e")
        second.create("forced:long")
        ended = await second.until("response.incomplete")
        assert ended["response"]["incomplete_details"] == {"reason": "cancelled"}
        await second.until("response.completed")


# ---- a run that waits for its lane


@pytest.mark.parametrize("kind", ["append", "steer"])
async def test_what_is_said_to_a_run_that_waits_stops_nothing(
    kind: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", stream_id="a")
        await peer.until("response.created")
        peer.create("forced:long", stream_id="a")
        done = await peer.until("response.done")
        waiting = bench.runs[1].state.id
        if kind == "append":
            peer.append(user("hurry"), response_id=waiting)
            error = await peer.until("error")
            assert error["error"]["code"] == "previous_response_not_found"
        else:
            peer.say("response.steer", previous_response_id=waiting, input="hurry")
            await peer.until("response.steer.failed")
        peer.append(result(done), stream_id="a")
        await peer.until("response.completed")
        await peer.until("response.completed")
        await bench.check_nothing_is_left()


# ---- prototype clients


async def test_a_prototype_client_holds_without_saying_so(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect(prototype=True)
        peer.create("forced:two", lifecycle=None)
        done = await peer.until("response.done")
        peer.append(result(done), client_metadata={"a": "b"})
        await peer.until("response.completed")


async def test_a_prototype_client_without_a_run_gets_500_and_goes_on(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect(prototype=True)
        peer.append({"type": "function_call_output", "call_id": "call_x", "output": "x"})
        error = await peer.until("error")
        assert (error["status"], error["error"]["type"]) == (500, "server_error")
        assert error["error"]["code"] == "previous_response_not_found"
        assert peer.closed is None
        peer.create("forced:two")
        done = await peer.until("response.done")
        peer.append({**result(done), "call_id": "call_x"})
        assert (await peer.until("error"))["status"] == 400
        peer.append(result(done))
        await peer.until("response.completed")


async def test_a_prototype_client_that_waits_too_long_finds_its_socket_closed(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS, hold_timeout=600) as bench:
        peer = bench.connect(prototype=True)
        peer.create("forced:two")
        await peer.until("response.done")
        began = trio.current_time()
        assert (await peer.until_closed())[0] == 1000
        assert trio.current_time() - began == pytest.approx(600, abs=1)
        assert peer.heard[-1]["type"] == "response.done", "no frame that it did not wait for"
        await bench.check_nothing_is_left()


async def test_a_prototype_client_that_starts_over_hears_of_the_new_run_only(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect(prototype=True)
        peer.create("forced:two")
        first = await peer.until("response.done")
        peer.create("forced:two")
        assert (await peer.next())["type"] == "response.created"
        second = await peer.until("response.done")
        assert first["response"]["id"] != second["response"]["id"]
        peer.append(result(second))
        await peer.until("response.completed")
        assert peer.closed is None
        await bench.check_nothing_is_left()


async def test_a_prototype_client_at_shutdown_finds_its_socket_closed(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect(prototype=True)
        peer.create("forced:two")
        await peer.until("response.done")
        await bench.service.drain()
        await peer.until_closed()
        assert peer.heard[-1]["type"] == "response.done"


# ---- how a connection ends


@pytest.mark.parametrize("prototype", [False, True])
@pytest.mark.parametrize("code", [1000, 1006])
async def test_runs_go_with_their_connection(
    code: int, prototype: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect(prototype=prototype)
        peer.create("forced:two", stream_id="held")
        await peer.until("response.done")
        peer.create("forced:endless", stream_id="sampling")
        await hear(peer, 1, "response.output_text.delta")
        peer.create("forced:endless", stream_id="sampling")
        peer.create("forced:endless", stream_id="prefilling", input="word " * 2000)
        await turns(4)
        sampled = bench.scheduler.statistics().tokens_sampled
        peer.hang_up(code)
        await bench.check_nothing_is_left()
        assert bench.scheduler.statistics().tokens_sampled <= sampled + 5
        assert bench.service.statistics()["runs"]["ended_total"] == {"cancelled": 3}


async def test_a_client_that_takes_nothing_is_dropped(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, send_timeout=30) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        await peer.until("response.created")
        peer.stall()
        began = trio.current_time()
        assert (await peer.until_closed())[0] == 1006
        assert trio.current_time() - began == pytest.approx(30)
        await bench.check_nothing_is_left()


async def test_a_slow_client_finds_large_deltas_and_costs_others_nothing(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        slow, quick = bench.connect(), bench.connect()
        for peer in (slow, quick):
            peer.create("forced:long")
        await slow.until("response.created")
        slow.stall()
        completed = await quick.until("response.completed")
        slow.go_on()
        same = await slow.until("response.completed")
        texts = [each["response"]["output"][0]["content"] for each in (completed, same)]
        assert texts[0] == texts[1]
        assert len(slow.heard) < len(quick.heard)
        for peer in (slow, quick):
            assert assembled(peer.heard) == peer.heard[-1]["response"]["output"]


async def test_a_client_for_which_events_were_not_kept_is_told_by_the_end(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(Any, EventLog.__init__).__kwdefaults__, "limit_bytes", 2000)
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.stall()
        peer.create("forced:parallel", event_id="e")
        await bench.settle()
        peer.go_on()
        assert (await peer.until_closed())[0] == 1008
        await bench.check_nothing_is_left()
        late = bench.connect()
        late.create("forced:parallel", event_id="e")
        error = await late.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "events_expired")
        monkeypatch.undo()
        late.create("forced:parallel")
        await late.until("response.done")


async def test_a_client_without_pong_is_dropped(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, ping_interval=20, ping_timeout=20) as bench:
        peer = bench.connect()
        peer.create("forced:two")
        await peer.until("response.done")
        await trio.sleep(50)
        assert peer.closed is None
        peer.socket.answers_pings = False
        assert (await peer.until_closed())[0] == 1006
        await bench.check_nothing_is_left()


async def test_an_old_connection_takes_appends_and_no_creates_and_closes_when_idle(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS, connection_lifetime=3600, hold_timeout=1000) as bench:
        peer = bench.connect()
        await trio.sleep(3599)
        peer.create("forced:parallel")
        done = await peer.until("response.done")
        await trio.sleep(2)
        peer.create("forced:two")
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "websocket_connection_limit_reached")
        peer.append(*results(done))
        await peer.until("response.completed")
        assert await peer.until_closed() == (1001, "connection limit reached")
        assert peer.heard[-1]["error"]["code"] == "websocket_connection_limit_reached"
        await bench.check_nothing_is_left()


async def test_an_old_connection_that_is_idle_is_closed_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, connection_lifetime=3600) as bench:
        peer = bench.connect()
        assert (await peer.until_closed())[0] == 1001
        assert trio.current_time() >= 3600
        assert bench.runs == []


async def test_an_idle_connection_is_left_alone(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, connection_lifetime=3600) as bench:
        peer = bench.connect()
        await trio.sleep(3500)
        peer.create("forced:long")
        await peer.until("response.completed")


# ---- the socket in memory and the real one


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
