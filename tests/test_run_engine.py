"""A run and its engine: lost and found again, held and fresh, and bugs of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from engine.messages import Extend, Open, Sample, Sampled, Sampling
from engine.scheduler import Scheduler
from protocol.dialects.base import TextDelta
from tests.harness import (
    Json,
    assembled,
    call,
    result,
    results,
    said,
    serving,
    turns,
    user,
)
from tests.run_scripts import ENDS, SCRIPTS, held

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
            patched.setattr(bench.model("forced:long").dialect, method, broken, raising=False)
            unlucky.create("forced:long")
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
