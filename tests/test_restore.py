"""A run that is written down, stopped anywhere and finished by another `Run` says what an undisturbed one
says.

Strategy: the same request is played by a client whose answers depend on nothing but the state, and stopped at
one moment after the other. All that a restart carries over is the dump.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, TypeAlias

import pytest
import trio

from protocol import wire
from protocol.edge.access import LOCAL
from protocol.response import Run
from protocol.state import MOVES, Phase, RunState
from protocol.work import Work
from tests.harness import TOOLS, Bench, Json, assembled, call, custom_call, said, serving, thought, turns

PLAY = [
    [
        thought("Three at once."),
        said("Let me look."),
        call("read_file", path="a"),
        custom_call("apply_patch", "*** End"),
        call("run_tests"),
    ],
    [call("read_file", path="b")],
    [thought("Now I know."), said("All done.")],
]
REQUESTS: dict[str, Json] = {
    "forced": {"model": "forced:play"},
    "forced, one call a leg": {"model": "forced:play", "parallel_tool_calls": False},
    "random": {"model": "calling", "seed": 3, "temperature": 0.8, "max_output_tokens": 60},
    "random, one call a leg": {
        **{"model": "calling", "seed": 4, "temperature": 1.0, "max_output_tokens": 60},
        "parallel_tool_calls": False,
    },
    "cut by the token limit": {"model": "forced:play", "max_output_tokens": 70},
}

Stop: TypeAlias = Callable[[], None]


@dataclass
class Story:
    """What a client has read of one run, over all its restarts, and the state at the end."""

    frames: list[Json] = field(default_factory=list)
    restarts: int = 0
    changes: int = 0
    turns: int = 0
    state: RunState | None = None

    def told(self) -> list[Json]:
        """The events without what may differ: neighbouring deltas as one, no numbers, work or times."""
        told: list[Json] = []
        for frame in self.frames:
            event = {key: value for key, value in frame.items() if key != "sequence_number"}
            if "response" in event:
                event["response"] = {
                    key: value
                    for key, value in event["response"].items()
                    if key in ("id", "status", "output")
                }
            if told and "delta" in event and told[-1] == {**event, "delta": told[-1].get("delta")}:
                told[-1]["delta"] += event["delta"]
            else:
                told.append(event)
        return told


async def play(
    bench: Bench,
    request: bytes,
    *,
    at_change: int | None = None,
    at_turn: int | None = None,
    every: int | None = None,
) -> Story:
    """Make the run that `request` (a dumped state) begins. It is stopped and restored when its phase has
    changed `at_change` times, after `at_turn` turns of the event loop, or after each `every` turns.
    """
    story = Story()
    dump = request
    for life in count():
        state = RunState.load(dump)
        assert state.dump() == dump
        run = Run(
            state,
            model=bench.model(state.request.model or ""),
            engine=bench.engine,
            hold_timeout=600,
        )
        cursor = run.log.cursor(after=state.next_number - 1)

        def write_down(run: Run = run, cursor: Any = cursor) -> bytes:
            while (frame := cursor.take()) is not None:
                story.frames.append(json.loads(frame))
            return run.state.dump()

        written: list[bytes] = []
        with trio.CancelScope() as scope:

            def changed(
                write_down: Callable[[], bytes] = write_down,
                written: list[bytes] = written,
                scope: trio.CancelScope = scope,
            ) -> None:
                story.changes += 1
                if story.changes == at_change:
                    written.append(write_down())
                    scope.cancel()

            run.on_change = changed
            if not (at_change == 0 and life == 0):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run.run)
                    nursery.start_soon(answer_all, run)
                    if every is not None or (at_turn is not None and life == 0):
                        await turns(at_turn if every is None else every)  # type: ignore[arg-type]
                        scope.cancel()
        run._conversation.release()
        dump = written[0] if written else write_down()
        if run.state.phase is Phase.ENDED and not written:
            story.state = run.state
            story.restarts = life
            return story
        assert life < 500, "it comes to no end"
    raise AssertionError


async def answer_all(run: Run) -> None:
    """The client: whenever the run is held, gives the last result that is missing; with the last one of all,
    a message.
    """
    while run.state.phase is not Phase.ENDED:
        if run.state.phase is Phase.HELD and run.state.required:
            required = run.state.required[-1]
            text = f"result of {required.call_id}"
            kind = (
                wire.FunctionCallOutput
                if required.type == "function_call_output"
                else wire.CustomToolCallOutput
            )
            items: list[wire.Item] = [kind(required.call_id, text)]
            if len(run.state.required) == 1:
                items.append(wire.Message("user", "go on"))
            await run.append(items, work=Work(), received=monotonic())
        await trio.lowlevel.checkpoint()


def begin(bench: Bench, name: str) -> bytes:
    """The state of a run that was created and not started."""
    fields = {"type": "response.create", "lifecycle": "held", "input": "hello", "tools": TOOLS}
    frame = json.dumps({**fields, **REQUESTS[name]})
    event = wire.decode_client_event(wire.decode_head(frame), frame)
    assert isinstance(event, wire.Create)
    run, _ = bench.service.create(event, frame=frame, caller=LOCAL)
    bench.service.forget(run)
    run.state.id = "resp_" + "0" * 32  # its calls are called after it, and their results after them
    return run.state.dump()


def check_same(whole: Story, broken: Story) -> None:
    assert [frame["sequence_number"] for frame in broken.frames] == list(range(len(broken.frames)))
    assert assembled(broken.frames) == assembled(whole.frames)
    assert broken.told() == whole.told()
    assert whole.state is not None
    assert broken.state is not None
    assert broken.state.ledger == whole.state.ledger
    usage, usage_of_whole = (story.frames[-1]["response"]["usage"] for story in (broken, whole))
    assert {**usage, "input_tokens_details": None} == {**usage_of_whole, "input_tokens_details": None}
    for name in ("pre_passes", "post_passes", "legs", "characters_rendered", "malformed_calls"):
        assert getattr(broken.state.work, name) == getattr(whole.state.work, name), name


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_a_run_restored_at_any_change_of_phase(name: str, autojump_clock: trio.abc.Clock) -> None:
    async with serving({"play": PLAY}) as bench:
        request = begin(bench, name)
        whole = await play(bench, request)
        assert whole.changes >= 3
        for change in range(whole.changes):
            broken = await play(bench, request, at_change=change)
            assert broken.restarts == 1
            check_same(whole, broken)
        await bench.check_kv_is_back()


@pytest.mark.parametrize("name", list(REQUESTS))
async def test_a_run_restored_in_the_middle_of_anything(name: str, autojump_clock: trio.abc.Clock) -> None:
    async with serving({"play": PLAY}, engine={"prefill_chunk": 32}) as bench:
        request = begin(bench, name)
        whole = await play(bench, request)
        for turn in range(1, 400, 7):
            broken = await play(bench, request, at_turn=turn)
            check_same(whole, broken)
            if not broken.restarts:
                break
        else:
            raise AssertionError("the run is longer than this")
        await bench.check_kv_is_back()


@pytest.mark.parametrize("every", [7, 12])
@pytest.mark.parametrize("name", list(REQUESTS))
async def test_a_run_restored_again_and_again(name: str, every: int, autojump_clock: trio.abc.Clock) -> None:
    async with serving({"play": PLAY}) as bench:
        request = begin(bench, name)
        whole = await play(bench, request)
        broken = await play(bench, request, every=every)
        assert broken.restarts
        check_same(whole, broken)
        await bench.check_kv_is_back()


async def test_a_run_whose_last_result_was_just_accepted_goes_on(autojump_clock: trio.abc.Clock) -> None:
    async with serving({"play": PLAY}) as bench:
        whole = await play(bench, begin(bench, "forced"))
        assert whole.state is not None
        peer = bench.connect()
        peer.create("forced:play", input="hello")
        done = await peer.until("response.done")
        run = bench.runs[0]
        items: list[wire.Item] = [
            wire.FunctionCallOutput(each["call_id"], "x")
            if each["type"].startswith("function")
            else wire.CustomToolCallOutput(each["call_id"], "x")
            for each in done["required_input"]
        ]
        dumps: list[bytes] = []
        await run.append(
            items, work=Work(), received=monotonic(), acknowledge=lambda: dumps.append(run.state.dump())
        )
        state = RunState.load(dumps[0])
        assert (state.phase, state.owed, state.arrived) == (Phase.HELD, [], {})
        restored = Run(state, model=bench.model("forced:play"), engine=bench.engine, hold_timeout=600)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restored.run)
            nursery.start_soon(answer_all, restored)
        assert restored.state.ending is not None
        assert restored.state.ending.status == "completed"
        assert restored.state.work.legs == 3
        peer.hang_up()
        await bench.check_nothing_is_left()


def test_every_phase_but_the_last_leads_somewhere_and_to_the_end() -> None:
    assert set(MOVES) == set(Phase)
    assert [phase for phase in Phase if not MOVES[phase]] == [Phase.ENDED]
    for phase in set(Phase) - {Phase.FINISHING, Phase.ENDED}:
        assert Phase.FINISHING in MOVES[phase]
