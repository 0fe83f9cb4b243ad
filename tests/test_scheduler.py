"""The scheduler, step by step: what it answers to each command, in which order it works, and what it costs.

That any schedule gives the tokens of one fresh prefill is the matter of test_exactness.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import (
    Began,
    Command,
    EngineConfig,
    Event,
    Extend,
    Failed,
    Fork,
    Open,
    Pause,
    Prefill,
    Prefilled,
    Release,
    Sample,
    Sampled,
    Sampling,
    Stopped,
    Truncate,
)
from engine.outline import ModelError
from engine.scheduler import Scheduler

GREEDY = Sampling()
KV_TOKEN_BYTES = (
    2 * 2 * 2 * 16 * 4
)  # keys and values, layers, key heads, head size, float32 of a random model


def scheduler(blocks: int = 256, block_size: int = 4, **changes: Any) -> Scheduler:
    return Scheduler(
        EngineConfig(
            model="random:1", kv_memory=blocks * block_size * KV_TOKEN_BYTES, block_size=block_size, **changes
        )
    )


def run(engine: Scheduler, *commands: Command, steps: int = 10000) -> list[Event]:
    """Submit, step until there is no work or `steps` are done, and check the books after each."""
    engine.submit(commands)
    events: list[Event] = []
    while engine.has_work and steps:
        events += engine.step().events
        engine.check_integrity()
        steps -= 1
    return events


def kinds(events: list[Event], sequence: int | None = None) -> list[str]:
    return [type(event).__name__ for event in events if sequence in (None, event.sequence)]


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


def test_a_leg_begins_is_prefilled_samples_and_stops() -> None:
    engine = scheduler()
    events = run(engine, Open(1), Extend(1, list(range(10))), Sample(1, GREEDY, 3))
    assert kinds(events) == ["Began", "Prefilled", "Sampled", "Sampled", "Sampled", "Stopped"]
    prefilled = only(events, Prefilled)
    assert (prefilled.prefilled, prefilled.reused) == (10, 0)
    assert prefilled.queue_seconds >= 0
    assert prefilled.prefill_seconds > 0
    assert only(events, Stopped).reason == "length"
    assert not engine.has_work
    assert engine.step().events == []


def test_a_resumed_leg_forwards_what_was_sampled_last_and_what_is_new() -> None:
    engine = scheduler()
    run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 4))
    events = run(engine, Extend(1, [4, 5]), Sample(1, GREEDY, 1))
    assert kinds(events) == ["Began", "Prefilled", "Sampled", "Stopped"]
    assert only(events, Prefilled).prefilled == 1 + 2
    events = run(engine, Sample(1, GREEDY, 1))
    assert kinds(events) == ["Began", "Prefilled", "Sampled", "Stopped"]
    assert only(events, Prefilled).prefilled == 1


def test_what_is_appended_is_prefilled_before_there_is_a_sample_but_for_one_token() -> None:
    engine = scheduler(prefill_chunk=4)
    assert kinds(run(engine, Open(1), Extend(1, list(range(9))))) == ["Began"]
    assert engine.statistics().tokens_prefilled == 8
    assert engine.statistics().sequences_held == 1
    assert kinds(run(engine, Extend(1, [3, 4]))) == ["Began"]
    assert kinds(run(engine, Extend(1, [5]))) == ["Began"]
    events = run(engine, Sample(1, GREEDY, 1))
    assert kinds(events) == ["Prefilled", "Sampled", "Stopped"]
    assert only(events, Prefilled).prefilled == 12


def test_a_leg_that_only_prefills_says_when_it_is_done_and_what_it_cost() -> None:
    engine = scheduler()
    events = run(engine, Open(1), Extend(1, list(range(9))), Prefill(1))
    assert kinds(events) == ["Began", "Prefilled", "Stopped"]
    assert (only(events, Prefilled).prefilled, only(events, Stopped).reason) == (8, "length")
    assert kinds(run(engine, Prefill(1))) == ["Prefilled", "Stopped"], "there was nothing left to do"
    # What comes after counts only what it costs itself: the token kept back, and what is new.
    after = run(engine, Extend(1, [3, 4]), Sample(1, GREEDY, 1))
    assert only(after, Prefilled).prefilled == 3
    engine.check_integrity()


def test_a_leg_that_only_prefills_is_not_begun_while_sampling() -> None:
    engine = scheduler()
    run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 100), steps=2)
    with pytest.raises(ValueError, match="while it is sampling"):
        engine.submit([Prefill(1)])


def test_a_single_token_waits_for_its_sample() -> None:
    engine = scheduler()
    assert run(engine, Open(1), Extend(1, [7])) == []
    events = run(engine, Sample(1, GREEDY, 1))
    assert kinds(events) == ["Began", "Prefilled", "Sampled", "Stopped"]


def test_a_stop_token_ends_the_leg_and_stays_in_the_sequence() -> None:
    engine = scheduler()
    free = tokens_of(run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 8)), 1)
    stop = free[3]
    expected = free[: free.index(stop) + 1]
    events = run(engine, Open(2), Extend(2, [1, 2, 3]), Sample(2, GREEDY, 8, (stop, 511)))
    assert tokens_of(events, 2) == expected
    assert only(events, Stopped).reason == "stop"
    went_on = run(engine, Sample(2, GREEDY, 8 - len(expected)))
    assert tokens_of(went_on, 2) == free[len(expected) :]


@pytest.mark.parametrize(
    ("forced", "max_tokens", "expected", "reason"),
    [
        ([9, 8, 7], 10, [9, 8, 7], "stop"),
        ([9, 8, 7], 2, [9, 8], "length"),
        ([], 10, [], "stop"),
        ([5], 1, [5], "stop"),
    ],
)
def test_forced_tokens_replace_what_is_sampled(
    forced: list[int], max_tokens: int, expected: list[int], reason: str
) -> None:
    engine = scheduler()
    events = run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, max_tokens, (8,), forced))
    assert tokens_of(events, 1) == expected
    assert only(events, Stopped).reason == reason


def test_after_forced_tokens_sampling_goes_on_as_if_they_had_been_given() -> None:
    engine = scheduler()
    run(engine, Open(1), Extend(1, [1, 2]), Sample(1, GREEDY, 9, forced=[3, 4]))
    run(engine, Open(2), Extend(2, [1, 2, 3, 4]))
    one, two = (tokens_of(run(engine, Sample(number, GREEDY, 6)), number) for number in (1, 2))
    assert one == two


def test_the_context_bounds_appends_and_ends_sampling() -> None:
    engine = scheduler(max_context=10)
    events = run(engine, Open(1), Extend(1, [1] * 8), Sample(1, GREEDY, 5))
    assert len(tokens_of(events, 1)) == 2
    assert only(events, Stopped).reason == "length"
    events = run(engine, Sample(1, GREEDY, 5))
    assert kinds(events) == ["Stopped"]
    failed = only(run(engine, Extend(1, [1])), Failed)
    assert failed.code == "context_length_exceeded"
    assert "11 tokens" in failed.message
    assert engine.statistics().sequences_held == 0


def test_nothing_is_sampled_when_no_tokens_are_allowed() -> None:
    engine = scheduler()
    events = run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 0))
    assert kinds(events) == ["Stopped", "Began"]
    events = run(engine, Sample(1, GREEDY, 1))
    assert kinds(events) == ["Prefilled", "Sampled", "Stopped"]


def test_a_pause_stops_before_the_next_token() -> None:
    engine = scheduler()
    free = tokens_of(run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 9)), 1)
    before = run(engine, Open(2), Extend(2, [1, 2, 3]), Sample(2, GREEDY, 9), steps=4)
    paused = run(engine, Pause(2))
    assert kinds(paused) == ["Stopped"]
    assert only(paused, Stopped).reason == "paused"
    assert run(engine, Pause(2)) == []
    after = run(engine, Sample(2, GREEDY, 5))
    assert tokens_of(before, 2) + tokens_of(after, 2) == free


def test_a_pause_during_the_prefill_lets_the_prefill_go_on() -> None:
    engine = scheduler(prefill_chunk=4)
    run(engine, Open(1), Extend(1, list(range(20))), Sample(1, GREEDY, 5), steps=2)
    assert kinds(run(engine, Pause(1))) == ["Stopped"]
    assert engine.statistics().tokens_prefilled == 19
    events = run(engine, Sample(1, GREEDY, 2))
    assert only(events, Prefilled).prefilled == 20


def test_a_truncated_sequence_goes_on_from_its_cut() -> None:
    engine = scheduler()
    free = tokens_of(run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, GREEDY, 9)), 1)
    assert run(engine, Truncate(1, 3 + 4)) == []
    assert tokens_of(run(engine, Sample(1, GREEDY, 5)), 1) == free[4:]
    run(engine, Truncate(1, 0))
    assert engine.statistics().blocks_held == 0
    assert tokens_of(run(engine, Extend(1, [1, 2, 3]), Sample(1, GREEDY, 9)), 1) == free


def test_penalties_forget_what_was_cut() -> None:
    engine = scheduler()
    sampling = Sampling(frequency_penalty=-6.0, repetition_penalty=1.3)
    free = tokens_of(run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, sampling, 12)), 1)
    run(engine, Truncate(1, 3 + 5))
    assert tokens_of(run(engine, Sample(1, sampling, 7)), 1) == free[5:]
    assert free != tokens_of(run(engine, Open(2), Extend(2, [1, 2, 3]), Sample(2, GREEDY, 12)), 2)


def test_a_ledger_sent_again_is_continued_with_its_penalties() -> None:
    engine = scheduler()
    sampling = Sampling(temperature=1.0, seed=4, frequency_penalty=1.5)
    free = tokens_of(run(engine, Open(1), Extend(1, [1, 2, 3]), Sample(1, sampling, 20)), 1)
    run(engine, Open(2), Extend(2, [1, 2, 3]), Extend(2, free[:8], sampled=True))
    assert tokens_of(run(engine, Sample(2, sampling, 12)), 2) == free[8:]


def test_a_fork_goes_on_like_its_parent_and_both_go_their_ways() -> None:
    engine = scheduler()
    start = tokens_of(run(engine, Open(1), Extend(1, list(range(11))), Sample(1, GREEDY, 2)), 1)
    held = engine.statistics().blocks_held
    run(engine, Fork(1, 2), Fork(1, 3))
    assert engine.statistics().blocks_held == held, "forks share all blocks until they write"
    events = run(
        engine, *(Sample(number, GREEDY, 6) for number in (1, 2)), Extend(3, [4]), Sample(3, GREEDY, 6)
    )
    assert tokens_of(events, 1) == tokens_of(events, 2)
    fresh = run(engine, Open(4), Extend(4, [*range(11), *start, 4]), Sample(4, GREEDY, 6))
    assert tokens_of(events, 3) == tokens_of(fresh, 4)


def test_a_fork_of_a_half_prefilled_sequence_prefills_the_rest_itself() -> None:
    engine = scheduler(prefill_chunk=4, prefix_cache=False)
    run(engine, Open(1), Extend(1, list(range(20))), steps=2)
    run(engine, Fork(1, 2), Release(1))
    assert engine.statistics().tokens_prefilled == 19
    events = run(engine, Sample(2, GREEDY, 5))
    fresh = run(engine, Open(3), Extend(3, list(range(20))), Sample(3, GREEDY, 5))
    assert tokens_of(events, 2) == tokens_of(fresh, 3)


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 10000])
def test_nothing_follows_a_release(steps: int) -> None:
    engine = scheduler(prefill_chunk=4)
    run(engine, Open(1), Extend(1, list(range(10))), Sample(1, GREEDY, 5), steps=steps)
    assert run(engine, Pause(1), Release(1)) == []
    statistics = engine.statistics()
    assert (statistics.sequences_running, statistics.sequences_held) == (0, 0)
    assert statistics.blocks_free + statistics.blocks_cached == statistics.blocks_total
    with pytest.raises(KeyError):
        engine.submit([Pause(1)])


def test_decoding_never_waits_longer_than_one_chunk() -> None:
    engine = scheduler(prefill_chunk=8)
    run(engine, Open(1), Extend(1, [1, 2]), Sample(1, GREEDY, 100), steps=2)
    engine.submit([Open(2), Extend(2, list(range(100))), Sample(2, GREEDY, 5)])
    for _ in range(12):
        before = engine.statistics().tokens_prefilled
        assert kinds(engine.step().events, 1) == ["Sampled"]
        assert engine.statistics().tokens_prefilled - before <= 8
    assert kinds(engine.step().events, 2) == ["Prefilled", "Sampled"]


def test_the_chunk_is_for_all_prefills_together() -> None:
    engine = scheduler(prefill_chunk=8)
    for number in range(1, 5):
        engine.submit([Open(number), Extend(number, [number] * 3), Sample(number, GREEDY, 1)])
    assert [event.sequence for event in engine.step().events if isinstance(event, Began)] == [1, 2, 3]
    assert engine.statistics().tokens_prefilled == 8


def test_resumed_legs_go_ahead_of_new_prompts() -> None:
    engine = scheduler(prefill_chunk=8)
    run(engine, Open(1), Extend(1, [1, 2]), Sample(1, GREEDY, 1))
    engine.submit([Open(2), Extend(2, list(range(30))), Sample(2, GREEDY, 1)])
    engine.step()
    engine.submit([Open(3), Extend(3, [3, 4]), Sample(3, GREEDY, 1)])
    engine.submit([Extend(1, list(range(9))), Sample(1, GREEDY, 1)])
    order = [event.sequence for event in run(engine) if isinstance(event, Prefilled)]
    assert order == [1, 2, 3]


def test_no_more_than_max_batch_sequences_decode_together_and_all_finish() -> None:
    engine = scheduler(max_batch=3, prefix_cache=False)
    for number in range(8):
        engine.submit([Open(number), Extend(number, [number, 1]), Sample(number, GREEDY, 4)])
    finished = 0
    while engine.has_work:
        events = engine.step().events
        assert kinds(events).count("Sampled") <= 3
        finished += kinds(events).count("Stopped")
    assert finished == 8


def test_hundreds_of_sequences_run_and_are_held() -> None:
    engine = scheduler(blocks=3000, prefill_chunk=4096)
    numbers = range(300)
    for number in numbers:
        engine.submit([Open(number), Extend(number, [number, 5, 6]), Sample(number, GREEDY, 3)])
    events = run(engine)
    assert kinds(events).count("Stopped") == 300
    statistics = engine.statistics()
    assert statistics.sequences_held == 300
    assert statistics.extents_per_sequence == 1.0
    alone = scheduler()
    for number in (0, 77, 299):
        expected = run(alone, Open(number), Extend(number, [number, 5, 6]), Sample(number, GREEDY, 3))
        assert tokens_of(events, number) == tokens_of(expected, number)


def test_a_full_pool_fails_only_the_sequence_that_needs_room() -> None:
    engine = scheduler(blocks=8, prefix_cache=False)
    held = run(engine, Open(1), Extend(1, list(range(14))), Sample(1, GREEDY, 1))
    events = run(engine, Open(2), Extend(2, list(range(20))), Sample(2, GREEDY, 1))
    assert only(events, Failed).code == "out_of_kv"
    assert only(events, Failed).sequence == 2
    events = run(engine, Open(3), Extend(3, [1, 2, 3]), Sample(3, GREEDY, 100))
    assert len(tokens_of(events, 3)) == 4 * 4 - 3 + 1, "the last token needs no room until the next"
    assert kinds(events)[-1] == "Failed"
    went_on = tokens_of(run(engine, Sample(1, GREEDY, 4)), 1)
    roomy = scheduler()
    expected = tokens_of(run(roomy, Open(1), Extend(1, list(range(14))), Sample(1, GREEDY, 5)), 1)
    assert tokens_of(held, 1) + went_on == expected


def test_sequences_in_one_batch_survive_the_failure_of_another() -> None:
    engine = scheduler(blocks=8, prefix_cache=False)
    prompts = {1: [1] * 8, 2: [2] * 8, 3: [3] * 8}
    for number, prompt in prompts.items():
        engine.submit([Open(number), Extend(number, prompt), Sample(number, GREEDY, 8)])
    events = run(engine)
    failed = [event.sequence for event in events if isinstance(event, Failed)]
    stopped = [event.sequence for event in events if isinstance(event, Stopped)]
    assert len(failed) == 1
    assert len(stopped) == 2
    roomy = scheduler()
    for number in stopped:
        expected = run(roomy, Open(number), Extend(number, prompts[number]), Sample(number, GREEDY, 8))
        assert tokens_of(events, number) == tokens_of(expected, number)


def test_commands_that_crossed_a_failure_are_ignored() -> None:
    engine = scheduler()
    vocabulary = engine.info.vocabulary
    events = run(engine, Open(1), Extend(1, [vocabulary]))
    assert only(events, Failed).code == "engine_error"
    assert f"0 to {vocabulary - 1}" in only(events, Failed).message
    assert run(engine, Extend(1, [1]), Sample(1, GREEDY, 1), Pause(1), Truncate(1, 0)) == []
    events = run(engine, Fork(1, 5), Extend(5, [1]), Sample(5, GREEDY, 1))
    assert only(events, Failed).sequence == 5, "a fork of a lost sequence is lost as well"
    assert run(engine, Release(1)) == []
    with pytest.raises(KeyError):
        engine.submit([Release(1)])


def test_known_prefixes_are_reused_within_a_namespace() -> None:
    engine = scheduler()
    prompt = list(range(30))
    expected = tokens_of(run(engine, Open(1, "a"), Extend(1, prompt), Sample(1, GREEDY, 5)), 1)
    for number, namespace, reused in [(2, "a", 28), (3, "b", 0), (4, "b", 28)]:
        events = run(engine, Open(number, namespace), Extend(number, prompt), Sample(number, GREEDY, 5))
        assert tokens_of(events, number) == expected
        prefilled = only(events, Prefilled)
        assert (prefilled.reused, prefilled.prefilled) == (reused, 30 - reused)
    run(engine, *(Release(number) for number in (1, 2, 3, 4)))
    assert engine.statistics().blocks_running == engine.statistics().blocks_held == 0
    events = run(engine, Open(5, "a"), Extend(5, [*prompt, *expected, 1]), Sample(5, GREEDY, 5))
    assert only(events, Prefilled).reused == 32, "sampled tokens are found too"


def test_nothing_is_reused_when_the_prefix_cache_is_off() -> None:
    engine = scheduler(prefix_cache=False)
    for number in (1, 2):
        events = run(engine, Open(number), Extend(number, list(range(30))), Sample(number, GREEDY, 1))
        assert only(events, Prefilled).reused == 0
    run(engine, Release(1), Release(2))
    assert engine.statistics().blocks_free == engine.statistics().blocks_total


def test_statistics_count_work_and_blocks() -> None:
    engine = scheduler(prefill_chunk=64)
    run(engine, Open(1), Extend(1, list(range(9))), Sample(1, GREEDY, 2))
    engine.submit([Open(2), Extend(2, list(range(9))), Sample(2, GREEDY, 3)])
    statistics = engine.step().statistics
    assert (statistics.sequences_running, statistics.sequences_held) == (1, 1)
    assert (statistics.blocks_running, statistics.blocks_held) == (3, 1)
    assert statistics.blocks_total == 256
    assert (statistics.steps, statistics.tokens_sampled) == (3, 3)
    assert (statistics.tokens_prefilled, statistics.tokens_reused) == (9 + 1, 8)
    assert statistics.busy_seconds > 0


@pytest.mark.parametrize(
    ("commands", "error"),
    [
        ([Extend(9, [1])], KeyError),
        ([Open(1)], ValueError),
        ([Open(9), Sample(9, GREEDY, 1)], ValueError),
        ([Extend(1, [1])], ValueError),
        ([Sample(1, GREEDY, 1)], ValueError),
        ([Truncate(1, 0)], ValueError),
        ([Fork(1, 9)], ValueError),
        ([Fork(2, 1)], ValueError),
        ([Truncate(2, 3)], ValueError),
        ([Release(9)], KeyError),
    ],
)
def test_commands_that_make_no_sense_are_loud(commands: list[Command], error: type[Exception]) -> None:
    engine = scheduler()
    run(engine, Open(2), Extend(2, [1, 2]))
    run(engine, Open(1), Extend(1, [1, 2]), Sample(1, GREEDY, 9), steps=2)
    with pytest.raises(error):
        engine.submit(commands)
    engine.check_integrity()


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_that_do_not_exist_fail_their_sequence_alone(token: int) -> None:
    engine = scheduler()
    run(engine, Open(1), Extend(1, [1, 2]), Sample(1, GREEDY, 9), steps=2)
    for number, commands in enumerate(
        ([Extend(2, [token])], [Extend(3, [1]), Sample(3, GREEDY, 1, (), [1, token])]), 2
    ):
        events = run(engine, Open(number), *commands, steps=1)
        assert only(events, Failed).code == "engine_error"
        assert kinds(events, 1) == ["Sampled"]


@pytest.mark.parametrize("name", ["block_size", "max_batch", "prefill_chunk"])
def test_a_configuration_that_could_never_work_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(EngineConfig(model="random:1", **{name: 0}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "random:x"}, "is a number"),
        ({"model": "/nowhere"}, "no folder"),
        ({"kv_memory": 100}, "less than a block"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = {"model": "random:1", **changes}
    with pytest.raises(ModelError, match=says):
        Scheduler(EngineConfig(**config))


def calls_made_by(work: Callable[[], object]) -> int:
    """How many functions, ours and built in, `work` calls."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_an_append_and_a_step_call_as_much_whatever_the_history() -> None:
    """What Python does must not grow with the history: only the attention itself may."""
    engine = scheduler(blocks=4096, prefill_chunk=4096)
    calls = {}
    for number, history in enumerate((40, 400, 4000)):
        run(engine, Open(number), Extend(number, [number + 1] * history), Sample(number, GREEDY, 1))
        for _ in range(2):  # the first makes buffers and rotations
            engine.submit([Extend(number, [5, 6, 7, 8]), Sample(number, GREEDY, 8)])
            engine.step()
            engine.step()
            run(engine, Pause(number))
        engine.submit([Extend(number, [9, 9, 9, 9]), Sample(number, GREEDY, 8)])
        calls[history] = calls_made_by(lambda: (engine.step(), engine.step()))
        run(engine, Pause(number))
    assert max(calls.values()) - min(calls.values()) <= 12, calls  # now and then a block becomes full
