"""Steering a chained Response: it ends as it would have, and what continues it begins with the input."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from protocol.past import EARLIER_RESPONSES
from protocol.steering import MAX_STEERING_BYTES, MAX_STEERS
from tests.harness import Bench, Json, Peer, assembled, call, custom_call, said, serving, turns, user
from tests.strict_sdk import check_event

TOOLS: list[Json] = [
    {"type": "function", "name": "read_file", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
]
SCRIPTS = {
    "talk": [[said("word " * 60)], [said("mot " * 60)], [said("Wort")]],
    "calls": [
        [said("word " * 60), call("read_file", path="a"), custom_call("apply_patch", "+")],
        [said("done")],
    ],
}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


async def talking(bench: Bench, peer: Peer, model: str = "forced:talk", **fields: Any) -> str:
    """A chained Response that has begun to speak: its id."""
    peer.create(model, **{"tools": TOOLS, "lifecycle": "chained", **fields})
    created = await peer.until("response.created")
    await peer.until("response.output_text.delta")
    response_id: str = created["response"]["id"]
    return response_id


def steer(peer: Peer, response_id: str, input: Any = "in French") -> None:
    peer.say("response.steer", previous_response_id=response_id, input=input)


def users(bench: Bench) -> list[str]:
    """What the user has said in the conversation of the run that goes on."""
    return [str(item.content) for item in bench.runs[-1].state.items if getattr(item, "role", "") == "user"]


def check_frames(peer: Peer, stream_id: str | None) -> None:
    """All that was heard is the SDK's, and on this lane."""
    for event in peer.heard:
        check_event(event)
        assert event.get("stream_id") == stream_id, event


# ---- the server continues


@pytest.mark.parametrize("stream_id", [None, "lane"])
async def test_what_was_said_meanwhile_makes_a_successor(
    stream_id: str | None, autojump_clock: trio.abc.Clock
) -> None:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        settings = {"instructions": "Be kind.", "metadata": {"a": "b"}, "max_output_tokens": 900, **lane}
        first = await talking(bench, peer, **settings)
        steer(peer, first, "in French")
        steer(peer, first, [user("and short")])
        accepted = [await peer.until("response.steer.accepted") for _ in range(2)]
        assert {each["steer"]["previous_response_id"] for each in accepted} == {first}
        assert len({each["steer"]["id"] for each in accepted}) == 2
        completed = await peer.until("response.completed")
        assert completed["response"]["output"][0]["content"][0]["text"] == "word " * 60
        assert assembled(peer.heard) == completed["response"]["output"]
        created = await peer.next()
        assert created["type"] == "response.created"
        assert created["response"]["previous_response_id"] == first
        for setting in ("instructions", "metadata", "max_output_tokens", "tools", "model", "lifecycle"):
            assert created["response"][setting] == completed["response"][setting]
        assert users(bench) == ["hello", "in French", "and short"]
        second = await peer.until("response.completed")
        assert second["response"]["output"][0]["content"][0]["text"] == "mot " * 60
        context = completed["response"]["usage"]["total_tokens"]
        assert second["response"]["usage"]["input_tokens_details"]["cached_tokens"] == context - 1
        check_frames(peer, stream_id)
        # The chain goes on from the successor.
        peer.create(
            "forced:talk",
            input="x",
            previous_response_id=second["response"]["id"],
            lifecycle="chained",
            **lane,
        )
        third = await peer.until("response.completed")
        assert third["response"]["output"][0]["content"][0]["text"] == "Wort"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_the_successor_comes_before_creates_that_wait(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer)
        peer.create("forced:talk", input="new", lifecycle="chained")
        steer(peer, first)
        created = []
        while len(created) < 2:
            event = await peer.until("response.created", "response.completed")
            created += [event["response"]] if event["type"] == "response.created" else []
        assert [each["previous_response_id"] for each in created] == [first, None]
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_successor_can_be_steered_too(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        steer(peer, await talking(bench, peer))
        await peer.until("response.completed")
        second = (await peer.until("response.created"))["response"]["id"]
        steer(peer, second, "in German")
        await peer.until("response.completed")
        third = await peer.until("response.completed")
        assert third["response"]["previous_response_id"] == second
        assert third["response"]["output"][0]["content"][0]["text"] == "Wort"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_response_that_was_cut_is_continued(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        steer(peer, await talking(bench, peer, max_output_tokens=60))
        await peer.until("response.incomplete")
        successor = (await peer.until("response.created"))["response"]
        assert successor["max_output_tokens"] == 60
        peer.hang_up()
        await bench.check_nothing_is_left()


# ---- the client continues


@pytest.mark.parametrize("stream_id", [None, "lane"])
async def test_input_waits_for_results_and_goes_before_them(
    stream_id: str | None, autojump_clock: trio.abc.Clock
) -> None:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, "forced:calls", **lane)
        steer(peer, first, "one")
        steer(peer, first, "two")
        accepted = [(await peer.until("response.steer.accepted"))["steer"]["id"] for _ in range(2)]
        completed = await peer.until("response.completed")
        pending = [await peer.next(), await peer.next()]
        assert [event["type"] for event in pending] == ["response.steer.pending"] * 2
        assert [event["steer"]["id"] for event in pending] == accepted
        numbers = [event["sequence_number"] for event in (completed, *pending)]
        assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
        assert pending[0]["reason"] == "waiting_for_required_input"
        required = pending[0]["required_input"]
        assert [each["type"] for each in required] == ["function_call_output", "custom_tool_call_output"]
        await bench.settle()
        assert not peer.read_now()
        assert not bench.runs
        results = [{"type": each["type"], "call_id": each["call_id"], "output": "1"} for each in required]
        peer.create(
            "forced:calls",
            **{"input": [*results, user("three")], "previous_response_id": first, "lifecycle": "chained"},
            **lane,
        )
        await peer.until("response.created")
        items = bench.runs[0].state.items[bench.runs[0].state.inherited_items :]
        assert [getattr(item, "content", "result") for item in items] == [
            "one",
            "two",
            "result",
            "result",
            "three",
        ]
        second = await peer.until("response.completed")
        assert second["response"]["output"][0]["content"][0]["text"] == "done"
        check_frames(peer, stream_id)
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_fork_on_another_lane_does_not_get_the_input(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, "forced:calls", stream_id="a")
        steer(peer, first, "one")
        await peer.until("response.completed")
        required = (await peer.until("response.steer.pending"))["required_input"]
        results = [{"type": each["type"], "call_id": each["call_id"], "output": "1"} for each in required]
        for lane, said_so_far in (("b", ["hello"]), ("a", ["hello", "one"])):
            peer.create(
                "forced:calls",
                input=results,
                previous_response_id=first,
                lifecycle="chained",
                stream_id=lane,
            )
            await peer.until("response.created")
            assert users(bench) == said_so_far
            await peer.until("response.completed")
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_indices_of_errors_are_those_of_the_create(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, "forced:calls")
        steer(peer, first, "one")
        await peer.until("response.completed")
        pending = await peer.until("response.steer.pending")
        stray = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
        peer.create("forced:calls", input=[user("x"), stray], previous_response_id=first, lifecycle="chained")
        error = await peer.until("error")
        assert error["error"]["param"] == "input[1].call_id"
        # What was queued for it comes back, for the client to make of it what it likes.
        failed = await peer.until("response.steer.failed")
        assert failed["error"]["code"] == "successor_creation_failed"
        assert failed["steer"] == {**pending["steer"], "input": "one"}
        peer.hang_up()
        await bench.check_nothing_is_left()


# ---- what comes to nothing


async def failure(peer: Peer) -> Json:
    failed = await peer.until("response.steer.failed")
    check_event(failed)
    return failed


@pytest.mark.parametrize(
    "input", ["", [], [{"type": "message", "role": "user", "content": ""}], [said("x")], [{"type": "x"}], 5]
)
async def test_input_that_is_not_of_the_user_is_refused(input: Any, autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer)
        steer(peer, first, input)
        failed = await peer.until("response.steer.failed", "error")
        assert failed["error"]["code"] == ("invalid_value" if input == 5 else "invalid_input")
        await peer.until("response.completed")
        await bench.settle()
        assert not peer.read_now()


async def test_too_much_input_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer)
        steer(peer, first, "x" * MAX_STEERING_BYTES)
        assert (await failure(peer))["error"]["code"] == "too_many_pending_steers"
        for _ in range(MAX_STEERS + 1):
            steer(peer, first, "x")
            await turns(1)
        assert (await failure(peer))["error"]["code"] == "too_many_pending_steers"
        await peer.until("response.completed")
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_what_does_not_go_on_says_why(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, stream_id="a")
        await peer.until("response.completed")
        steer(peer, first)
        failed = await failure(peer)
        assert (failed["error"]["code"], failed["stream_id"]) == ("response_already_completed", "a")
        cut = await talking(bench, peer, max_output_tokens=5)
        await peer.until("response.incomplete")
        steer(peer, cut)
        failed = await failure(peer)
        assert failed["error"]["code"] == "response_not_active"
        assert "stream_id" not in failed
        steer(peer, "resp_unknown")
        assert (await failure(peer))["error"]["code"] == "response_not_found"
        peer.create("forced:talk", input="long " * 100, generate=False, lifecycle="chained")
        with bench.engine_stopped():
            warming = (await peer.until("response.created"))["response"]["id"]
            steer(peer, warming)
            assert (await failure(peer))["error"]["code"] == "steering_not_supported"
        await peer.until("response.completed")


async def test_a_response_that_is_cancelled_gives_its_input_back(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, stream_id="a")
        steer(peer, first, "one")
        accepted = await peer.until("response.steer.accepted")
        peer.say("response.cancel", response_id=first)
        ended = await peer.until("response.incomplete")
        failed = await peer.next()
        check_event(failed)
        assert failed["type"] == "response.steer.failed"
        assert failed["error"]["code"] == "response_not_active"
        assert failed["steer"] == {**accepted["steer"], "input": "one"}
        assert failed["sequence_number"] == ended["sequence_number"] + 1
        assert failed["stream_id"] == "a"
        peer.hang_up()
        await bench.check_nothing_is_left()


@pytest.mark.parametrize("why", ["context", "draining", "age"])
async def test_a_successor_that_cannot_be_is_no_error_but_gives_the_input_back(
    why: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS, engine={"max_context": 700}, connection_lifetime=100) as bench:
        peer = bench.connect()
        await trio.sleep(99)
        first = await talking(bench, peer)
        steer(peer, first, "long " * 500 if why == "context" else "short")
        await peer.until("response.steer.accepted")
        if why == "age":
            with bench.engine_stopped():
                await trio.sleep(2)
        if why == "draining":
            bench.nursery.start_soon(bench.service.drain)
        await peer.until("response.completed")
        failed = await peer.next()
        check_event(failed)
        assert failed["type"] == "response.steer.failed"
        assert failed["error"]["code"] == "successor_creation_failed"
        assert failed["steer"]["id"].startswith("steer_")
        if why == "context":
            # The Response itself can still be continued.
            peer.create(
                "forced:talk",
                **{"input": "x", "previous_response_id": first, "lifecycle": "chained", "tools": TOOLS},
            )
            second = await peer.until("response.completed")
            assert second["response"]["previous_response_id"] == first
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_input_whose_response_is_forgotten_comes_back(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, "forced:calls", stream_id="a")
        steer(peer, first, "one")
        await peer.until("response.steer.accepted")
        for _ in range(EARLIER_RESPONSES + 2):
            peer.create("forced:talk", input="x", lifecycle="chained", stream_id="a", generate=False)
            await turns(60)
        failed = None
        while failed is None:
            event = await peer.next()
            failed = event if event["type"] == "response.steer.failed" else None
        assert (failed["error"]["code"], failed["stream_id"]) == ("response_not_active", "a")
        assert failed["steer"]["input"] == "one"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_client_that_goes_takes_its_steering_with_it(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        steer(peer, await talking(bench, peer))
        await peer.until("response.steer.accepted")
        peer.hang_up()
        await bench.check_nothing_is_left()
        assert bench.service.statistics()["runs"]["ended_total"] == {"cancelled": 1}


async def test_injections_fail_on_the_lane_of_their_response(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await talking(bench, peer, stream_id="a")
        for code in ("response_not_found", "response_already_completed"):
            peer.say("response.inject", response_id=first, input=[user("x")])
            failed = await peer.until("response.inject.failed")
            check_event(failed)
            assert (failed["error"]["code"], failed["stream_id"]) == (code, "a")
            if code == "response_not_found":
                await peer.until("response.completed")
