"""Chained Responses: what a connection remembers, who may continue it, and what a chain costs."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.past import EARLIER_RESPONSES
from tests.harness import RANDOM_MODEL, Json, Peer, call, said, serving, thought, user

TOOLS: list[Json] = [{"type": "function", "name": "read_file", "parameters": {"type": "object"}}]
CHAIN = [[said("first"), call("read_file", path="a")], [said("second")], [said("third")], [said("fourth")]]
SCRIPTS = {"chain": CHAIN, "thinks": [[thought("hm"), said("first")], [said("second")]]}


async def turn(peer: Peer, model: str = "forced:chain", **fields: Any) -> Json:
    """One chained Response, from its create to its terminal event."""
    fields = {"tools": TOOLS, "lifecycle": "chained", **fields}
    peer.create(model, **fields)
    event = await peer.until("response.completed", "response.incomplete", "response.failed", "error")
    response: Json = event.get("response", event)
    return response


def output_of(response: Json, output: str = "1") -> Json:
    """The result of the first call of a Response."""
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": output}


def text(response: Json) -> str:
    """All that the messages of a Response say."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


async def test_a_chain_is_one_conversation_and_prefills_only_what_is_new(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        second = await turn(peer, input=[output_of(first)], previous_response_id=first["id"])
        third = await turn(peer, input="and?", previous_response_id=second["id"])
        assert [text(each) for each in (first, second, third)] == ["first", "second", "third"]
        assert second["previous_response_id"] == first["id"]
        for before, after in ((first, second), (second, third)):
            context = before["usage"]["input_tokens"] + before["usage"]["output_tokens"]
            # All but the token that was sampled last is in KV.
            assert after["usage"]["input_tokens_details"]["cached_tokens"] == context - 1
            new = after["usage"]["input_tokens"] - context
            assert after["work"]["tokens_prefilled"] == new + 1
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_chain_of_the_random_model_is_repeatable(autojump_clock: Any) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "max_output_tokens": 12, "tools": []}
    async with serving({}) as bench:
        peer = bench.connect()
        first = await turn(peer, RANDOM_MODEL, input="a", **sampling)
        again = await turn(peer, RANDOM_MODEL, input="a", **sampling)
        assert text(first) == text(again)
        second = await turn(peer, RANDOM_MODEL, input="b", previous_response_id=first["id"], **sampling)
        context = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        assert second["usage"]["input_tokens"] > context
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_instructions_and_tools_are_not_inherited(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, "forced:thinks", input="look", instructions="Be brief.")
        same = await turn(
            peer, "forced:thinks", input="x", instructions="Be brief.", previous_response_id=first["id"]
        )
        other = await turn(peer, "forced:thinks", input="x", previous_response_id=first["id"])
        assert text(same) == text(other) == "second"
        # Without the instructions the whole history is rendered again behind another opening.
        assert other["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert other["work"]["characters_rendered"] > same["work"]["characters_rendered"]
        assert other["instructions"] is None
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_warm_up_prefills_and_can_be_continued(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        warm = await turn(peer, "forced:thinks", input=[], instructions="Be brief. " * 20, generate=False)
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert warm["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert warm["work"]["tokens_prefilled"] == warm["usage"]["input_tokens"] - 1
        first = await turn(
            peer,
            "forced:thinks",
            input="go",
            instructions="Be brief. " * 20,
            previous_response_id=warm["id"],
        )
        assert text(first) == "first"
        assert first["usage"]["input_tokens_details"]["cached_tokens"] > 20
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_fork_on_another_lane_leaves_its_parent_alone(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look", stream_id="main")
        fork = await turn(
            peer, input=[output_of(first, "2")], previous_response_id=first["id"], stream_id="side"
        )
        on = await turn(
            peer, input=[output_of(first, "1")], previous_response_id=first["id"], stream_id="main"
        )
        assert text(fork) == text(on) == "second"
        context = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
        for each in (fork, on):
            assert each["usage"]["input_tokens_details"]["cached_tokens"] == context - 1
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_fork_that_waits_is_pinned_while_its_parent_lane_goes_on(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look", stream_id="main")
        fields = {"tools": TOOLS, "lifecycle": "chained", "previous_response_id": first["id"]}
        peer.create("forced:chain", input=[output_of(first)], stream_id="main", **fields)
        peer.create("forced:chain", input=[output_of(first)], stream_id="side", **fields)
        ends = [await peer.until("response.completed"), await peer.until("response.completed")]
        assert {end["stream_id"] for end in ends} == {"main", "side"}
        assert {text(end["response"]) for end in ends} == {"second"}
        peer.hang_up()
        await bench.check_nothing_is_left()


@pytest.mark.parametrize("previous", ["resp_unknown", ""])
async def test_an_unknown_parent_is_an_error_and_nothing_else(autojump_clock: Any, previous: str) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        error = await turn(peer, input="x", previous_response_id=previous)
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert error["error"]["param"] == "previous_response_id"
        second = await turn(peer, input=[output_of(first)], previous_response_id=first["id"])
        assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_another_connection_and_another_key_do_not_know_the_response(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look", store=False)
        other = bench.connect()
        error = await turn(other, input=[output_of(first)], previous_response_id=first["id"])
        assert error["error"]["code"] == "previous_response_not_found"
        for each in (peer, other):
            each.hang_up()
        await bench.check_nothing_is_left()


async def test_a_result_needs_its_call_in_the_chain(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look", stream_id="main")
        stray = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
        error = await turn(peer, input=[stray], previous_response_id=first["id"], stream_id="side")
        assert (error["status"], error["error"]["param"]) == (400, "input[0].call_id")
        assert "No tool call found for function call output with call_id call_x" in error["error"]["message"]
        # The lane that made the parent still has it: the failed continuation was another lane's.
        second = await turn(
            peer, input=[output_of(first)], previous_response_id=first["id"], stream_id="main"
        )
        assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_failed_continuation_evicts_its_parent_on_the_same_lane(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look", store=False)
        stray = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
        assert (await turn(peer, input=[stray], previous_response_id=first["id"]))["status"] == 400
        error = await turn(peer, input=[output_of(first)], previous_response_id=first["id"])
        assert error["error"]["code"] == "previous_response_not_found"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_the_latest_response_of_a_lane_never_goes_missing(autojump_clock: Any) -> None:
    async with serving(SCRIPTS, max_held=2) as bench:
        peer = bench.connect()
        quiet = await turn(peer, input="look", stream_id="quiet")
        for _ in range(EARLIER_RESPONSES + 4):
            await turn(peer, input="x", stream_id="busy")
        second = await turn(
            peer, input=[output_of(quiet)], previous_response_id=quiet["id"], stream_id="quiet"
        )
        assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_the_shelf_bounds_how_many_conversations_keep_their_kv(autojump_clock: Any) -> None:
    async with serving(SCRIPTS, max_held=2) as bench:
        peer = bench.connect()
        firsts = [await turn(peer, input="look", stream_id=f"lane{index}") for index in range(4)]
        await bench.settle()
        assert bench.engine.statistics().sequences_open == 2
        for index, first in enumerate(firsts):
            second = await turn(
                peer,
                input=[output_of(first)],
                previous_response_id=first["id"],
                stream_id=f"lane{index}",
            )
            assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_response_that_was_cut_can_be_continued(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        cut = await turn(peer, "forced:thinks", input="look", max_output_tokens=3)
        assert cut["incomplete_details"]["reason"] == "max_output_tokens"
        second = await turn(peer, "forced:thinks", input="on", previous_response_id=cut["id"])
        assert second["status"] == "completed"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_held_run_may_continue_a_chained_response_and_the_other_way_round(
    autojump_clock: Any,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        held = await turn(peer, input=[output_of(first)], previous_response_id=first["id"], lifecycle="held")
        third = await turn(peer, input=[user("and?")], previous_response_id=held["id"])
        assert [text(held), text(third)] == ["second", "third"]
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_chain_survives_the_engine(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        bench.engine.crash()
        await bench.engine.wait_ready()
        second = await turn(peer, input=[output_of(first)], previous_response_id=first["id"])
        assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()


# ---- appending to what has ended


async def appended(peer: Peer, *items: Json, **fields: Any) -> Json:
    """What an append to an ended Response of a lane comes to."""
    peer.append(*items, **fields)
    event = await peer.until("response.completed", "response.failed", "error")
    response: Json = event.get("response", event)
    return response


@pytest.mark.parametrize("echoes", [False, True])
async def test_an_append_to_what_has_ended_continues_its_lane(autojump_clock: Any, echoes: bool) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        settings = {"instructions": "Be brief.", "stream_id": "a", "metadata": {"a": "b"}}
        first = await turn(peer, input="look", **settings)
        before = first["output"] if echoes else []
        second = await appended(peer, *before, output_of(first), stream_id="a")
        third = await appended(peer, user("and?"), stream_id="a")
        assert [text(each) for each in (first, second, third)] == ["first", "second", "third"]
        assert [each["previous_response_id"] for each in (second, third)] == [first["id"], second["id"]]
        for each in (second, third):
            for setting in ("instructions", "metadata", "tools", "lifecycle"):
                assert each[setting] == first[setting]
        result = second["usage"]["input_tokens"] - first["usage"]["total_tokens"]
        assert second["work"]["tokens_prefilled"] == result + 1
        assert second["work"]["items_validated"] == len(before) + 1
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_an_append_finds_no_response_that_failed_or_goes_on(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        stray = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
        failed = await appended(peer, {"type": "unknown"}, *first["output"], user("x"), stray)
        assert failed["error"]["param"] == f"input[{len(first['output']) + 2}].call_id"
        for _ in range(2):
            error = await appended(peer, user("x"))
            assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        with bench.engine_stopped():
            peer.create("forced:chain", tools=TOOLS, lifecycle="chained")
            error = await appended(peer, user("x"))
            assert error["error"]["code"] == "previous_response_not_found"
        await peer.until("response.completed")
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_a_warm_up_can_be_appended_to(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        await turn(peer, "forced:thinks", input=[], instructions="Be brief.", generate=False)
        assert text(await appended(peer, user("go"))) == "first"
        peer.hang_up()
        await bench.check_nothing_is_left()


async def test_an_append_with_an_id_is_for_held_runs_only(autojump_clock: Any) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        error = await appended(peer, output_of(first), response_id=first["id"])
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert text(await appended(peer, output_of(first))) == "second"


# ---- runs that are stopped before they begin


async def test_a_response_that_is_cancelled_while_it_waits_leaves_the_chain_as_it_was(
    autojump_clock: Any,
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        first = await turn(peer, input="look")
        fields = {"tools": TOOLS, "lifecycle": "chained", "previous_response_id": first["id"]}
        with bench.engine_stopped():
            peer.create("forced:thinks", tools=TOOLS, lifecycle="chained", stream_id="b")
            peer.create("forced:chain", input=[output_of(first)], stream_id="b", **fields)
            await bench.settle()
            waiting = bench.runs[1].state.id
            peer.say("response.cancel", response_id=waiting)
            await bench.settle()
            assert waiting not in [run.state.id for run in bench.runs]
        await peer.until("response.completed")
        cut = await peer.until("response.incomplete")
        assert cut["response"]["id"] == waiting
        assert cut["response"]["incomplete_details"] == {"reason": "cancelled"}
        error = await turn(peer, input="x", previous_response_id=waiting)
        assert error["error"]["code"] == "previous_response_not_found"
        second = await turn(peer, input=[output_of(first)], previous_response_id=first["id"])
        assert text(second) == "second"
        peer.hang_up()
        await bench.check_nothing_is_left()
