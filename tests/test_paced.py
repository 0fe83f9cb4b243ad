"""The paced engine: exactly the rates that it was told, and all else as the real one.

Times are exact: the clock is the test's and moves only to what is due, or late on purpose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from engine.handle import InlineEngine, ProcessEngine
from engine.messages import (
    Began,
    Command,
    EngineConfig,
    Event,
    Extend,
    Failed,
    Fork,
    Open,
    Pace,
    Pause,
    Prefilled,
    Release,
    Sample,
    Sampled,
    Sampling,
    Stopped,
    Truncate,
)
from engine.outline import ConfigFile, ModelError, Outline, read_outline
from engine.paced import PacedScheduler
from engine.scheduler import Scheduler
from protocol.service import Service, engine_config, make_engine
from protocol.settings import EMBEDDED_MODEL, Settings, SettingsError

GREEDY = Sampling()
KV_TOKEN_BYTES = 2 * 4 * 2 * 32 * 4  # keys and values, layers, key heads, head size, float32 of embedded/
RANDOM_KV_TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # the same of a random model
DEADLINE = 60.0  # seconds


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def configuration(
    decode: float = 1000.0, prefill: float = 20000.0, step: float = 0.0, blocks: int = 256, **changes: Any
) -> EngineConfig:
    changes = {"block_size": 4, **changes}
    return EngineConfig(
        model=str(EMBEDDED_MODEL),
        pace=Pace(decode=decode, prefill=prefill, step=step),
        kv_memory=blocks * changes["block_size"] * KV_TOKEN_BYTES,
        **changes,
    )


class Bench:
    """A paced scheduler and its clock."""

    def __init__(self, **changes: Any) -> None:
        self.clock = Clock()
        self.engine = PacedScheduler(configuration(**changes), clock=self.clock)

    def events_at(self, *commands: Command, until: float = float("inf")) -> Iterator[tuple[float, Event]]:
        """Submit, then wait and step as a worker does, up to a time; events with the times of their steps."""
        self.engine.submit(commands)
        while self.engine.has_work:
            due = self.clock.now + self.engine.seconds_until_due
            if due > until:
                break
            self.clock.now = due
            for event in self.engine.step().events:
                yield self.clock.now, event
            self.engine.check_integrity()
        if until < float("inf"):
            self.clock.now = until

    def run(self, *commands: Command, until: float = float("inf")) -> list[Event]:
        return [event for _, event in self.events_at(*commands, until=until)]


def leg(sequence: int, prompt: list[int], forced: list[int] | None, max_tokens: int = 10**6) -> list[Command]:
    return [Open(sequence), Extend(sequence, prompt), Sample(sequence, GREEDY, max_tokens, (), forced)]


def tokens_of(events: list[Event], sequence: int) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, Sampled) and event.sequence == sequence
        for token in event.tokens
    ]


def only(events: list[Event], kind: type[Any]) -> Any:
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, found
    return found[0]


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


# Rates


@pytest.mark.parametrize("rate", [65.0, 1000.0, 4000.0])
def test_every_token_of_a_leg_comes_when_it_is_due(rate: float) -> None:
    bench = Bench(decode=rate, prefill=20000)
    forced = [token % 1000 for token in range(500)]
    begin = bench.clock.now
    timed = list(bench.events_at(*leg(1, [1] * 100, forced)))
    times = [at for at, event in timed if isinstance(event, Sampled)]
    first = begin + 100 / 20000
    assert times == pytest.approx([first + k / rate for k in range(500)], abs=1e-9)
    events = [event for _, event in timed]
    assert tokens_of(events, 1) == forced
    assert only(events, Stopped).decode_seconds == pytest.approx(499 / rate)
    assert only(events, Prefilled).prefill_seconds == pytest.approx(100 / 20000)
    assert only(events, Began).at == begin


@given(late=st.lists(st.floats(0, 0.05), max_size=30))
def test_lateness_is_made_up_for_and_never_adds_up(late: list[float]) -> None:
    bench = Bench(decode=1000, prefill=20000)
    engine, clock = bench.engine, bench.clock
    engine.submit(leg(1, [1] * 20, [7] * 300))
    first = clock.now + 20 / 20000
    engine.step()
    for lateness in late:
        clock.now += engine.seconds_until_due + lateness
        engine.step()
        engine.check_integrity()
        expected = sum(first + k / 1000 <= clock.now for k in range(300))
        assert engine.statistics().tokens_sampled == expected
    clock.now += 1
    engine.step()
    assert engine.statistics().tokens_sampled == 300


def test_one_step_makes_up_for_whole_passes_and_the_tokens_after_them() -> None:
    bench = Bench(decode=1000, prefill=1000, prefill_chunk=50)
    bench.engine.submit(leg(1, [1] * 300, [7] * 500))
    bench.engine.step()
    bench.clock.now += 0.4
    events = bench.engine.step().events
    assert only(events, Prefilled).prefill_seconds == pytest.approx(0.3)
    assert len(tokens_of(events, 1)) == pytest.approx(101, abs=1)


def test_sequences_decode_side_by_side_each_at_its_own_rate() -> None:
    bench = Bench(decode=100, prefill=1e6, blocks=400)
    commands = [command for number in range(20) for command in leg(number, [number] * 10, [number] * 50)]
    ends = [at for at, event in bench.events_at(*commands) if isinstance(event, Stopped)]
    assert ends == pytest.approx([1000 + 200 / 1e6 + 49 / 100] * 20, abs=1e-9)


def test_decoding_does_not_wait_for_a_prefill() -> None:
    bench = Bench(decode=1000, prefill=1000, blocks=1000, prefill_chunk=500)
    bench.run(*leg(1, [1], [7] * 2000), until=1000.1)
    timed = list(bench.events_at(*leg(2, [2] * 500, [8]), until=1000.5))
    assert [at for at, event in timed if isinstance(event, Sampled)] == pytest.approx(
        [1000.101 + k / 1000 for k in range(400)], abs=1e-9
    )


def test_prefill_is_at_the_rate_of_the_whole_engine() -> None:
    bench = Bench(prefill=1000, prefill_chunk=64)
    commands = [command for number in range(4) for command in leg(number, [number] * 100, [1])]
    ends = [at for at, event in bench.events_at(*commands) if isinstance(event, Prefilled)]
    # Passes of 64 tokens end at 64, 128, ...: each prompt is ready with the pass that has its last token.
    assert ends == pytest.approx([1000.128, 1000.256, 1000.320, 1000.400])


def test_a_pass_and_the_time_between_steps_are_a_step_at_least() -> None:
    bench = Bench(decode=4000, prefill=1e6, step=0.001)
    said: Counter[float] = Counter()
    for at, event in bench.events_at(*leg(1, [1], [7] * 9)):
        if isinstance(event, Sampled):
            said[round(at - 1000, 6)] += len(event.tokens)
    assert said == {0.001: 1, 0.002: 4, 0.003: 4}


def test_time_in_which_nothing_is_asked_is_nobodys() -> None:
    bench = Bench(decode=1000, prefill=1000)
    bench.run(*leg(1, [1] * 10, [7] * 10))
    bench.clock.now += 100
    at = bench.clock.now
    timed = list(bench.events_at(Extend(1, [3] * 9), Sample(1, GREEDY, 99, (), [8, 9])))
    assert [round(now - at, 6) for now, _ in timed] == [0, 0.01, 0.01, 0.011, 0.011]
    prefilled = only([event for _, event in timed], Prefilled)
    assert prefilled.prefilled == 10
    assert prefilled.queue_seconds == 0


# Order, counts and failures


def test_resumed_legs_go_ahead_of_new_prompts() -> None:
    bench = Bench(prefill_chunk=8)
    bench.run(*leg(1, [1, 2], [7]))
    bench.engine.submit([*leg(2, list(range(30)), [7])])
    bench.engine.step()
    commands = [*leg(3, [3, 4], [7]), Extend(1, list(range(9))), Sample(1, GREEDY, 9, (), [7])]
    events = bench.run(*commands)
    assert [event.sequence for event in events if isinstance(event, Prefilled)] == [1, 2, 3]


def test_no_more_than_max_batch_sequences_decode_together_and_all_finish() -> None:
    bench = Bench(decode=100, prefill=1e6, max_batch=3, prefix_cache=False)
    commands = [command for number in range(8) for command in leg(number, [number, 1], [7] * 11)]
    timed = list(bench.events_at(*commands))
    ends = [round(at - 1000, 2) for at, event in timed if isinstance(event, Stopped)]
    assert ends == [0.1] * 3 + [0.2] * 3 + [0.3] * 2


def test_a_pause_is_obeyed_when_it_comes_and_the_leg_after_it_goes_on() -> None:
    bench = Bench(decode=10, prefill=1e6)
    before = bench.run(*leg(1, [1] * 10, list(range(100))), until=1002.05)
    assert tokens_of(before, 1) == list(range(21))
    paused = bench.run(Pause(1))
    assert kinds(paused) == ["Stopped"]
    assert only(paused, Stopped).reason == "paused"
    assert bench.clock.now == 1002.05
    assert tokens_of(bench.run(Truncate(1, 15), Sample(1, GREEDY, 2, (), [8, 9, 10])), 1) == [8, 9]


@pytest.mark.parametrize("command", [Pause(1), Release(1)])
def test_who_leaves_in_the_middle_of_a_pass_gives_its_blocks_back(command: Command) -> None:
    bench = Bench(prefill=1000, prefill_chunk=512, prefix_cache=False)
    bench.run(*leg(1, [1] * 100, [7]), *leg(2, [2] * 100, [8]), until=1000.05)
    assert bench.engine.statistics().blocks_running == 50
    bench.engine.submit([command])
    bench.engine.check_integrity()
    assert bench.engine.statistics().blocks_running == 25
    assert tokens_of(bench.run(), 2) == [8]
    assert bench.engine.statistics().tokens_prefilled == (199 if command == Pause(1) else 100)


def test_known_prefixes_are_reused_within_a_namespace_and_cost_no_time() -> None:
    bench = Bench(prefill=1000)
    prompt = list(range(30))
    for number, namespace, reused in [(1, "a", 0), (2, "a", 28), (3, "b", 0), (4, "b", 28)]:
        commands: list[Command] = [
            Open(number, namespace),
            Extend(number, prompt),
            Sample(number, GREEDY, 9, (), [7]),
        ]
        prefilled = only(bench.run(*commands), Prefilled)
        assert (prefilled.reused, prefilled.prefilled) == (reused, 30 - reused)
        assert prefilled.prefill_seconds == pytest.approx((30 - reused) / 1000)


def test_a_leg_that_is_not_forced_fails_and_nobody_else_does() -> None:
    bench = Bench()
    events = bench.run(*leg(1, [1, 2], None), *leg(2, [3, 4], [5, 6]))
    assert only(events, Failed).sequence == 1
    assert only(events, Failed).code == "engine_error"
    assert "forced legs only" in only(events, Failed).message
    assert tokens_of(events, 2) == [5, 6]
    assert bench.run(Extend(1, [1])) == [], "it has crossed the news"
    assert only(bench.run(Fork(1, 7), Release(1)), Failed).sequence == 7


def test_a_late_step_says_what_there_is_room_for_and_then_fails() -> None:
    bench = Bench(blocks=8, prefix_cache=False)
    bench.engine.submit(leg(1, [1, 2, 3], [7] * 100))
    bench.engine.step()
    bench.clock.now += 10
    events = bench.run()
    assert len(tokens_of(events, 1)) == 8 * 4 - 3 + 1
    assert kinds(events)[-1] == "Failed"
    assert only(events, Failed).code == "out_of_kv"
    statistics = bench.engine.statistics()
    assert (statistics.blocks_free, statistics.sequences_held) == (8, 0)


# Beside the real scheduler

Action: TypeAlias = tuple[str, int, int]  # what, which of the sequences, how much

actions = st.lists(
    st.tuples(
        st.sampled_from(["extend", "sample", "sample", "pause", "truncate", "fork", "release", "run", "run"]),
        st.integers(0, 2),
        st.integers(0, 30),
    ),
    max_size=30,
)


def command_of(what: str, sequence: int, amount: int, unused: int) -> Command:
    tokens = [1 + token % 3 for token in range(amount)]  # prefixes repeat
    match what:
        case "extend":
            return Extend(sequence, tokens)
        case "sample":
            return Sample(sequence, GREEDY, 20, (2,), tokens)
        case "pause":
            return Pause(sequence)
        case "truncate":
            return Truncate(sequence, amount)
        case "fork":
            return Fork(sequence, unused)
        case _:
            return Release(sequence)


def outcome(scheduler: PacedScheduler | Scheduler, command: Command) -> type[Exception] | None:
    try:
        scheduler.submit([command])
    except (KeyError, ValueError) as error:
        return type(error)
    return None


def run_to_rest(scheduler: PacedScheduler | Scheduler, clock: Clock) -> list[Event]:
    events: list[Event] = []
    while scheduler.has_work:
        if isinstance(scheduler, PacedScheduler):
            clock.now += scheduler.seconds_until_due
        events += scheduler.step().events
        scheduler.check_integrity()
    return events


def essence(events: list[Event]) -> dict[int, list[tuple[object, ...]]]:
    """All that is said of each sequence, but for times and words; tokens one by one."""
    described: dict[int, list[tuple[object, ...]]] = {}
    for event in events:
        said = described.setdefault(event.sequence, [])
        match event:
            case Prefilled():
                said.append(("prefilled", event.prefilled, event.reused))
            case Sampled():
                said += [("sampled", token) for token in event.tokens]
            case Stopped():
                said.append(("stopped", event.reason))
            case Failed():
                said.append(("failed", event.code))
            case _:
                said.append(("began",))
    return described


@given(actions=actions, prefix_cache=st.booleans(), chunk=st.sampled_from([5, 512]))
def test_the_real_scheduler_says_the_same(actions: list[Action], prefix_cache: bool, chunk: int) -> None:
    clock = Clock()
    common: dict[str, Any] = {
        "block_size": 4,
        "max_context": 60,
        "prefix_cache": prefix_cache,
        "prefill_chunk": chunk,
    }
    paced = PacedScheduler(configuration(blocks=100, **common), clock=clock)
    real = Scheduler(EngineConfig(model="random:0", kv_memory=100 * 4 * RANDOM_KV_TOKEN_BYTES, **common))
    sequences, unused = [1, 2, 3], 4
    for scheduler in (paced, real):
        scheduler.submit([Open(sequence) for sequence in sequences])
    for what, which, amount in [*actions, ("run", 0, 0)]:
        if what != "run":
            command = command_of(what, sequences[which], amount, unused)
            result = outcome(paced, command)
            assert result == outcome(real, command)
            if what == "fork" and result is None:
                sequences[which] = unused
                unused += 1
            continue
        assert paced.has_work == real.has_work
        assert essence(run_to_rest(paced, clock)) == essence(run_to_rest(real, clock))
        ours, theirs = paced.statistics(), real.statistics()
        for name in ("sequences_held", "blocks_held", "blocks_cached", "blocks_free", "extents_per_sequence"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("tokens_prefilled", "tokens_reused", "tokens_sampled"):
            assert getattr(ours, name) == getattr(theirs, name), name


@given(actions=actions, waits=st.lists(st.floats(0, 0.03), min_size=30, max_size=30))
def test_commands_at_any_time_leave_the_books_right(actions: list[Action], waits: list[float]) -> None:
    """Unlike above, the clock moves between commands: into passes, into legs, past the ends of both."""
    clock = Clock()
    engine = PacedScheduler(
        configuration(blocks=12, block_size=4, prefill=1000, step=0.001, prefill_chunk=20), clock=clock
    )
    sequences, unused = [1, 2, 3], 4
    engine.submit([Open(sequence) for sequence in sequences])
    for (what, which, amount), wait in zip(actions, waits, strict=False):
        if what == "run":
            engine.step()
        elif outcome(engine, command_of(what, sequences[which], amount, unused)) is None and what == "fork":
            sequences[which] = unused
            unused += 1
        engine.check_integrity()
        clock.now += wait
    run_to_rest(engine, clock)
    statistics = engine.statistics()
    assert (statistics.sequences_running, statistics.blocks_running) == (0, 0)


# Configurations, and the server around it


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pace": None}, "its pace"),
        ({"block_size": 0}, "at least 1"),
        ({"model": "/nowhere"}, "no folder"),
        ({"model": "tests"}, "no config.json"),
        ({"kv_memory": 100}, "less than a block"),
    ],
)
def test_what_cannot_be_loaded_is_said(change: dict[str, Any], says: str) -> None:
    pace = Pace(decode=1000, prefill=20000)
    with pytest.raises((ValueError, ModelError), match=says):
        PacedScheduler(EngineConfig(**{"model": str(EMBEDDED_MODEL), "pace": pace, **change}))


def outline_of(folder: Path) -> Outline:
    return read_outline(ConfigFile(folder))


@pytest.mark.parametrize(
    ("text", "says"), [("{}", "num_attention_heads"), ("{", "not JSON"), ("[]", "not a JSON object")]
)
def test_a_config_that_does_not_say_enough_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says):
        outline_of(tmp_path)


def test_the_outline_is_that_of_the_decoder(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 8,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 99,
        "max_position_embeddings": 77,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    outline = outline_of(tmp_path)
    assert (outline.kv_heads, outline.head_size, outline.max_context) == (8, 8, 77)
    assert outline.kv_bytes_per_token("bfloat16") == 2 * 3 * 8 * 8 * 2
    assert outline_of(EMBEDDED_MODEL).kv_bytes_per_token("float32") == KV_TOKEN_BYTES


@pytest.mark.parametrize(
    ("engine", "pace"),
    [
        ("torch", None),
        ("paced:decode=1000,prefill=20000", Pace(decode=1000, prefill=20000)),
        ("paced:step=0,prefill=2e4,decode=65", Pace(decode=65, prefill=20000, step=0)),
    ],
)
def test_the_option_says_the_pace(engine: str, pace: Pace | None) -> None:
    settings = Settings(engine=engine)
    assert settings.pace == pace
    assert engine_config(settings).pace == pace


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("fast", "neither torch nor paced"),
        ("paced:", "each once"),
        ("paced:decode=1000", "prefill"),
        ("paced:decode=1,prefill=2,decode=3", "each once"),
        ("paced:decode=1,prefill=2,batch=3", "batch=3"),
        ("paced:decode=x,prefill=2", "'x' is not a number"),
        ("paced:decode=0,prefill=2", "decode=0"),
        ("paced:decode=1,prefill=inf", "prefill=inf"),
        ("paced:decode=1,prefill=nan", "prefill=nan"),
        ("paced:decode=1,prefill=2,step=-1", "step=-1"),
    ],
)
def test_a_bad_pace_is_said_with_its_option(engine: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        Settings(engine=engine)
    assert caught.value.option == "--engine"


def test_it_runs_without_torch() -> None:
    program = (
        "import sys; from engine.paced import PacedScheduler; from engine.messages import *;"
        f"PacedScheduler(EngineConfig(model={str(EMBEDDED_MODEL)!r}, pace=Pace(decode=1, prefill=1)));"
        "print('torch' in sys.modules, 'trio' in sys.modules, 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"] * 3


async def test_inline_it_keeps_its_rate_on_the_virtual_clock_and_hears_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = configuration(decode=65, prefill=1000, block_size=16)
    engine = InlineEngine(lambda: PacedScheduler(config, clock=trio.current_time))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.wait_ready()
        begin = trio.current_time()
        slow, other = engine.open(), engine.open()
        slow.extend([1] * 100)
        slow.sample(GREEDY, max_tokens=1000, stop_tokens=(), forced=[7] * 1000)
        await trio.sleep(0.1 + 10.5 / 65)  # between two tokens
        other.extend([2] * 10)
        other.sample(GREEDY, max_tokens=9, stop_tokens=(), forced=[8])
        began = next(event for event in await other.events() if isinstance(event, Began))
        assert began.at == trio.current_time() == pytest.approx(begin + 0.1 + 10.5 / 65)
        events: list[Event] = []
        while not any(isinstance(event, Stopped) for event in events):
            events += await slow.events()
        assert trio.current_time() == pytest.approx(begin + 0.1 + 999 / 65)
        assert tokens_of(events, slow.id) == [7] * 1000
        nursery.cancel_scope.cancel()


async def test_in_its_process_it_hears_a_command_while_no_token_is_due() -> None:
    """The second token would come in an hour."""
    engine = make_engine(Settings(engine="paced:decode=0.0003,prefill=1e6"))
    assert isinstance(engine, ProcessEngine)
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            assert engine.info.simulated
            sequence = engine.open()
            sequence.extend([1] * 50)
            sequence.sample(GREEDY, max_tokens=9, stop_tokens=(), forced=[5, 6])
            events: list[Event] = []
            while not tokens_of(events, sequence.id):
                events += await sequence.events()
            sequence.pause()
            while kinds(events)[-1] != "Stopped":
                events += await sequence.events()
            assert kinds(events) == ["Began", "Prefilled", "Sampled", "Stopped"]
            assert tokens_of(events, sequence.id) == [5]
            nursery.cancel_scope.cancel()


async def test_the_models_list_says_that_it_is_simulated() -> None:
    settings = Settings(engine="paced:decode=1000,prefill=20000")
    service = Service(settings, InlineEngine(lambda: PacedScheduler(engine_config(settings))))
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            while service.health()[0] != 200:
                await trio.lowlevel.checkpoint()
            [model] = service.models()
            assert model["simulated"] is True
            assert model["runs_on"].startswith("simulated: ")
            nursery.cancel_scope.cancel()
