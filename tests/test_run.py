"""The held run, from the client's side: legs, appends, messages, and every way in which a run can end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import trio

import protocol.intake
from engine.messages import Extend, Open, Sample, Sampled, Sampling
from engine.scheduler import Scheduler
from protocol import wire
from protocol.dialects.base import TextDelta
from protocol.intake import TOKENISE_IN_THREAD
from tests.harness import (
    TOOLS,
    Bench,
    Json,
    Peer,
    answer,
    assembled,
    call,
    clock_stands_still,
    custom_call,
    result,
    results,
    said,
    serving,
    thought,
    turns,
    user,
)

TWO_LEGS = [[said("Let me look."), call("read_file", path="a")], [said("It is empty.")]]
PARALLEL = [
    [
        thought("Three at once."),
        call("read_file", path="a"),
        custom_call("apply_patch", "*** End"),
        call("run_tests"),
    ],
    [said("All done.")],
]
LONG_TALK = [[said("word " * 60)], [said("And more.")]]
LONG_THEN_CALL = [[said("word " * 50), call("read_file", path="a")], [said("done")], [said("extra")]]
ENDS = ("response.completed", "response.incomplete", "response.failed")
SCRIPTS = {"two": TWO_LEGS, "parallel": PARALLEL, "long": LONG_TALK, "calling": LONG_THEN_CALL}


def types(events: Sequence[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def own(peer: Peer) -> list[Json]:
    """The numbered events: all but error frames."""
    return [event for event in peer.heard if event["type"] != "error"]


async def held(peer: Peer, model: str = "forced:two", **fields: Any) -> Json:
    """Create a run and wait until it is held; its `response.done`."""
    peer.create(model, **fields)
    return await peer.until("response.done")


def ledger_of(bench: Bench) -> list[int]:
    return bench.runs[0].state.ledger.tokens


# ---- legs


async def test_a_run_of_two_legs(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer, instructions="Be brief.", metadata={"a": "b"}, user=None)
        assert types(peer.heard)[:3] == ["created", "in_progress", "output_item.added"]
        created = peer.heard[0]["response"]
        assert (created["status"], created["output"], created["lifecycle"]) == ("in_progress", [], "held")
        assert (created["instructions"], created["tools"]) == ("Be brief.", TOOLS)
        response = done["response"]
        assert response["status"] == "in_progress"
        assert response["id"] == created["id"]
        assert [item["type"] for item in response["output"]] == ["message", "function_call"]
        assert (response["instructions"], response["tools"]) == (None, [])
        function_call = response["output"][1]
        assert done["required_input"] == [
            {"type": "function_call_output", "call_id": function_call["call_id"], "name": "read_file"}
        ]
        await bench.settle()
        assert not peer.read_now(), "a held run says nothing"
        peer.append(result(done, "nothing in it"))
        completed = await peer.until("response.completed")
        assert completed["response"]["id"] == created["id"]
        assert assembled(peer.heard) == completed["response"]["output"]
        assert [item["type"] for item in completed["response"]["output"]] == [
            *("message", "function_call", "message")
        ]
        assert completed["response"]["metadata"] == {"a": "b"}
        assert types(peer.heard).count("created") == 1
        await bench.check_nothing_is_left()


async def test_usage_and_work_of_legs_and_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer, input="what is in a?", instructions="Be brief.")
        first_input = bench.runs[0].state.leg_input
        first_output = len(ledger_of(bench)) - first_input
        leg = done["response"]["usage"]
        assert (leg["input_tokens"], leg["output_tokens"]) == (first_input, first_output)
        assert leg["input_tokens_details"]["cached_tokens"] == 0
        assert leg["total_tokens"] == first_input + first_output
        run = bench.runs[0]
        peer.append(result(done, "nothing in it"))
        completed = await peer.until("response.completed")
        state = run.state
        whole = completed["response"]["usage"]
        assert whole["input_tokens"] == state.rendered, "each input token once"
        assert whole["output_tokens"] == state.sampled
        work = completed["response"]["work"]
        assert (work["pre_passes"], work["post_passes"], work["legs"]) == (1, 1, 2)
        assert work["tokens_sampled"] == state.sampled
        assert work["tokens_prefilled"] >= state.rendered
        assert work["tokens_prefilled"] <= state.rendered + 2, "the history is never prefilled again"
        assert work["items_validated"] == 2
        dialect = bench.model("forced:two").dialect
        once = sum(
            len(part)
            for fragment in (
                dialect.opening("Be brief.", run._tools),
                dialect.items([wire.Message("user", "what is in a?")]),
                dialect.items([wire.FunctionCallOutput("call", "nothing in it")]),
            )
            for part in fragment
            if isinstance(part, str)
        )
        assert work["characters_rendered"] == work["characters_tokenised"] == once
        first, second = done["response"]["work"], work
        assert first["tokens_sampled"] == first_output
        assert first["legs"] == 1
        assert second["bytes_in"] > first["bytes_in"]


async def test_a_second_run_of_the_same_prompt_takes_its_prefix_from_the_kv_of_the_first(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long", input="hello " * 50)
        first = (await peer.until("response.completed"))["response"]["usage"]
        peer.create("forced:long", input="hello " * 50)
        second = (await peer.until("response.completed"))["response"]["usage"]
        assert first["input_tokens"] == second["input_tokens"]
        assert first["input_tokens_details"]["cached_tokens"] == 0
        assert second["input_tokens_details"]["cached_tokens"] >= second["input_tokens"] - 16


# ---- parallel results


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_parallel_results_one_by_one_in_any_order_give_the_ledger_of_all_at_once(
    order: tuple[int, int, int], autojump_clock: trio.abc.Clock
) -> None:
    ledgers = []
    async with serving(SCRIPTS) as bench:
        for one_by_one in (False, True):
            peer = bench.connect()
            done = await held(peer, "forced:parallel")
            required = done["required_input"]
            assert [each["name"] for each in required] == ["read_file", "apply_patch", "run_tests"]
            assert [each["type"].split("_")[0] for each in required] == ["function", "custom", "function"]
            outputs = results(done, "one", "two", "three")
            run = bench.runs[0]
            if one_by_one:
                for count, which in enumerate(order[:2], 1):
                    peer.append(outputs[which])
                    await peer.until("response.in_progress")
                    again = await peer.until("response.done")
                    missing = [each for index, each in enumerate(required) if index not in order[:count]]
                    assert again["required_input"] == missing
                    assert again["response"]["output"] == []
                    await bench.settle()
                    placed = next((index for index in range(3) if index not in order[:count]), 3)
                    assert len(run.state.owed) == 3 - placed, "placed as far as call order allows"
                    assert bench.scheduler.statistics().sequences_running == 0, "and prefilled at once"
                peer.append(outputs[order[2]])
            else:
                peer.append(*outputs)
            completed = await peer.until("response.completed")
            assert assembled(peer.heard) == completed["response"]["output"]
            ledgers.append(run.state.ledger)
            await bench.check_nothing_is_left()
    assert ledgers[0] == ledgers[1]


# ---- echoes


def without_ids(items: list[Json]) -> list[Json]:
    echoed = []
    for item in items:
        echo = {key: value for key, value in item.items() if key not in ("id", "status")}
        if item["type"] == "message":
            echo["content"] = [{"type": "output_text", "text": item["content"][0]["text"]}]
        if item["type"] == "reasoning":
            echo["content"] = None
            echo["encrypted_content"] = None
        echoed.append(echo)
    return echoed


@pytest.mark.parametrize("skipped", [0, 1, 2])
async def test_output_that_a_client_sends_back_first_is_dropped(
    skipped: int, autojump_clock: trio.abc.Clock
) -> None:
    script = [[thought("hm"), said("Looking."), call("read_file", path="a")], [said("done")]]
    async with serving({"echo": script}) as bench:
        ledgers = []
        for echoing in (False, True):
            peer = bench.connect()
            done = await held(peer, "forced:echo")
            echoes = without_ids(done["response"]["output"])[skipped:] if echoing else []
            ledger = bench.runs[0].state.ledger
            peer.append(*echoes, result(done, "x"))
            await peer.until("response.completed")
            ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_an_item_of_the_model_that_it_did_not_say_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.append(said("I never said that."), result(done))
        error = await peer.until("error")
        assert error["error"]["param"] == "input[0]"
        peer.append(*without_ids(done["response"]["output"]), said("Nor that."), result(done))
        error = await peer.until("error")
        assert error["error"]["param"] == "input[2]", "the index is the client's, echoes counted"
        peer.append(result(done))
        await peer.until("response.completed")


# ---- appends that are refused


def wrong(done: Json, kind: str) -> list[Json]:
    good = result(done)
    match kind:
        case "an unknown call":
            return [{**good, "call_id": "call_nobody"}]
        case "good and unknown":
            return [good, {**good, "call_id": "call_nobody"}]
        case "twice in one":
            return [good, good]
        case "wrong type":
            return [{**good, "type": "custom_tool_call_output"}]
        case "a part of an output":
            return [{**good, "status": "in_progress"}]
        case "a bad field":
            return [{**good, "output": 5}]
        case "without a call id":
            return [{"type": "function_call_output", "output": "x"}]
        case "an image":
            return [{**good, "output": [{"type": "input_image", "image_url": "x"}]}]
        case "too long":
            return [{**good, "output": "word " * 3000}]
    raise AssertionError(kind)


REFUSED = {
    "an unknown call": ("invalid_value", "input[0].call_id"),
    "good and unknown": ("invalid_value", "input[1].call_id"),
    "twice in one": ("invalid_value", "input[1].call_id"),
    "wrong type": ("invalid_value", "input[0].type"),
    "a part of an output": ("unsupported_parameter", "input[0].status"),
    "a bad field": ("invalid_value", "input[0].output"),
    "without a call id": ("missing_required_parameter", "input[0].call_id"),
    "an image": ("unsupported_parameter", "input[0].output[0].type"),
    "too long": ("context_length_exceeded", "input"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
async def test_a_refused_append_changes_nothing_and_a_good_one_still_works(
    kind: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS, engine={"max_context": 2048}) as bench:
        peer = bench.connect()
        done = await held(peer)
        before = bench.runs[0].state.dump()
        peer.append(*wrong(done, kind))
        error = await peer.until("error")
        assert error["status"] == 400
        assert (error["error"]["code"], error["error"]["param"]) == REFUSED[kind]
        assert bench.runs[0].state.dump() == before
        peer.append(result(done))
        completed = await peer.until("response.completed")
        assert assembled(own(peer)) == completed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_a_result_that_was_given_already_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:parallel")
        for which in (1, 1, 0, 0):
            peer.append(result(done, which=which))
            await peer.until("response.done", "error")
        assert [event["status"] for event in peer.heard if event["type"] == "error"] == [400, 400]
        peer.append(result(done, which=2))
        await peer.until("response.completed")


async def test_nothing_can_be_appended_where_nothing_goes_on(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.append(user("hello"))
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        done = await held(peer)
        peer.append(result(done), response_id="resp_unknown")
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        peer.append(result(done), response_id=done["response"]["id"])
        await peer.until("response.completed")
        peer.append(result(done), response_id=done["response"]["id"])
        error = await peer.until("error")
        assert error["error"]["code"] == "previous_response_not_found"


async def test_a_result_while_the_run_samples_is_refused(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:calling")
        await peer.until("response.output_text.delta")
        peer.append({"type": "function_call_output", "call_id": "call_x", "output": "early"})
        error = await peer.until("error")
        assert error["error"]["param"] == "input[0].call_id"
        done = await peer.until("response.done")
        peer.append(result(done))
        await peer.until("response.completed")


# ---- retries


async def test_an_append_that_is_sent_twice_has_one_effect(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:parallel")
        peer.append(result(done, "a"), event_id="e1")
        again = await peer.until("response.done")
        ledger = list(ledger_of(bench))
        peer.append(result(done, "other"), event_id="e1")
        await peer.until("response.in_progress")
        assert (await peer.until("response.done"))["required_input"] == again["required_input"]
        assert ledger_of(bench) == ledger
        peer.append(*[answer(each) for each in again["required_input"]], event_id="e2")
        peer.append(*[answer(each) for each in again["required_input"]], event_id="e2")
        completed = await peer.until("response.completed")
        assert assembled(peer.heard) == completed["response"]["output"]


async def test_a_refused_append_does_not_use_up_its_event_id(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.append({**result(done), "call_id": "call_x"}, event_id="e")
        await peer.until("error")
        peer.append(result(done), event_id="e")
        await peer.until("response.completed")


async def test_a_retry_that_comes_when_the_run_is_over_is_told_so(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        run = bench.runs[0]
        peer.append(result(done), event_id="e")
        await peer.until("response.completed")
        peer.append(result(done), event_id="e", response_id=run.state.id)
        error = await peer.until("error")
        assert error["error"]["code"] == "previous_response_not_found"
        await bench.check_nothing_is_left()


# ---- messages


async def test_messages_ride_along_and_go_after_the_results(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        ledgers = []
        for order in (0, 1):
            peer = bench.connect()
            done = await held(peer)
            items = [result(done, "x"), user("hurry up")]
            ledger = bench.runs[0].state.ledger
            peer.append(*(items if order == 0 else items[::-1]))
            await peer.until("response.completed")
            ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_messages_wait_for_outstanding_results(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        ledgers = []
        for early in (True, False):
            peer = bench.connect()
            done = await held(peer)
            ledger = bench.runs[0].state.ledger
            length = len(ledger)
            if early:
                peer.append(user("hurry up"))
                again = await peer.until("response.done")
                assert again["required_input"] == done["required_input"]
                assert len(ledger) == length
                peer.append(result(done, "x"))
            else:
                peer.append(result(done, "x"), user("hurry up"))
            await peer.until("response.completed")
            ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_a_message_in_the_middle_of_a_leg_makes_another_leg(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        await peer.until("response.output_text.delta")
        peer.append(user("go on"))
        completed = await peer.until("response.completed")
        assert [item["content"][0]["text"].strip()[-9:] for item in completed["response"]["output"]] == [
            *("word word", "And more.")
        ]
        assert assembled(peer.heard) == completed["response"]["output"]
        assert completed["response"]["work"]["legs"] == 2
        await bench.check_nothing_is_left()


async def test_a_message_in_the_middle_of_a_leg_that_calls_goes_after_the_results(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        ledgers = []
        for early in (True, False):
            peer = bench.connect()
            peer.create("forced:calling")
            await peer.until("response.output_text.delta")
            ledger = bench.runs[0].state.ledger
            if early:
                peer.append(user("and b"))
            done = await peer.until("response.done")
            assert len(done["required_input"]) == 1
            peer.append(*[result(done, "x")], *([] if early else [user("and b")]))
            completed = await peer.until("response.completed")
            assert completed["response"]["work"]["legs"] == 2
            ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_steering_is_a_message_with_another_answer(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        await peer.until("response.output_text.delta")
        run_id = bench.runs[0].state.id
        peer.say("response.steer", previous_response_id=run_id, input="in French, please")
        accepted = await peer.until("response.steer.accepted")
        assert accepted["steer"]["previous_response_id"] == run_id
        assert accepted["steer"]["id"].startswith("steer_")
        completed = await peer.until("response.completed")
        assert completed["response"]["work"]["legs"] == 2
        assert assembled(peer.heard) == completed["response"]["output"]


@pytest.mark.parametrize(
    ("steered", "code"),
    [
        ({"input": ""}, "invalid_input"),
        ({"input": []}, "invalid_input"),
        ({"input": [{"role": "developer", "content": "x"}]}, "invalid_input"),
        ({"input": [{"type": "message", "role": "user"}]}, "invalid_input"),
        ({"input": "x", "previous_response_id": "resp_unknown"}, "response_not_found"),
    ],
)
async def test_steering_that_fails_gives_its_input_back(
    steered: Json, code: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.say("response.steer", **{"previous_response_id": done["response"]["id"], **steered})
        failed = await peer.until("response.steer.failed")
        assert failed["error"]["type"] == "invalid_request_error"
        assert failed["error"]["code"] == code
        assert failed["steer"]["input"] == steered["input"]
        assert isinstance(failed["sequence_number"], int)
        peer.append(result(done))
        await peer.until("response.completed")


async def test_injection_fails_in_its_own_shape(autojump_clock: trio.abc.Clock) -> None:
    async with serving() as bench:
        peer = bench.connect()
        peer.say("response.inject", response_id="resp_1", input=[user("x")])
        failed = await peer.until("response.inject.failed")
        assert (failed["response_id"], failed["input"]) == ("resp_1", [user("x")])
        assert failed["error"]["code"] == "response_not_found"


# ---- ends


async def test_cancel_ends_a_held_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.say("response.cancel", response_id=done["response"]["id"])
        ended = await peer.until("response.incomplete")
        assert ended["response"]["incomplete_details"] == {"reason": "cancelled"}
        assert ended["response"]["output"] == done["response"]["output"]
        await bench.check_nothing_is_left()
        peer.say("response.cancel", response_id=done["response"]["id"])
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "response_not_found")


async def test_cancel_ends_a_run_that_samples_within_a_step(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        await peer.until("response.output_text.delta")
        run = bench.runs[0]
        sampled = run.state.sampled
        peer.say("response.cancel", response_id=run.state.id)
        ended = await peer.until("response.incomplete")
        assert ended["response"]["incomplete_details"] == {"reason": "cancelled"}
        assert run.state.sampled <= sampled + 10
        assert [item["status"] for item in ended["response"]["output"]] == ["incomplete"]
        assert assembled(peer.heard) == ended["response"]["output"]
        await bench.check_nothing_is_left()


async def test_cancel_ends_a_run_that_waits_for_its_lane(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:calling")
        await peer.until("response.created")
        peer.create("forced:two")
        await peer.until("response.output_text.delta")
        first, second = bench.runs
        peer.say("response.cancel", response_id=second.state.id)
        peer.say("response.cancel", response_id=first.state.id)
        ids = []
        for _ in range(2):
            ended = await peer.until("response.incomplete")
            assert ended["response"]["incomplete_details"] == {"reason": "cancelled"}
            ids.append(ended["response"]["id"])
        assert ids == [first.state.id, second.state.id]
        assert second.state.work.tokens_sampled == 0
        await bench.check_nothing_is_left()


async def test_a_held_run_waits_its_time_and_no_longer(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, hold_timeout=600) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:parallel")
        await trio.sleep(599)
        peer.append(result(done))
        await peer.until("response.done")
        await trio.sleep(599)
        assert not peer.read_now(), "an append begins the wait anew, and a held run has no heartbeat"
        peer.append({**result(done), "call_id": "call_x"})
        await peer.until("error")
        began = trio.current_time()
        ended = await peer.until("response.incomplete")
        assert ended["response"]["incomplete_details"] == {"reason": "hold_timeout"}
        assert trio.current_time() - began == pytest.approx(1), "an append that is refused does not"
        assert ended["response"]["work"]["post_passes"] == 1
        await bench.check_nothing_is_left()
        peer.append(result(done, which=1))
        assert (await peer.until("error"))["error"]["code"] == "previous_response_not_found"


async def test_a_create_on_its_lane_supersedes_a_held_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await held(peer)
        peer.create("forced:long")
        ended = await peer.until("response.incomplete")
        assert ended["response"]["id"] == first["response"]["id"]
        assert ended["response"]["incomplete_details"] == {"reason": "superseded"}
        assert (await peer.next())["type"] == "response.created"
        completed = await peer.until("response.completed")
        assert completed["response"]["id"] != first["response"]["id"]
        await bench.check_nothing_is_left()


async def test_shutdown_ends_what_is_held_and_lets_a_leg_finish(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        holding, calling, talking, waiting = (bench.connect() for _ in range(4))
        await held(holding)
        calling.create("forced:calling")
        talking.create("forced:long")
        waiting.create("forced:long")
        for peer in (calling, talking, waiting):
            await peer.until("response.output_text.delta")
        talking.append(user("go on"))
        waiting.create("forced:two")
        await turns(5)
        await bench.service.drain()
        await bench.settle()
        assert not bench.runs
        for peer in (holding, calling, talking, waiting):
            peer.read_now()
        reasons = [
            (event["response"].get("incomplete_details") or {}).get("reason")
            for peer in (holding, calling, talking, waiting)
            for event in peer.heard
            if event["type"] in ("response.incomplete", "response.completed")
        ]
        assert reasons == ["shutdown", "shutdown", "shutdown", None, "shutdown"]
        assert calling.heard[-1]["response"]["output"][-1]["status"] == "completed", "its leg was finished"
        assert "response.done" not in [event["type"] for event in waiting.heard], "no leg begins"
        late = bench.connect()
        late.create("forced:two")
        error = await late.until("error")
        assert (error["status"], error["error"]["code"]) == (503, "server_is_overloaded")
        await bench.check_kv_is_back()


async def test_what_outlasts_the_grace_period_is_ended(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        await peer.until("response.output_text.delta")
        with bench.engine_stopped():
            with trio.move_on_after(30):
                await bench.service.drain()
            ended = await peer.until("response.incomplete")
            assert ended["response"]["incomplete_details"] == {"reason": "shutdown"}
            assert assembled(peer.heard) == ended["response"]["output"]
        await bench.check_nothing_is_left()


# ---- limits on tokens


async def test_max_output_tokens_counts_over_the_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:calling")
        used = (await peer.until("response.done"))["response"]["usage"]["output_tokens"]
        for more in (1, 0):
            peer = bench.connect()
            done = await held(peer, "forced:calling", max_output_tokens=used + more)
            peer.append(result(done))
            ended = await peer.until("response.incomplete")
            assert ended["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
            assert ended["response"]["usage"]["output_tokens"] == used + more
            assert ended["response"]["max_output_tokens"] == used + more


async def test_a_call_that_the_token_limit_cuts_is_not_owed(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two")
        used = (await peer.until("response.done"))["response"]["usage"]["output_tokens"]
        peer = bench.connect()
        peer.create("forced:two", max_output_tokens=used - 4)
        ended = await peer.until("response.incomplete")
        assert ended["response"]["output"][-1]["type"] == "function_call"
        assert ended["response"]["output"][-1]["status"] == "incomplete"
        assert assembled(peer.heard) == ended["response"]["output"]


async def test_a_context_that_fills_while_sampling_fails_the_run(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, engine={"max_context": 300}) as bench:
        peer = bench.connect()
        peer.create("forced:long")
        failed = await peer.until("response.failed")
        assert failed["response"]["error"]["code"] == "context_length_exceeded"
        assert failed["response"]["status"] == "failed"
        assert assembled(peer.heard) == failed["response"]["output"]
        await bench.check_nothing_is_left()


async def test_input_longer_than_the_context_is_refused_before_anything_starts(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS, engine={"max_context": 300}) as bench:
        peer = bench.connect()
        peer.create("forced:long", input="word " * 1000)
        error = await peer.until("error")
        assert error["status"] == 400
        assert (error["error"]["code"], error["error"]["param"]) == ("context_length_exceeded", "input")
        assert len(peer.heard) == 1
        await bench.check_nothing_is_left()
        peer.create("forced:two")
        await peer.until("response.done")


@pytest.mark.parametrize("spare", [0, 1, 2])
async def test_input_up_to_the_last_token_is_taken(spare: int, autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, engine={"max_context": 300}) as bench:
        peer = bench.connect()
        largest = 300
        while not await is_taken(bench, {"input": "word " * largest}):
            largest -= 1
        peer.create("forced:two", input="word " * (largest - spare))
        failed = await peer.until("response.failed", "response.done")
        if failed["type"] == "response.failed":
            assert failed["response"]["error"]["code"] == "context_length_exceeded"
        assert failed["response"]["output"] or spare == 0
        peer.hang_up()
        await bench.check_nothing_is_left()


async def is_taken(bench: Bench, fields: Json) -> bool:
    peer = bench.connect()
    peer.create("forced:two", **fields)
    first = await peer.next()
    peer.hang_up()
    return bool(first["type"] == "response.created")


async def test_out_of_kv_fails_one_run_and_no_other(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, engine={"kv_memory": 32 * 16 * 512}) as bench:
        keeping, greedy = bench.connect(), bench.connect()
        done = await held(keeping)
        greedy.create("forced:long", input="word " * 200)
        failed = await greedy.until("response.failed")
        assert failed["response"]["error"]["code"] == "server_is_overloaded"
        keeping.append(result(done))
        await keeping.until("response.completed")
        await bench.check_nothing_is_left()


# ---- what a create can ask for


async def test_one_call_a_leg_cuts_the_second_from_ledger_and_engine(autojump_clock: trio.abc.Clock) -> None:
    one_call = [[thought("Three at once."), call("read_file", path="a")], [said("All done.")]]
    async with serving({**SCRIPTS, "one": one_call}) as bench:
        ledgers, outputs = [], []
        for model, parallel in (("forced:parallel", False), ("forced:one", True)):
            peer = bench.connect()
            done = await held(peer, model, parallel_tool_calls=parallel)
            assert [each["name"] for each in done["required_input"]] == ["read_file"]
            assert len(done["response"]["output"]) == 2
            run = bench.runs[0]
            in_leg = len(run.state.ledger) - run.state.leg_start
            assert done["response"]["usage"]["output_tokens"] == in_leg, "what was cut is not output"
            ledger = run.state.ledger
            peer.append(result(done, "x"))
            completed = await peer.until("response.completed")
            assert assembled(peer.heard) == completed["response"]["output"]
            assert completed["response"]["usage"]["output_tokens"] == run.state.sampled
            ledgers.append(ledger.tokens)
            outputs.append([item["type"] for item in completed["response"]["output"]])
            await bench.check_nothing_is_left()
        assert outputs == [["reasoning", "function_call", "message"]] * 2
        # The stop token of the uncut leg was sampled, that of the cut one was rendered: the same tokens.
        assert ledgers[0] == ledgers[1]


async def test_without_tools_to_choose_a_call_is_text(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", tool_choice="none")
        completed = await peer.until("response.completed")
        assert [item["type"] for item in completed["response"]["output"]] == ["message"]
        assert "read_file" in completed["response"]["output"][0]["content"][0]["text"]
        assert completed["response"]["work"]["malformed_calls"] == 1


async def test_a_call_to_a_tool_that_there_is_not_is_text(autojump_clock: trio.abc.Clock) -> None:
    async with serving({"none": [[call("delete_all", path="/"), call("read_file", path="a")]]}) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:none")
        assert [item["type"] for item in done["response"]["output"]] == ["message", "function_call"]
        assert done["response"]["work"]["malformed_calls"] == 1


async def test_warming_up_ends_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", generate=False, input=[])
        completed = await peer.until("response.completed")
        assert types(peer.heard) == ["created", "in_progress", "completed"]
        assert (completed["response"]["output"], completed["response"]["status"]) == ([], "completed")
        assert completed["response"]["usage"]["output_tokens"] == 0
        await bench.check_nothing_is_left()


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": None}, 400, "missing_required_parameter", "model"),
        ({"lifecycle": "borrowed"}, 400, "invalid_value", "lifecycle"),
        ({"previous_response_id": "resp_x"}, 400, "previous_response_not_found", "previous_response_id"),
        ({"background": True}, 400, "unsupported_parameter", "background"),
        ({"conversation": "c"}, 400, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, 400, "unsupported_parameter", "truncation"),
        ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
        ({"top_logprobs": 3}, 400, "unsupported_parameter", "top_logprobs"),
        ({"text": {"format": {"type": "json_object"}}}, 400, "unsupported_parameter", "text.format"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"input": [{"role": "user"}]}, 400, "missing_required_parameter", "input[0].content"),
        ({"tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, 400, "invalid_value", "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, 400, "invalid_value", "tools[0].name"),
    ],
)
async def test_a_create_that_cannot_be_done_is_one_error_and_the_connection_goes_on(
    fields: Json, status: int, code: str, param: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.create(**{"model": "forced:two", "stream_id": "other", **fields})
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"], error["error"]["param"]) == (status, code, param)
        assert error["stream_id"] == "other"
        peer.append(result(done))
        await peer.until("response.completed")
        await bench.check_nothing_is_left()


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "previous_response_id": None, "stream": True, "store": False},
        {"tools": None, "instructions": None, "tool_choice": "auto", "parallel_tool_calls": True},
        {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "truncation": "disabled"},
        {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "metadata": None},
        {"tools": [*TOOLS, {"type": "web_search"}, {"type": "tool_search", "execution": "client"}]},
        {"input": [user("a"), {"type": "item_reference", "id": "x"}, {"role": "user", "content": "b"}]},
    ],
)
async def test_what_real_clients_send_along_is_taken(fields: Json, autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long", **fields)
        await peer.until("response.completed")


async def test_what_has_no_meaning_here_is_listed(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(
            peer,
            tools=[*TOOLS, {"type": "web_search"}],
            input=[{"type": "item_reference", "id": "x"}, user("hello")],
            client_metadata={},
        )
        assert done["response"]["work"]["ignored"] == [
            *("input[0]: item of type item_reference", "tools[3]: tool of type web_search"),
            "client_metadata",
        ]
        peer.append({"type": "local_shell_call"}, result(done))
        completed = await peer.until("response.completed")
        assert completed["response"]["work"]["ignored"][3:] == ["input[0]: item of type local_shell_call"]


# ---- heartbeats


async def test_heartbeats_while_a_leg_gives_nothing_to_show(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS, heartbeat=15) as bench:
        with bench.engine_stopped():
            peer = bench.connect()
            peer.create("forced:two")
            await trio.sleep(50)
            peer.read_now()
            assert types(peer.heard) == ["created", *["in_progress"] * 4]
        done = await peer.until("response.done")
        await trio.sleep(50)
        assert not peer.read_now()
        with bench.engine_stopped():
            peer.append(result(done))
            await trio.sleep(50)
            assert types(peer.read_now()) == ["in_progress"] * 4
        completed = await peer.until("response.completed")
        assert assembled(peer.heard) == completed["response"]["output"]


# ---- the engine is lost


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 25, 40])
@pytest.mark.parametrize("model", ["forced:calling", "random"])
async def test_an_engine_that_dies_changes_nothing_that_is_said(
    model: str, steps: int, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS, engine={"prefill_chunk": 16}) as bench:
        said_by = []
        for crashing in (False, True):
            peer = bench.connect()
            peer.create(model, max_output_tokens=160, seed=7, temperature=0.8, input="hello")
            if crashing:
                await turns(steps)
                bench.engine.crash()
            ended = await peer.until("response.done", "response.incomplete", "response.completed")
            if ended["type"] == "response.done":
                if crashing:
                    bench.engine.crash()
                peer.append(result(ended))
                if crashing:
                    await turns(steps)
                    bench.engine.crash()
                ended = await peer.until("response.completed", "response.incomplete")
            output = assembled(peer.heard)
            assert output == ended["response"]["output"]
            said_by.append([{**item, "id": "", "call_id": ""} for item in output])
            await bench.check_nothing_is_left()
        assert said_by[0] == said_by[1]


async def test_an_engine_that_dies_around_a_cut_is_not_asked_to_go_on(
    autojump_clock: trio.abc.Clock,
) -> None:
    endless = [[call("read_file", path="a"), said("word " * 100)], [said("done")]]
    async with serving({"endless": endless}) as bench:
        for count in range(30, 60):
            peer = bench.connect()
            peer.create("forced:endless", parallel_tool_calls=False)
            await turns(count)
            run = bench.runs[0]
            bench.engine.crash()
            done = await peer.until("response.done")
            assert done["response"]["work"]["tokens_sampled"] < 100
            peer.append(result(done))
            completed = await peer.until("response.completed")
            assert [item["type"] for item in completed["response"]["output"]] == ["function_call", "message"]
            assert run.state.sampled == completed["response"]["usage"]["output_tokens"]
            await bench.check_nothing_is_left()


async def test_an_engine_that_is_gone_for_good_fails_the_runs_that_need_it(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        holding, sampling = bench.connect(), bench.connect()
        done = await held(holding)
        sampling.create("forced:long")
        await sampling.until("response.output_text.delta")
        bench.lose_engine_for_good()
        failed = await sampling.until("response.failed")
        assert failed["response"]["error"]["code"] == "server_is_overloaded"
        assert assembled(sampling.heard) == failed["response"]["output"]
        holding.append(result(done))
        failed = await holding.until("response.failed")
        assert failed["response"]["error"]["code"] == "server_is_overloaded"
        await bench.settle()
        assert not bench.runs


# ---- held and fresh


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 9}]
)
async def test_a_paused_run_samples_what_a_fresh_prefill_of_its_ledger_does(
    sampling: Json, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS, engine={"prefix_cache": False}) as bench:
        peer = bench.connect()
        peer.create("calling", max_output_tokens=200, input="hello", **sampling)
        pauses = 0
        run = None
        while (event := await peer.until("response.done", *ENDS))["type"] == "response.done":
            pauses += 1
            run = bench.runs[0]
            peer.append(*results(event), *[user("go on")] * (pauses % 3))
        assert pauses
        assert run is not None
        await bench.check_nothing_is_left()
        model = bench.model("calling")
        fresh = Scheduler(bench.config)
        begin = 0
        for number, span in enumerate(run.state.ledger.spans):
            tokens = run.state.ledger.tokens
            if span.sampled:
                count = span.end - begin
                again = sampled_afresh(
                    fresh, number, tokens[:begin], model.sampling(run.state.request), count
                )
                assert again == tokens[begin : span.end]
            begin = span.end


def sampled_afresh(
    scheduler: Scheduler, number: int, prompt: list[int], sampling: Sampling, count: int
) -> list[int]:
    """So many tokens after this prompt, which is prefilled for them alone."""
    scheduler.submit(
        [Open(number), Extend(number, prompt), Sample(number, sampling=sampling, max_tokens=count)]
    )
    tokens = []
    while scheduler.has_work:
        for event in scheduler.step().events:
            tokens += event.tokens if isinstance(event, Sampled) else []
    return tokens


# ---- bugs of ours


class BrokenParser:
    """Breaks at the fifth token."""

    def __init__(self) -> None:
        self._count = 0

    def feed(self, tokens: Sequence[int]) -> list[Any]:
        self._count += len(tokens)
        if self._count == 5:
            raise RuntimeError("a bug in a parser")
        return [TextDelta("x")]

    def finish(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("method", "broken"), [("parser", lambda tools: BrokenParser()), ("items", lambda items: 1 / 0)]
)
async def test_a_bug_ends_one_run_with_a_plain_error(
    method: str, broken: Any, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(SCRIPTS) as bench:
        keeping, unlucky = bench.connect(), bench.connect()
        done = await held(keeping)
        with monkeypatch.context() as patched:
            patched.setattr(bench.model("calling").dialect, method, broken, raising=False)
            unlucky.create("calling")
            event = await unlucky.until("response.failed", "error")
        error = event["error"] if event["type"] == "error" else event["response"]["error"]
        assert error["code"] == "server_error"
        assert "bug" not in error["message"]
        assert "zero" not in error["message"]
        keeping.append(result(done))
        await keeping.until("response.completed")
        unlucky.create("forced:long")
        await unlucky.until("response.completed")
        await bench.check_nothing_is_left()


# ---- texts so long that a thread tokenises them


async def test_long_texts_are_tokenised_beside_everything_else(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(SCRIPTS) as bench:
        ledgers = []
        for longest in (TOKENISE_IN_THREAD, 1):
            monkeypatch.setattr(protocol.intake, "TOKENISE_IN_THREAD", longest)
            with clock_stands_still():
                peer = bench.connect()
                done = await held(peer, "forced:parallel")
                ledger = bench.runs[0].state.ledger
                peer.append(*results(done), user("go on"))
                completed = await peer.until("response.completed")
                assert assembled(peer.heard) == completed["response"]["output"]
                ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_a_run_that_ends_while_its_result_is_tokenised_refuses_it(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        with clock_stands_still():
            peer = bench.connect()
            done = await held(peer)
            run = bench.runs[0]
            ledger = list(run.state.ledger.tokens)
            peer.append(result(done, "word " * 20000))
            while not run._appending.locked():
                await trio.lowlevel.checkpoint()
            run.interrupt("cancelled")
            await peer.until("response.incomplete")
            error = await peer.until("error")
            assert error["error"]["code"] == "previous_response_not_found"
            assert run.state.ledger.tokens == ledger
        await bench.check_nothing_is_left()


# ---- the other lifecycle


async def test_a_chained_response_ends_with_its_calls_and_takes_no_append(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS, lifecycle="held") as bench:
        peer = bench.connect()
        peer.create("forced:two", lifecycle="chained")
        completed = await peer.until("response.completed")
        assert [item["type"] for item in completed["response"]["output"]] == ["message", "function_call"]
        assert completed["response"]["lifecycle"] == "chained"
        peer.create("forced:long", lifecycle="chained")
        await peer.until("response.output_text.delta")
        peer.append(user("go on"))
        assert (await peer.until("error"))["error"]["code"] == "previous_response_not_found"
        await peer.until("response.completed")
        peer.create("forced:two", lifecycle=None)
        await peer.until("response.done")


async def test_results_that_do_not_fit_in_kv_fail_the_run_that_they_are_for(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS, engine={"kv_memory": 20 * 16 * 512}) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:parallel")
        peer.append(result(done, "word " * 400))
        await peer.until("response.done")
        await bench.settle()
        peer.append(*results(done)[1:])
        failed = await peer.until("response.failed")
        assert failed["response"]["error"]["code"] == "server_is_overloaded"
        assert assembled(peer.heard) == failed["response"]["output"]
        await bench.check_nothing_is_left()
