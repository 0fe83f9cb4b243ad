"""One connection: lanes, limits, prototype clients, and how it ends."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.testing

from protocol.log import EventLog
from protocol.websocket import FRAMES_AHEAD, MAX_ACTIVE, MAX_ERRORS, MAX_LANES, MAX_QUEUED
from tests.harness import (
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
