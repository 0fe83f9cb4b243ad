"""What a client may append to a held run, what is refused, and what a retry does."""

from __future__ import annotations

import pytest
import trio

from tests.harness import (
    Bench,
    Json,
    answer,
    assembled,
    call,
    result,
    said,
    serving,
    thought,
    user,
)
from tests.run_scripts import SCRIPTS, held, own


def ledger_of(bench: Bench) -> list[int]:
    return bench.runs[0].state.ledger.tokens


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
