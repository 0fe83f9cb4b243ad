"""The held run, from the client's side: its legs, what they cost, parallel results, heartbeats."""

from __future__ import annotations

from itertools import permutations

import pytest
import trio

from protocol import wire
from tests.harness import (
    TOOLS,
    Bench,
    assembled,
    result,
    results,
    serving,
    user,
)
from tests.run_scripts import SCRIPTS, held, types


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
