"""The fake scheduler against the real one: the same commands give the same events, step by step.

Tokens are forced, so that the model does not matter, and prompts are shorter than a chunk, so that the order
in which they are prefilled does not show.
"""

from __future__ import annotations

from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import (
    Command,
    EngineConfig,
    Event,
    Extend,
    Failed,
    Fork,
    Open,
    Pause,
    Prefilled,
    Release,
    Sample,
    Sampled,
    Sampling,
    Stopped,
    Truncate,
)
from engine.scheduler import Scheduler
from tests.fake_scheduler import FakeScheduler

CONFIG = EngineConfig(model="random:0", kv_memory=1 << 22, max_context=24, prefix_cache=False)

Action: TypeAlias = tuple[str, int, int]  # what, which of the sequences, how much

actions = st.lists(
    st.tuples(
        st.sampled_from(["extend", "sample", "pause", "truncate", "fork", "release", "step", "step"]),
        st.integers(0, 2),
        st.integers(0, 30),
    ),
    max_size=40,
)


def command_of(what: str, sequence: int, amount: int, unused: int) -> Command:
    tokens = list(range(amount))
    match what:
        case "extend":
            return Extend(sequence=sequence, tokens=tokens)
        case "sample":
            return Sample(sequence=sequence, sampling=Sampling(), max_tokens=8, forced=tokens)
        case "pause":
            return Pause(sequence=sequence)
        case "truncate":
            return Truncate(sequence=sequence, length=amount)
        case "fork":
            return Fork(sequence=sequence, child=unused)
        case _:
            return Release(sequence=sequence)


def outcome(scheduler: FakeScheduler | Scheduler, command: Command) -> type[Exception] | None:
    try:
        scheduler.submit([command])
    except (KeyError, ValueError) as error:
        return type(error)
    return None


def essence(events: list[Event]) -> list[tuple[object, ...]]:
    """What must agree of a step's events, by sequence: all but times and words."""
    described: list[tuple[object, ...]] = []
    for event in sorted(events, key=lambda event: event.sequence):
        match event:
            case Prefilled():
                described.append((event.sequence, "prefilled", event.prefilled, event.reused))
            case Sampled():
                described.append((event.sequence, "sampled", *event.tokens))
            case Stopped():
                described.append((event.sequence, "stopped", event.reason))
            case Failed():
                described.append((event.sequence, "failed", event.code))
            case _:
                described.append((event.sequence, "began"))
    return described


@settings(deadline=None)
@given(actions=actions)
def test_the_same_commands_give_the_same_events(actions: list[Action]) -> None:
    fake, real = FakeScheduler(CONFIG), Scheduler(CONFIG)
    sequences = [1, 2, 3]
    unused = 4
    for scheduler in (fake, real):
        scheduler.submit([Open(sequence=sequence) for sequence in sequences])
    for what, which, amount in [*actions, *[("step", 0, 0)] * 10]:
        if what == "step":
            assert fake.has_work == real.has_work
            assert essence(fake.step().events) == essence(real.step().events)
        else:
            if what == "fork" and sequences[which] in fake.failed:
                continue
            command = command_of(what, sequences[which], amount, unused)
            result = outcome(fake, command)
            assert result == outcome(real, command)
            if what == "fork" and result is None:
                sequences[which] = unused
                unused += 1
        ours, theirs = fake.statistics(), real.statistics()
        assert ours.sequences_running == theirs.sequences_running
        assert ours.sequences_held == theirs.sequences_held
        assert ours.tokens_sampled == theirs.tokens_sampled
        assert ours.tokens_prefilled == theirs.tokens_prefilled
    fake.check_integrity()
    real.check_integrity()
