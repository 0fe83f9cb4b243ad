"""What other servers of this protocol got wrong, each as a client sees it when it is right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from tests.harness import Json, Peer, assembled, call, result, said, serving, turns, user

TOOLS: list[Json] = [{"type": "function", "name": "read_file", "parameters": {"type": "object"}}]
SCRIPTS = {
    "look": [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")], [said("Yes.")]],
    "talk": [[said("word " * 60)], [said("More.")]],
}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def chained(peer: Peer, model: str = "forced:look", **fields: Any) -> Json:
    """The event that ends one chained Response."""
    peer.create(model, **{"tools": TOOLS, "lifecycle": "chained", **fields})
    return await peer.until(*ENDS)


def result_of(response: Json) -> Json:
    return {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "1"}


async def test_a_warm_up_is_a_whole_response_that_can_be_continued(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        warm = (await chained(peer, input=[], generate=False, store=False))["response"]
        assert [event["type"] for event in peer.heard] == [
            *("response.created", "response.in_progress", "response.completed")
        ]
        for event in peer.heard:
            assert event["response"]["object"] == "response"
            assert event["response"]["model"] == "forced:look"
            assert event["response"]["created_at"] > 0
        assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
        first = await chained(peer, input="go", previous_response_id=warm["id"], store=False)
        assert first["response"]["output"][0]["content"][0]["text"] == "Let me look."


async def test_calls_of_the_parent_are_known_to_the_next_create(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = (await chained(peer, store=False))["response"]
        second = await chained(peer, input=[result_of(first)], previous_response_id=first["id"], store=False)
        assert second["type"] == "response.completed"


async def test_the_latest_of_a_lane_stays_for_the_life_of_the_socket(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, hold_timeout=10) as bench:
        peer = bench.connect()
        first = (await chained(peer, store=False))["response"]
        await trio.sleep(3000)
        second = await chained(peer, input=[result_of(first)], previous_response_id=first["id"])
        assert second["type"] == "response.completed"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"previous_response_id": "resp_x"}, 400, "previous_response_not_found"),
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"input": "word " * 3000}, 400, "context_length_exceeded"),
        ({"background": True}, 400, "unsupported_parameter"),
        ({"temperature": 5}, 400, "invalid_value"),
        ({"lifecycle": "x"}, 400, "invalid_value"),
        ({"stream_id": "no spaces"}, 400, "invalid_stream_id"),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]}, 400, None),
    ],
)
async def test_every_error_has_status_code_and_param_and_ends_its_create(
    fields: Json, status: int, code: str | None, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS, engine={"max_context": 1000}) as bench:
        peer = bench.connect()
        error = await chained(peer, **{"stream_id": "a", **fields})
        assert error["type"] == "error"
        assert error["status"] == status
        assert set(error["error"]) == {"type", "code", "message", "param"}
        assert error["error"]["code"] == (code or "unsupported_parameter")
        assert error.get("stream_id") == (None if code == "invalid_stream_id" else "a")
        await bench.settle()
        assert not peer.read_now(), "nothing else of that create"
        assert (await chained(peer, stream_id="a"))["type"] == "response.completed"


async def test_every_event_of_parallel_forks_names_its_lane(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = (await chained(peer))["response"]
        peer.heard.clear()
        lanes = ["one", "two", "three"]
        for lane in lanes:
            peer.create(
                "forced:look",
                **{"input": [result_of(first)], "previous_response_id": first["id"], "stream_id": lane},
                **{"tools": TOOLS, "lifecycle": "chained"},
            )
        for _ in lanes:
            await peer.until("response.completed")
        for lane in lanes:
            events = [event for event in peer.heard if event["stream_id"] == lane]
            assert assembled(events) == events[-1]["response"]["output"]
        assert len(peer.heard) == sum(event["stream_id"] in lanes for event in peer.heard)


async def test_a_fork_that_is_sent_while_its_parent_is_busy_waits_for_nobody_but_its_lane(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Its parent is the latest of a lane that has gone on already when the fork begins."""
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = (await chained(peer, stream_id="main"))["response"]
        fields: Json = {"tools": TOOLS, "lifecycle": "chained", "input": [result_of(first)]}
        with bench.engine_stopped():
            peer.create("forced:talk", lifecycle="chained", stream_id="side")
            peer.create("forced:look", **fields, previous_response_id=first["id"], stream_id="main")
            peer.create("forced:look", **fields, previous_response_id=first["id"], stream_id="side")
            await bench.settle()
        ends = {}
        while len(ends) < 3:
            event = await peer.until("response.completed")
            ends[event["response"]["id"]] = event["stream_id"]
        assert sorted(ends.values()) == ["main", "side", "side"]


async def test_a_fork_that_fails_leaves_its_parent_to_its_own_lane(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = (await chained(peer, stream_id="main"))["response"]
        stray = {**result_of(first), "call_id": "call_x"}
        failed = await chained(peer, input=[stray], previous_response_id=first["id"], stream_id="side")
        assert failed["status"] == 400
        on = await chained(peer, input=[result_of(first)], previous_response_id=first["id"], stream_id="main")
        assert on["type"] == "response.completed"


async def test_the_same_lane_without_a_parent_is_a_new_conversation(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await chained(peer, stream_id="a")
        again = await chained(peer, stream_id="a")
        same = [event["response"]["output"][0]["content"] for event in (first, again)]
        assert same[0] == same[1]
        tokens = [event["response"]["usage"]["input_tokens"] for event in (first, again)]
        assert tokens[0] == tokens[1]


async def test_events_of_a_response_that_was_stopped_do_not_leak_into_the_next(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:talk", lifecycle="chained")
        stopped = (await peer.until("response.created"))["response"]["id"]
        peer.create("forced:look", tools=TOOLS, lifecycle="chained")
        await peer.until("response.output_text.delta")
        peer.say("response.cancel", response_id=stopped)
        ended = await peer.until("response.incomplete")
        assert ended["response"]["id"] == stopped
        assert (await peer.next())["type"] == "response.created"
        peer.heard[:] = peer.heard[-1:]
        completed = await peer.until("response.completed")
        assert assembled(peer.heard) == completed["response"]["output"]
        peer.say("response.cancel", response_id=stopped)
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "response_not_found")


async def test_a_long_prefill_is_not_silent(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, heartbeat=15) as bench:
        peer = bench.connect()
        with bench.engine_stopped():
            peer.create("forced:look", tools=TOOLS, lifecycle="chained", stream_id="a")
            await trio.sleep(50)
        completed = await peer.until("response.completed")
        beats = [event for event in peer.heard if event["type"] == "response.in_progress"]
        assert len(beats) == 1 + 3
        assert {event["stream_id"] for event in beats} == {"a"}
        assert assembled(peer.heard) == completed["response"]["output"]


async def test_usage_is_whole_in_every_end(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for fields in ({}, {"generate": False}, {"max_output_tokens": 1}):
            usage = (await chained(peer, **fields))["response"]["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            assert isinstance(usage["input_tokens_details"]["cached_tokens"], int)
            assert isinstance(usage["output_tokens_details"]["reasoning_tokens"], int)


async def test_frames_that_are_no_objects_leave_the_connection_as_it_is(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for frame in ("null", "1", '"text"', "[{}]", "true"):
            peer.say_raw(frame)
            error = await peer.until("error")
            assert (error["status"], error["error"]["code"]) == (400, "invalid_json")
            assert "/" not in error["error"]["message"], "no paths of files"
        assert (await chained(peer))["type"] == "response.completed"


# ---- held runs that make room


async def test_a_create_that_supersedes_needs_no_room(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, max_held=1) as bench:
        peer, other = bench.connect(), bench.connect()
        peer.create("forced:look")
        await peer.until("response.done")
        for _ in range(3):
            peer.create("forced:look")
            await peer.until("response.incomplete")
            await peer.until("response.done")
        other.create("forced:look")
        assert (await other.until("error"))["status"] == 429
        # Two at once: the first takes the place of the held one, there is none for the second.
        peer.create("forced:look")
        peer.create("forced:look")
        assert (await peer.until("error"))["status"] == 429
        peer.hang_up()
        other.hang_up()
        await bench.check_nothing_is_left()


async def test_a_response_that_is_cancelled_while_it_waits_ends_at_once_and_is_shown_in_its_turn(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:look")
        done = await peer.until("response.done")
        peer.create("forced:talk", stream_id="b")
        await peer.until("response.created")
        for number in range(3):
            peer.create("forced:talk", stream_id="b", metadata={"number": str(number)})
            await turns(3)
        waiting = [run.state.id for run in bench.runs if not run.is_started]
        assert len(waiting) == 3
        peer.say("response.cancel", response_id=waiting[1])
        await turns(10)
        assert waiting[1] not in [run.state.id for run in bench.runs]
        peer.append(result(done))
        ends = {}
        while len(ends) < 5:
            event = await peer.until(*ENDS)
            ends[event["response"]["id"]] = event
        on_b = [event for event in ends.values() if event.get("stream_id") == "b"]
        assert [event["response"]["metadata"].get("number") for event in on_b] == [None, "0", "1", "2"]
        assert [event["type"] for event in on_b].index("response.incomplete") == 2
        cut = [event for event in peer.heard if event.get("response", {}).get("id") == waiting[1]]
        assert [event["type"] for event in cut] == ["response.created", "response.incomplete"]
        peer.say("response.cancel", response_id=waiting[1])
        assert (await peer.until("error"))["error"]["code"] == "response_not_found"
        peer.hang_up()
        await bench.check_nothing_is_left()


# ---- where an error is


UNKNOWN: Json = {"type": "web_search_call", "id": "ws_1"}
BAD_NAME: Json = {"type": "function_call", "call_id": "call_1", "name": "no name", "arguments": "{}"}


@pytest.mark.parametrize("with_parent", [False, True])
async def test_indices_count_what_was_sent(with_parent: bool, autojump_clock: trio.abc.Clock) -> None:
    """Items that are ignored count too, and those of the history do not."""
    stray = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        for items, param in (
            ([UNKNOWN, user("x"), UNKNOWN, stray], "input[3].call_id"),
            ([UNKNOWN, user("x"), BAD_NAME], "input[2].name"),
        ):
            parent = {}
            if with_parent:  # with other instructions, so that the history is rendered again
                first = (await chained(peer, "forced:talk"))["response"]
                parent = {"previous_response_id": first["id"], "instructions": "Be brief."}
            error = await chained(peer, input=items, **parent)
            assert error["error"]["param"] == param
        peer.create("forced:look")
        done = await peer.until("response.done")
        peer.append(UNKNOWN, result(done), UNKNOWN, stray)
        assert (await peer.until("error"))["error"]["param"] == "input[3].call_id"
        peer.append(done["response"]["output"][0], UNKNOWN, stray)
        assert (await peer.until("error"))["error"]["param"] == "input[2].call_id"
        peer.append(result(done))
        await peer.until("response.completed")


# ---- what is remembered of creates


async def test_ended_runs_are_remembered_for_retries_within_bounds(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        ids = []
        for number in range(4):
            ids.append((await chained(peer, "forced:talk", event_id=f"e{number}"))["response"]["id"])
        again = (await chained(peer, "forced:talk", event_id="e0"))["response"]["id"]
        assert again == ids[0]
        size = bench.service._retries.size
        monkeypatch.setattr("protocol.retries.MAX_ENDED_BYTES", size // 2)
        await chained(peer, "forced:talk", event_id="e4")
        await bench.settle()
        assert bench.service._retries.size <= size // 2
        again = (await chained(peer, "forced:talk", event_id="e0"))["response"]["id"]
        assert again not in ids, "it was forgotten, and is made anew"
        last = json.dumps(peer.heard[-1])
        again = json.dumps(await chained(peer, "forced:talk", event_id="e0"))
        assert again == last
