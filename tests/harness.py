"""A whole service in one event loop, for tests: inline engine, tiny random model, scripts of forced legs, and
sockets in memory.

It knows what the server's edge does with a socket, and nothing of what a test expects. Strategy: everything
is deterministic and nothing sleeps. The engine steps in the test's own loop, so a virtual clock
(`autojump_clock`) moves only when nobody has anything to do, and a test that would wait for ever runs into
`DEADLINE` at once. A `FakeSocket` has the four verbs of `protocol.edge.socket.Socket`; its `Peer` is the
client.

    look = [[said("let me look"), call("read_file", path="a")], [said("done")]]
    async with serving({"look": look}) as bench:
        peer = bench.connect()
        peer.create("forced:look", input="what is in a?")
        done = await peer.until("response.done")
        peer.append(result(done, "a is empty"))
        completed = await peer.until("response.completed")
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import trio
import trio.testing

import protocol.service
from engine.handle import EngineUnavailable, InlineEngine
from engine.messages import EngineConfig, Sampling, Step
from engine.scheduler import Scheduler
from protocol.dialects.base import CallDelta, CallEnded, CallStarted, Dialect, Parsed, Parser, TextDelta
from protocol.dialects.load import load_dialect
from protocol.edge.access import LOCAL, Caller
from protocol.edge.socket import BinaryFrame, Socket, SocketClosed
from protocol.models import Model
from protocol.response import Run
from protocol.service import Service
from protocol.settings import Settings
from protocol.websocket import serve_connection
from protocol.wire import Tool

DEADLINE = 20_000.0  # s, of everything in one `serving` block: longer than any timeout of the server
KV_MEMORY = 1 << 24  # bytes: 32768 tokens of the tiny model
RANDOM_MODEL = "random"  # what the random model is called when it speaks for itself

Json: TypeAlias = dict[str, Any]
Script: TypeAlias = Sequence[Sequence[Json]]

TOOLS: list[Json] = [
    {"type": "function", "name": "read_file", "parameters": {"type": "object"}},
    {"type": "function", "name": "run_tests", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch"},
]
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")

# ---- items


def said(text: str) -> Json:
    """A message of the assistant, as a script or an echo has it."""
    return {"type": "message", "role": "assistant", "content": text}


def thought(text: str) -> Json:
    """Reasoning, as a script or an echo has it."""
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(name: str, **arguments: Any) -> Json:
    """A call to a function tool, for a script."""
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


def custom_call(name: str, text: str) -> Json:
    """A call to a custom tool, for a script."""
    return {"type": "custom_tool_call", "name": name, "input": text}


def user(text: str) -> Json:
    """A message of the user."""
    return {"type": "message", "role": "user", "content": text}


def result(done: Json, output: str = "1", which: int = 0) -> Json:
    """The result of one of the calls that a `response.done` lists."""
    return answer(done["required_input"][which], output)


def results(done: Json, *outputs: str) -> list[Json]:
    """The results of all calls that a `response.done` lists, in call order; "1" for each unless given."""
    required = done["required_input"]
    assert not outputs or len(outputs) == len(required)
    return [answer(each, text) for each, text in zip(required, outputs or ["1"] * len(required), strict=True)]


def answer(required: Json, output: str = "1") -> Json:
    """The result that one entry of `required_input` asks for."""
    return {"type": required["type"], "call_id": required["call_id"], "output": output}


# ---- the socket


class FakeSocket:
    """`protocol.edge.socket.Socket` in memory. The client's end is `Peer`."""

    def __init__(self, *, send_timeout: float) -> None:
        self.to_server: deque[str | bytes] = deque()
        self.to_client: deque[str] = deque()
        self.room: float = math.inf  # messages that the client will still take
        self.answers_pings = True
        self.closed: tuple[int, str] | None = None
        self._send_timeout = send_timeout
        self._changed = trio.Event()

    @property
    def close_code(self) -> int | None:
        return None if self.closed is None else self.closed[0]

    async def recv(self) -> str:
        await trio.lowlevel.checkpoint()
        await self.until(lambda: bool(self.to_server) or self.closed is not None)
        if not self.to_server:
            raise self._as_closed()
        message = self.to_server.popleft()
        if isinstance(message, bytes):
            raise BinaryFrame
        return message

    async def send(self, text: str) -> None:
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(self._send_timeout):
            await self.until(lambda: self.room > 0 or self.closed is not None)
        if self.room <= 0:
            self.close(1006, f"a message was not taken in {self._send_timeout:g} s")
        if self.closed is not None:
            raise self._as_closed()
        self.room -= 1
        self.to_client.append(text)
        self.change()

    async def ping(self, timeout: float) -> None:
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(timeout):
            await self.until(lambda: self.answers_pings or self.closed is not None)
        if not self.answers_pings:
            self.close(1006, f"no pong in {timeout:g} s")
        if self.closed is not None:
            raise self._as_closed()

    async def aclose(self, code: int, reason: str) -> None:
        self.close(code, reason)

    def close(self, code: int, reason: str) -> None:
        """Close it, whoever does; the first time counts. What the server has not read is gone."""
        if self.closed is None:
            self.closed = code, reason
            self.to_server.clear()
        self.change()

    def change(self) -> None:
        """Wake everybody who waits on this socket."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is so."""
        while not condition():
            await self._changed.wait()

    def _as_closed(self) -> SocketClosed:
        assert self.closed is not None
        return SocketClosed(*self.closed)


class Peer:
    """A client. `say` and its kin do not wait; `heard` has every event that was read."""

    def __init__(self, socket: FakeSocket) -> None:
        self.socket = socket
        self.heard: list[Json] = []

    @property
    def closed(self) -> tuple[int, str] | None:
        """Code and reason that the socket was closed with."""
        return self.socket.closed

    def say(self, type: str, **fields: Any) -> None:
        """Send an event of this type."""
        self.say_raw(json.dumps({"type": type, **fields}))

    def say_raw(self, message: str | bytes) -> None:
        """Send a text message as it is; bytes make a binary one."""
        if self.socket.closed is None:
            self.socket.to_server.append(message)
            self.socket.change()

    def create(self, model: str, *, input: Any = "hello", tools: Any = TOOLS, **fields: Any) -> None:
        """Send `response.create`, held unless told otherwise."""
        self.say(
            "response.create",
            **{"lifecycle": "held", "model": model, "input": input, **fields, "tools": tools},
        )

    def append(self, *items: Json, **fields: Any) -> None:
        """Send `response.append`."""
        self.say("response.append", input=list(items), **fields)

    def hang_up(self, code: int = 1006) -> None:
        """Go away; 1006: without a word."""
        self.socket.close(code, "the client went away")

    def stall(self, room: int = 0) -> None:
        """Take this many more messages and no others."""
        self.socket.room = room

    def go_on(self) -> None:
        """Take messages again."""
        self.socket.room = math.inf
        self.socket.change()

    def read_now(self) -> list[Json]:
        """The events that have come and were not read. Does not wait."""
        events = [cast(Json, json.loads(frame)) for frame in self.socket.to_client]
        self.socket.to_client.clear()
        self.heard += events
        return events

    async def next(self) -> Json:
        """The next event. Raises SocketClosed when none will come."""
        await self.socket.until(lambda: bool(self.socket.to_client) or self.socket.closed is not None)
        if not self.socket.to_client:
            assert self.socket.closed is not None
            raise SocketClosed(*self.socket.closed)
        event: Json = json.loads(self.socket.to_client.popleft())
        self.heard.append(event)
        return event

    async def until(self, *types: str) -> Json:
        """Read up to an event of one of these types, and return it. One that ends a response or reports an
        error, and was not asked for, is an AssertionError.
        """
        while True:
            event = await self.next()
            if event["type"] in types:
                return event
            assert event["type"] not in TERMINAL, event

    async def until_closed(self) -> tuple[int, str]:
        """Wait until the socket is closed, by whichever side; `heard` then has everything."""
        await self.socket.until(lambda: self.socket.closed is not None)
        self.read_now()
        assert self.socket.closed is not None
        return self.socket.closed


# ---- the service


class StoppableScheduler(Scheduler):
    """A scheduler that can be told to do nothing for a while, as one that is busy with others."""

    is_stopped = False

    @property
    def has_work(self) -> bool:
        return not self.is_stopped and super().has_work

    def step(self) -> Step:
        return Step([], self.statistics()) if self.is_stopped else super().step()


class Bench:
    """A running service, its engine, and the clients of it."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine = InlineEngine(self._make_scheduler)
        self.schedulers: list[StoppableScheduler] = []  # one a life of the engine
        self.service: Service  # set before anyone else sees this
        self.nursery: trio.Nursery  # too
        self._is_broken = False

    @property
    def scheduler(self) -> StoppableScheduler:
        """The one that works, or will work when the engine is back."""
        return self.schedulers[-1]

    @property
    def runs(self) -> list[Run]:
        """Those that have not ended, in the order of their creation."""
        return list(self.service._runs.values())

    def model(self, model_id: str) -> Model:
        """One of the models that are offered."""
        return self.service._models[model_id]

    def connect(self, *, prototype: bool = False, caller: Caller = LOCAL) -> Peer:
        """A new client with a connection of its own, served as the server's edge serves it."""
        socket = FakeSocket(send_timeout=self.service.settings.send_timeout)

        async def serve() -> None:
            code, reason = 1001, "the server is shutting down"
            try:
                await serve_connection(
                    cast(Socket, socket),
                    service=self.service,
                    caller=caller,
                    prototype=prototype,
                )
                code, reason = 1000, ""
            finally:
                await socket.aclose(code, reason)

        self.nursery.start_soon(serve)
        return Peer(socket)

    @contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """In this block the engine takes commands and does nothing about them, so that a clock can move."""
        scheduler = self.scheduler
        scheduler.is_stopped = True
        try:
            yield
        finally:
            scheduler.is_stopped = False
            self.engine.open().release()  # wakes it

    def lose_engine_for_good(self) -> None:
        """The engine dies, and there will be no other."""
        self._is_broken = True
        self.engine.crash()

    async def settle(self) -> None:
        """Wait until nothing moves any more: held runs wait, the engine is idle, everything is sent."""
        await trio.testing.wait_all_tasks_blocked()

    async def check_nothing_is_left(self) -> None:
        """No run, no sequence, no block in use. AssertionError otherwise."""
        await self.settle()
        assert not self.runs, [(run.state.id, run.state.phase) for run in self.runs]
        await self.check_kv_is_back()

    async def check_kv_is_back(self) -> None:
        """No sequence is open and no block in use. AssertionError otherwise."""
        await self.engine.wait_ready()
        await self.settle()
        assert self.engine.statistics().sequences_open == 0
        self.scheduler.check_integrity()
        statistics = self.scheduler.statistics()
        assert statistics.sequences_running == statistics.sequences_held == 0
        assert statistics.blocks_running == statistics.blocks_held == 0

    def _make_scheduler(self) -> StoppableScheduler:
        if self._is_broken:
            raise EngineUnavailable("broken by a test")
        self.schedulers.append(StoppableScheduler(self.config))
        return self.scheduler


@asynccontextmanager
async def serving(
    scripts: Mapping[str, Script] | None = None, *, engine: Json | None = None, **settings: Any
) -> AsyncIterator[Bench]:
    """A service that is ready. Its models are "random", the tiny model speaking for itself; "calling", the
    same as `CallingDialect` hears it; and "forced:NAME" for each script.

    `engine` changes fields of EngineConfig (`max_context`, `kv_memory`, `prefill_chunk`, ...), `settings`
    those of Settings. Leaving the block cancels whatever is left. Everything in it is under `DEADLINE`.
    """
    bench = Bench(EngineConfig(**{"model": "random:1", "kv_memory": KV_MEMORY, **(engine or {})}))
    with tempfile.TemporaryDirectory() as folder:
        files = write_scripts(Path(folder), scripts or {})
        bench.service = Service(Settings(scripts=files, model=RANDOM_MODEL, **settings), bench.engine)
    async with trio.open_nursery() as bench.nursery:
        with clock_stands_still(), patch.object(protocol.service, "load_dialect", cached_dialect):
            await bench.nursery.start(bench.service.run)
            while bench.service.health()[0] != 200:
                assert bench.service.health()[1]["status"] != "failed", bench.service.health()
                await trio.lowlevel.checkpoint()
        model = bench.model(RANDOM_MODEL)
        bench.service._models["calling"] = Model(
            "calling", model.info, CallingDialect(model.dialect), defaults=Sampling(temperature=1.0)
        )
        with trio.fail_after(DEADLINE):
            yield bench
        bench.nursery.cancel_scope.cancel()


async def turns(count: int) -> None:
    """Let the event loop go round this many times: about as many steps of an engine that works."""
    for _ in range(count):
        await trio.lowlevel.checkpoint()


class CallingDialect:
    """What a random model says, heard as words and calls: every twelfth token of a turn is a call to
    `read_file`, one in 64 of all there are ends the turn. All else is the real dialect's.
    """

    CALL_EVERY = 12
    STOP_EVERY = 64

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.stop_tokens = (*dialect.stop_tokens, *range(100, 1024, self.STOP_EVERY))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dialect, name)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return CallingParser()


class CallingParser:
    """Reads one turn of a `CallingDialect`."""

    def __init__(self) -> None:
        self._count = 0

    def feed(self, tokens: Sequence[int]) -> list[Parsed]:
        parsed: list[Parsed] = []
        for token in tokens:
            self._count += 1
            if self._count % CallingDialect.CALL_EVERY:
                parsed.append(TextDelta(f"{token} "))
            else:
                parsed += [CallStarted("read_file"), CallDelta(f'{{"path":"{token}"}}'), CallEnded(True)]
        return parsed

    def finish(self) -> list[Parsed]:
        return []


@cache
def cached_dialect(folder: Path) -> Any:
    """`load_dialect`, once a folder: it takes a third of a second, and a dialect is stateless."""
    return load_dialect(folder)


@contextmanager
def clock_stands_still() -> Iterator[None]:
    """While a thread works the event loop is idle, and a virtual clock would jump: not in this block."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, trio.testing.MockClock):
        yield
        return
    threshold, clock.autojump_threshold = clock.autojump_threshold, math.inf
    try:
        yield
    finally:
        clock.autojump_threshold = threshold


def write_scripts(folder: Path, scripts: Mapping[str, Script]) -> tuple[Path, ...]:
    """One file a script, as `Settings.scripts` takes them."""
    files = []
    for name, script in scripts.items():
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(list(leg)) + "\n" for leg in script), encoding="utf-8")
    return tuple(files)


# ---- what was heard


def assembled(events: Iterable[Json]) -> list[Json]:
    """The output items of one run as a client builds them from its events, checked on the way: numbers and
    indices go up by one, deltas add up to what `done` says, nothing follows the end. AssertionError.
    """
    items: list[Json] = []
    text: dict[str, str] = {}
    ended = False
    for number, event in enumerate(events):
        kind = event["type"]
        assert event["sequence_number"] == number, (number, event)
        assert not ended, event
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items), event
            assert all(item["status"] != "in_progress" for item in items), "one item at a time"
            items.append(event["item"])
            text[event["item"]["id"]] = ""
        elif kind.endswith(".delta"):
            assert event["delta"], event
            assert event["item_id"] == items[-1]["id"], event
            text[event["item_id"]] += event["delta"]
        elif kind.endswith(".done") and (whole := _whole_text(event)) is not None:
            assert whole == text[event["item_id"]], event
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(items) - 1, event
            assert event["item"]["id"] == items[-1]["id"], event
            items[-1] = event["item"]
        ended = kind in TERMINAL
    return items


def _whole_text(event: Json) -> str | None:
    """What a `done` event of text, arguments or input says is the whole of it."""
    for field in ("text", "arguments", "input"):
        if field in event:
            return cast(str, event[field])
    return None
