"""Every way in which a run can end, each with its reason, and limits on tokens."""

from __future__ import annotations

import pytest
import trio

from tests.harness import (
    Bench,
    Json,
    assembled,
    result,
    serving,
    turns,
    user,
)
from tests.run_scripts import SCRIPTS, held

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
