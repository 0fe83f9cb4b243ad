"""The handle, inline and with a real process, around a scheduler without a model."""

from __future__ import annotations

import trio

from engine.handle import Engine, InlineEngine, ProcessEngine
from engine.messages import EngineConfig, Sampled, Sampling, Stopped
from tests.fake_scheduler import FakeScheduler

CONFIG = EngineConfig(model="fake")
FAKE = "tests.fake_scheduler:FakeScheduler"


async def leg(sequence, max_tokens):
    sequence.sample(Sampling(), max_tokens=max_tokens, stop_tokens=())
    tokens = []
    while True:
        for event in await sequence.events():
            if isinstance(event, Sampled):
                tokens += event.tokens
            elif isinstance(event, Stopped):
                return tokens


async def test_one_leg(autojump_clock, nursery):
    engine = InlineEngine(lambda: FakeScheduler(CONFIG))
    with trio.fail_after(5):
        await nursery.start(engine.run)
        await engine.wait_ready()
        s = engine.open()
        s.extend([1, 2, 3])
        print(await leg(s, 5))
    nursery.cancel_scope.cancel()


async def test_process_leg(nursery):
    engine = ProcessEngine(CONFIG, threads=1, scheduler=FAKE)
    with trio.fail_after(10):
        await nursery.start(engine.run)
        await engine.wait_ready()
        s = engine.open()
        s.extend([1, 2, 3])
        print(await leg(s, 5))
        print(engine.statistics())
    nursery.cancel_scope.cancel()
