"""The handle around a scheduler without a model: inline on a virtual clock, and in a real process.

Nothing here sleeps on the real clock, and every test is under a deadline. What a leg must sample is
computed from the fake's rule, so each comparison is exact.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from engine import frames, handle, worker
from engine.handle import (
    Engine,
    EngineSequence,
    EngineUnavailable,
    InlineEngine,
    ProcessEngine,
    SequenceLost,
)
from engine.messages import (
    Began,
    Command,
    Commands,
    EngineConfig,
    EngineStatistics,
    Event,
    Failed,
    FromEngine,
    Prefilled,
    Ready,
    Sampled,
    Sampling,
    Step,
    Stopped,
)
from engine.routing import FIRST_BACKOFF, HEALTHY_AFTER, MAX_BACKOFF
from engine.worker import Channel, ServerGone
from tests.fake_scheduler import (
    CLOSE_ALL_AND_HANG,
    HANG,
    HANGING,
    RAISE,
    FakeScheduler,
    hash_of_last,
)

CONFIG = EngineConfig(model="fake")
FAULTY = "tests.fake_scheduler:FaultyScheduler"
FAKE = "tests.fake_scheduler:FakeScheduler"
DEADLINE = 30.0  # seconds: far more than any test needs, far less than a suite that hangs
WORKER = [sys.executable, "-m", "engine.worker"]


def continuation(ledger: list[int], count: int) -> list[int]:
    """The `count` tokens that the fake samples after `ledger`."""
    ledger = list(ledger)
    start = len(ledger)
    for _ in range(count):
        ledger.append(hash_of_last(ledger))
    return ledger[start:]


def inline(config: EngineConfig = CONFIG) -> InlineEngine:
    return InlineEngine(lambda: FakeScheduler(config))


def in_process(scheduler: str = FAKE, config: EngineConfig = CONFIG) -> ProcessEngine:
    return ProcessEngine(config, threads=1, scheduler=scheduler)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[None]:
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            yield
            nursery.cancel_scope.cancel()


def begin(sequence: EngineSequence, max_tokens: int, forced: list[int] | None = None) -> None:
    sequence.sample(Sampling(), max_tokens=max_tokens, stop_tokens=(), forced=forced)


async def events_of_leg(sequence: EngineSequence) -> list[Event]:
    events: list[Event] = []
    while not (events and isinstance(events[-1], Stopped | Failed)):
        events += await sequence.events()
    return events


async def events_until_lost(sequence: EngineSequence) -> list[Event]:
    events: list[Event] = []
    try:
        while True:
            events += await sequence.events()
    except SequenceLost:
        return events


def tokens_in(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Sampled) for token in event.tokens]


async def sample(sequence: EngineSequence, max_tokens: int) -> list[int]:
    begin(sequence, max_tokens)
    return tokens_in(await events_of_leg(sequence))


# Frames


@given(payloads=st.lists(st.binary(max_size=300)), cuts=st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_cut_of_the_stream(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads)
    reader = frames.FrameReader()
    received: list[bytearray] = []
    turn = 0
    while stream:
        size = cuts[turn % len(cuts)]
        received += reader.feed(stream[:size])
        stream = stream[size:]
        turn += 1
    assert received == payloads


# Routing and merging


async def test_events_reach_their_own_sequence(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        prompts = [[1, 2, 3], [400], [7] * 1000]
        sequences = [engine.open() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.extend(prompt)
            begin(sequence, 20)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            events = await events_of_leg(sequence)
            assert {event.sequence for event in events} == {sequence.id}
            assert tokens_in(events) == continuation(prompt, 20)


async def test_verbs_of_one_turn_are_one_message(autojump_clock: trio.testing.MockClock) -> None:
    messages: list[list[str]] = []

    class Recording(FakeScheduler):
        def submit(self, commands: Iterable[Command]) -> None:
            commands = list(commands)
            messages.append([type(command).__name__ for command in commands])
            super().submit(commands)

    engine = InlineEngine(lambda: Recording(CONFIG))
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1, 2])
        begin(sequence, 2)
        await events_of_leg(sequence)
    assert [message for message in messages if message] == [["Open", "Extend", "Sample"]]


async def test_a_slow_reader_gets_sampled_tokens_merged(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1, 2, 3])
        begin(sequence, 50)
        await trio.testing.wait_all_tasks_blocked()
        events = await sequence.events()
        assert [type(event) for event in events] == [Began, Prefilled, Sampled, Stopped]
        assert tokens_in(events) == continuation([1, 2, 3], 50)


@given(reads=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=6))
async def test_merging_changes_neither_tokens_nor_order(reads: list[list[int]]) -> None:
    """Each inner list arrives between two reads: 0 is another event, else a `Sampled` of so many tokens."""
    sequence = inline().adopt_new_sequence()
    token = 0
    for arriving in reads:
        flat: list[object] = []  # tokens, and other events, in order
        for count in arriving:
            if count == 0:
                other = Began(sequence=sequence.id, at=float(token))
                sequence.arrive(other)
                flat.append(other)
            else:
                tokens = list(range(token, token + count))
                token += count
                sequence.arrive(Sampled(sequence=sequence.id, tokens=tokens))
                flat.extend(tokens)
        if not arriving:
            continue
        merged = await sequence.events()
        read: list[object] = []
        for event in merged:
            read.extend(event.tokens if isinstance(event, Sampled) else [event])
        assert read == flat
        kinds = [isinstance(event, Sampled) for event in merged]
        assert (True, True) not in pairwise(kinds)


@pytest.mark.parametrize("checkpoints", range(12))
async def test_cancelling_a_reader_loses_nothing(
    checkpoints: int, autojump_clock: trio.testing.MockClock
) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([5])
        begin(sequence, 10)
        events: list[Event] = []

        async def read_on(scope: trio.CancelScope) -> None:
            with scope:
                while True:
                    events.extend(await sequence.events())

        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_on, scope)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            scope.cancel()
        if not (events and isinstance(events[-1], Stopped)):
            events += await events_of_leg(sequence)
        assert tokens_in(events) == continuation([5], 10)


# The verbs


async def test_pause_truncate_and_fork(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1, 2, 3])
        begin(sequence, 1000)
        events = await sequence.events()
        sequence.pause()
        events += await events_of_leg(sequence)
        assert isinstance(events[-1], Stopped)
        assert events[-1].reason == "paused"
        sampled = tokens_in(events)
        assert 0 < len(sampled) < 1000
        assert sampled == continuation([1, 2, 3], len(sampled))

        sequence.truncate(2)
        child = sequence.fork()
        child.extend([9])
        assert await sample(child, 5) == continuation([1, 2, 9], 5)
        assert await sample(sequence, 5) == continuation([1, 2], 5)


async def test_a_verb_out_of_turn_harms_its_caller_only(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 3)
        for verb in (
            lambda: sequence.extend([2]),
            lambda: begin(sequence, 3),
            lambda: sequence.truncate(1),
            sequence.fork,
        ):
            with pytest.raises(RuntimeError, match="is sampling"):
                verb()
        assert tokens_in(await events_of_leg(sequence)) == continuation([1], 3)
        assert engine.statistics().sequences_open == 1
        sequence.extend([2])


async def test_a_released_sequence_is_over(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence, other = engine.open(), engine.open()
        other.extend([1])
        sequence.extend([1])
        begin(sequence, 1_000_000)
        await sequence.events()

        sequence.release()
        sequence.release()
        with pytest.raises(trio.ClosedResourceError):
            await sequence.events()
        with pytest.raises(trio.ClosedResourceError):
            sequence.extend([1])
        with pytest.raises(trio.ClosedResourceError):
            sequence.fork()
        assert await sample(other, 3) == continuation([1], 3)
        statistics = engine.statistics()
        assert statistics.sequences_open == 1
        assert statistics.engine.sequences_held == 1
        assert statistics.engine.sequences_running == 0


async def test_what_was_not_read_goes_with_the_release(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 3)
        await trio.testing.wait_all_tasks_blocked()
        sequence.release()
        with pytest.raises(trio.ClosedResourceError):
            await sequence.events()


async def test_release_wakes_a_waiting_reader(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await sequence.events()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            sequence.release()


async def test_a_failed_sequence_disturbs_no_other(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline(EngineConfig(model="fake", max_context=10))
    async with running(engine):
        failing, other = engine.open(), engine.open()
        other.extend([1])
        failing.extend([1] * 11)
        # These cross the failure on the way: the engine must take them for what they are.
        failing.extend([1])
        begin(failing, 3)
        failing.pause()
        failing.truncate(1)
        child = failing.fork()
        child.extend([1])
        begin(child, 3)
        (failed,) = await failing.events()
        assert isinstance(failed, Failed)
        assert failed.code == "context_length_exceeded"
        (child_failed,) = await child.events()
        assert isinstance(child_failed, Failed)
        # And these come after it.
        failing.extend([1])
        assert failing.fork().lost
        with pytest.raises(trio.ClosedResourceError, match="failed"):
            await failing.events()
        failing.release()
        assert await sample(other, 3) == continuation([1], 3)
        assert engine.statistics().sequences_open == 1


# Life and death, inline


async def test_before_it_is_ready_there_is_no_engine(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    assert engine.statistics().state == "starting"
    with pytest.raises(EngineUnavailable, match="loading"):
        engine.open()
    with pytest.raises(EngineUnavailable):
        _ = engine.info
    async with running(engine):
        assert engine.statistics().state == "ready"
        assert engine.info.vocabulary == 1024
        sequence = engine.open()
    assert engine.state == "failed"
    with pytest.raises(SequenceLost, match="stopped"):
        await sequence.events()


@pytest.mark.parametrize("tokens_before_crash", [0, 1, 7, 39])
async def test_a_crash_loses_sequences_and_the_ledger_brings_them_back(
    tokens_before_crash: int, autojump_clock: trio.testing.MockClock
) -> None:
    engine = inline()
    async with running(engine):
        ledger = [1, 2, 3]
        sequence = engine.open()
        sequence.extend(ledger)
        begin(sequence, 40)
        sampled: list[int] = []
        while len(sampled) < tokens_before_crash:
            sampled += tokens_in(await sequence.events())
        sequence.pause()  # is still here when the engine dies, and must not reach the next one
        engine.crash()
        assert sequence.lost
        assert engine.state == "restarting"
        with pytest.raises(EngineUnavailable):
            engine.open()
        sampled += tokens_in(await events_until_lost(sequence))
        sequence.extend([1])
        sequence.pause()
        with pytest.raises(SequenceLost):
            await sequence.fork().events()
        sequence.release()
        assert sequence.lost

        await engine.wait_ready()
        assert engine.restarts == 1
        again = engine.open()
        assert again.id > sequence.id
        again.extend(ledger)
        again.extend(sampled, sampled=True)
        sampled += await sample(again, 50 - len(sampled))
        assert sampled == continuation(ledger, 50)


async def test_a_death_wakes_a_waiting_reader(autojump_clock: trio.testing.MockClock) -> None:
    engine = inline()
    async with running(engine):
        sequence = engine.open()

        async def read() -> None:
            with pytest.raises(SequenceLost, match="crashed on request"):
                await sequence.events()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            engine.crash()


async def test_restarts_back_off_and_forget_after_a_while_of_health(
    autojump_clock: trio.testing.MockClock,
) -> None:
    engine = inline()
    delays: list[float] = []

    async def crash_and_wait() -> None:
        engine.crash()
        died_at = trio.current_time()
        await engine.wait_ready()
        delays.append(trio.current_time() - died_at)

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            await engine.wait_ready()
            for _ in range(9):
                await crash_and_wait()
            await trio.sleep(HEALTHY_AFTER)
            await crash_and_wait()
            await crash_and_wait()
            nursery.cancel_scope.cancel()
    doubling = [min(FIRST_BACKOFF * 2**n, MAX_BACKOFF) for n in range(8)]
    assert delays == pytest.approx([0, *doubling, 0, FIRST_BACKOFF])
    assert doubling[-1] == MAX_BACKOFF


async def test_a_scheduler_that_cannot_be_made_fails_for_good(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def make() -> FakeScheduler:
        raise EngineUnavailable("no weights here")

    engine = InlineEngine(make)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        with trio.fail_after(DEADLINE), pytest.raises(EngineUnavailable, match="no weights here"):
            await engine.wait_ready()
        assert engine.state == "failed"
        assert engine.reason == "no weights here"
        nursery.cancel_scope.cancel()


# A real process


async def test_a_process_samples_what_the_inline_engine_samples() -> None:
    engine = in_process()
    async with running(engine):
        prompts = [[n] * (n + 1) for n in range(100)]
        sequences = [engine.open() for _ in prompts]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.extend(prompt)
            begin(sequence, 10)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert tokens_in(await events_of_leg(sequence)) == continuation(prompt, 10)


async def test_a_process_takes_a_ledger_of_128k_tokens() -> None:
    engine = in_process()
    async with running(engine):
        ledger = [n % 512 for n in range(131_000)]
        forced = [n % 500 for n in range(60)]
        sequence = engine.open()
        sequence.extend(ledger)
        begin(sequence, 60, forced=forced)
        events = await events_of_leg(sequence)
        prefilled = [event.prefilled for event in events if isinstance(event, Prefilled)]
        assert prefilled == [131_000]
        assert tokens_in(events) == forced
        assert await sample(sequence, 3) == continuation(ledger + forced, 3)


async def test_the_process_is_set_up_for_the_engine_alone() -> None:
    engine = ProcessEngine(CONFIG, threads=3, scheduler="tests.fake_scheduler:make_describing")
    async with running(engine):
        assert json.loads(engine.info.path) == {"threads": "3", "torch": False, "trio": False}


async def test_statistics_of_an_idle_engine_are_fresh() -> None:
    engine = in_process()
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1, 2, 3])
        begin(sequence, 100_000)
        await sequence.events()
        sequence.release()  # what the engine has sampled until it reads this comes for nobody
        while engine.statistics().engine.sequences_running:
            await trio.lowlevel.checkpoint()
        assert engine.statistics().engine.sequences_held == 0
        assert engine.statistics().engine.blocks_free == engine.info.kv_blocks


async def test_kill_9_loses_time_and_no_tokens() -> None:
    engine = in_process()
    async with running(engine):
        ledger = [1, 2, 3]
        sequence = engine.open()
        sequence.extend(ledger)
        begin(sequence, 100_000)
        sampled = tokens_in(await sequence.events())
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        sampled += tokens_in(await events_until_lost(sequence))
        assert engine.state == "restarting"
        with pytest.raises(EngineUnavailable):
            engine.open()
        await engine.wait_ready()
        assert engine.restarts == 1

        again = engine.open()
        again.extend(ledger)
        again.extend(sampled, sampled=True)
        sampled += await sample(again, 10)
        assert sampled == continuation(ledger, len(sampled))


async def test_an_exception_in_a_step_is_a_death_with_an_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = in_process(FAULTY)
    async with running(engine):
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 5, forced=[1, 2, RAISE, 4, 5])
        await events_until_lost(sequence)
        while engine.reason == "the engine process ended":  # until it is reaped
            await trio.lowlevel.checkpoint()
        assert engine.reason == "the engine process ended, exit code 1"
        await engine.wait_ready()
    assert "RuntimeError: the fatal token was sampled" in capfd.readouterr().err


async def test_a_model_that_cannot_be_loaded_is_not_tried_again() -> None:
    engine = in_process("tests.fake_scheduler:make_unusable")
    with trio.fail_after(DEADLINE):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            with pytest.raises(EngineUnavailable, match="fake: there is no such model"):
                await engine.wait_ready()
            assert engine.state == "failed"
            assert engine.process_id is None
            assert engine.restarts == 0
            nursery.cancel_scope.cancel()


async def test_cancelling_run_leaves_no_process() -> None:
    engine = in_process()
    async with running(engine):
        process_id = engine.process_id
        assert process_id is not None
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 100_000)
        await sequence.events()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    await events_until_lost(sequence)


async def test_cancelling_run_ends_a_process_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(handle, "EXIT_GRACE", math.inf)
    engine = in_process(FAULTY)
    async with running(engine):
        process_id = engine.process_id
        assert process_id is not None
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 2, forced=[HANG])
        while HANGING not in capfd.readouterr().err:
            await trio.lowlevel.checkpoint()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


async def test_sequences_are_lost_before_the_process_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "EXIT_GRACE", math.inf)
    engine = in_process(FAULTY)
    async with running(engine):
        process_id = engine.process_id
        assert process_id is not None
        sequence = engine.open()
        sequence.extend([1])
        begin(sequence, 2, forced=[1, CLOSE_ALL_AND_HANG])
        await events_until_lost(sequence)
        assert engine.state == "restarting"
        os.kill(process_id, signal.SIGKILL)
        await engine.wait_ready()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_the_whole_group_is_the_servers_business(number: signal.Signals) -> None:
    engine = in_process()
    async with running(engine):
        assert engine.process_id is not None
        os.kill(engine.process_id, number)
        sequence = engine.open()
        sequence.extend([4])
        assert await sample(sequence, 5) == continuation([4], 5)
        assert engine.restarts == 0


SERVER = """
import sys, trio
from engine.handle import ProcessEngine
from engine.messages import EngineConfig, Sampling

async def main():
    async with trio.open_nursery() as nursery:
        config = EngineConfig(model="fake")
        engine = ProcessEngine(config, threads=1, scheduler="tests.fake_scheduler:FakeScheduler")
        await nursery.start(engine.run)
        await engine.wait_ready()
        if sys.argv[1] == "busy":
            sequence = engine.open()
            sequence.extend([1])
            sequence.sample(Sampling(), max_tokens=1_000_000, stop_tokens=())
            await sequence.events()
        print("up", flush=True)

trio.run(main)
"""


@pytest.mark.parametrize("engine_is", ["busy", "idle"])
async def test_the_process_ends_when_the_server_is_killed(engine_is: str) -> None:
    """The engine inherits the server's stderr, so that pipe is at its end only when both are gone."""
    with trio.fail_after(DEADLINE):
        server = await trio.lowlevel.open_process(
            [sys.executable, "-c", SERVER, engine_is], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert server.stdout is not None
        assert server.stderr is not None
        async with server.stdout, server.stderr:
            printed = b""
            while b"up" not in printed:
                received = await server.stdout.receive_some()
                assert received, "the server ended early"
                printed += received
            server.kill()
            while await server.stderr.receive_some():
                pass
        await server.wait()


# What the worker sends, and when


def test_sampled_tokens_wait_for_others_and_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    report = worker.Report()
    report.add(Step([], EngineStatistics(steps=1)))
    assert not report.is_due(0.0), "nothing to tell"
    report.add(Step([Sampled(1, [7])], EngineStatistics(steps=2)))
    assert report.is_due(0.0), "nothing was sent for long"
    assert report.take() == Step([Sampled(1, [7])], EngineStatistics(steps=2))
    for token in (8, 9):
        report.add(Step([Sampled(1, [token]), Sampled(2, [token])], EngineStatistics(steps=token)))
        assert not report.is_due(0.0)
    assert report.is_due(worker.GATHER), "nothing else comes meanwhile"
    now += worker.GATHER
    assert report.is_due(0.0)
    assert report.take().events == [Sampled(1, [8, 9]), Sampled(2, [8, 9])]
    report.add(Step([Sampled(1, [10])], EngineStatistics()))
    report.add(Step([Sampled(1, [11]), Stopped(1, "stop", 0.0)], EngineStatistics()))
    assert report.is_due(0.0), "the end of a leg waits for nothing"
    assert report.take().events == [Sampled(1, [10, 11]), Stopped(1, "stop", 0.0)]
    assert not report.is_due(0.0)


# The worker, spoken to directly


def test_the_other_end_closed_means_that_the_server_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = Channel(theirs)
        assert channel.poll() == []
        ours.sendall(frames.encode(CONFIG))
        assert len(channel.poll()) == 1
        ours.close()
        for talk in (channel.poll, channel.receive, lambda: channel.send(Step([], EngineStatistics()))):
            with pytest.raises(ServerGone):
                talk()


def test_the_worker_says_ready_answers_and_ends_with_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen([*WORKER, str(theirs.fileno()), FAKE], pass_fds=[theirs.fileno()])
        ours.settimeout(DEADLINE)
        reader = frames.FrameReader()
        ours.sendall(frames.encode(CONFIG))
        payloads: list[bytearray] = []
        while not payloads:
            payloads += reader.feed(ours.recv(frames.READ_BYTES))
        (message,) = (msgspec.msgpack.decode(payload, type=FromEngine) for payload in payloads)
        assert isinstance(message, Ready)
        ours.sendall(frames.encode(Commands(commands=[])))
        (payload,) = reader.feed(ours.recv(frames.READ_BYTES))
        message = msgspec.msgpack.decode(payload, type=FromEngine)
        assert isinstance(message, Step)
        assert message.events == []
    assert process.wait(DEADLINE) == 0
