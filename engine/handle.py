"""The engine as the server sees it: open sequences, learn whether there is an engine, survive its death.

It never imports torch and knows tokens only. `Engine` routes each step's events to their sequences and
lives as many lives as it takes: a life is one engine process from its start to its end. `ProcessEngine` is
what production runs: one task writes commands to a socketpair, one reads steps from it, so the event loop
never waits for the engine. In `InlineEngine` a task calls the scheduler itself, for tests on a virtual
clock and for measuring the bare engine.

No queue here has a limit of its own, each is bounded by construction. Toward the engine waits what
sequences were told and the engine has not read: a caller tells a sequence one leg and then awaits its
events, so that is at most the open sequences' ledgers, whose number and size the server limits. From the
engine: see `engine.sequence`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import structlog
import trio

from engine import frames
from engine.messages import (
    Command,
    Commands,
    EngineConfig,
    EngineStatistics,
    FromEngine,
    ModelInfo,
    Open,
    Ready,
    Step,
    Unusable,
)
from engine.sequence import EngineSequence, SequenceLost
from engine.worker import AnyScheduler

__all__ = [
    "Engine",
    "EngineSequence",
    "EngineState",
    "EngineUnavailable",
    "HandleStatistics",
    "InlineEngine",
    "ProcessEngine",
    "SequenceLost",
]

EngineState: TypeAlias = Literal["starting", "ready", "restarting", "failed"]

FIRST_BACKOFF = 0.5  # seconds before the second restart in a row; the first one is at once
MAX_BACKOFF = 30.0  # seconds: about what loading a large model takes, so trying is at most half of the time
HEALTHY_AFTER = 60.0  # seconds of life after which a death counts as the first again
EXIT_GRACE = 5.0  # seconds a process has to end by itself: a traceback or a core dump fits

STDERR_DESCRIPTOR = 2  # where the engine's stdout goes as well: the server's own stdout is for its user

log: structlog.stdlib.BoundLogger = structlog.get_logger("engine.handle")


class EngineUnavailable(Exception):
    """There is no engine to ask right now. `reason` says why, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandleStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A picture of the engine and of the line to it."""

    state: EngineState
    reason: str
    restarts: int
    sequences_open: int
    commands_waiting: int  # queued here, not yet handed to the socket
    engine: EngineStatistics  # of the last step; zeros while there is no engine


class Engine(ABC):
    """Sequences of one engine, through all its lives."""

    def __init__(self) -> None:
        self.state: EngineState = "starting"
        self.reason = "the model is loading"
        self.restarts = 0
        self._info: ModelInfo | None = None
        self._engine_statistics = EngineStatistics()
        self._last_number = 0
        self._sequences: dict[int, EngineSequence] = {}
        self._outbox: list[Command] = []
        self._outbox_filled = trio.lowlevel.ParkingLot()
        self._state_changed = trio.lowlevel.ParkingLot()

    @property
    def info(self) -> ModelInfo:
        """What is loaded, or was before a death. Raises `EngineUnavailable` if nothing ever was."""
        if self._info is None:
            raise EngineUnavailable(self.reason)
        return self._info

    def open(self, namespace: str = "") -> EngineSequence:
        """A new, empty sequence; KV is shared by content within one `namespace`.

        Raises `EngineUnavailable` when the engine is not ready.
        """
        if self.state != "ready":
            raise EngineUnavailable(self.reason)
        sequence = self.adopt_new_sequence()
        self.send(Open(sequence=sequence.id, namespace=namespace))
        return sequence

    async def wait_ready(self) -> None:
        """Wait until the engine is ready, at the start or after a death.

        There is no deadline here: loading takes as long as the weights are large. Raises
        `EngineUnavailable` if the engine has failed for good.
        """
        await trio.lowlevel.checkpoint()
        while self.state in ("starting", "restarting"):
            await self._state_changed.park()
        if self.state == "failed":
            raise EngineUnavailable(self.reason)

    def statistics(self) -> HandleStatistics:
        """A picture of now; cheap."""
        return HandleStatistics(
            state=self.state,
            reason=self.reason,
            restarts=self.restarts,
            sequences_open=len(self._sequences),
            commands_waiting=len(self._outbox),
            engine=self._engine_statistics,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep an engine alive, restarting it when it dies.

        It has started at once, since a server can say a lot while weights load; see `wait_ready`. It ends
        only by cancellation, which ends the engine process too and loses every sequence.
        """
        task_status.started()
        backoff = 0.0  # seconds
        try:
            while True:
                born = trio.current_time()
                cause = await self._live()
                self._lose_all("restarting", cause)
                if trio.current_time() - born >= HEALTHY_AFTER:
                    backoff = 0.0
                log.error("engine_died", reason=cause, restart_in=backoff)
                await trio.sleep(backoff)
                backoff = min(max(2 * backoff, FIRST_BACKOFF), MAX_BACKOFF)
                self.restarts += 1
        except EngineUnavailable as error:
            self._lose_all("failed", error.reason)
            log.error("engine_unusable", reason=error.reason)
            await trio.sleep_forever()
        finally:
            self._lose_all("failed", "the engine was stopped")

    @abstractmethod
    async def _live(self) -> str:
        """One life: start an engine, call `_become_ready`, carry commands to it and its steps to `_route`.

        Returns what it died of, for people; raises `EngineUnavailable` if another life would be no better.
        When cancelled it leaves no process behind.
        """

    def _become_ready(self, info: ModelInfo) -> None:
        self._info = info
        self._change_state("ready", f"{info.model} is loaded")
        log.info("engine_ready", model=info.model, device=info.device, load_seconds=info.load_seconds)

    def _route(self, step: Step) -> None:
        self._engine_statistics = step.statistics
        for event in step.events:
            sequence = self._sequences.get(event.sequence)
            if sequence is not None:  # else it was released while this step was under way
                sequence.arrive(event)

    def _lose_all(self, state: EngineState, reason: str) -> None:
        self._change_state(state, reason)
        self._outbox.clear()
        self._engine_statistics = EngineStatistics()
        for sequence in list(self._sequences.values()):
            sequence.lose()

    def _change_state(self, state: EngineState, reason: str) -> None:
        self.state = state
        self.reason = reason
        self._state_changed.unpark_all()

    async def _wait_for_commands(self) -> None:
        """Return when there is something to say. No deadline: an idle engine is told nothing."""
        while not self._outbox:
            await self._outbox_filled.park()

    def _take_commands(self) -> list[Command]:
        commands, self._outbox = self._outbox, []
        return commands

    # For the engine's own sequences.

    def new_number(self) -> int:
        """A sequence number that was never used, in no life of the engine."""
        self._last_number += 1
        return self._last_number

    def adopt_new_sequence(self) -> EngineSequence:
        """A sequence to which events will be routed; making it known to the engine is the caller's."""
        sequence = EngineSequence(self, self.new_number())
        self._sequences[sequence.id] = sequence
        return sequence

    def send(self, command: Command) -> None:
        """Queue a command for the next message."""
        self._outbox.append(command)
        self._outbox_filled.unpark_all()

    def forget(self, sequence: EngineSequence) -> None:
        """Route nothing to this sequence any more."""
        self._sequences.pop(sequence.id, None)


class InlineEngine(Engine):
    """An engine in the server's own event loop: each step blocks it, and others run between steps.

    `make_scheduler` may raise `EngineUnavailable`. Any other exception of the scheduler is a bug and comes
    out of `run`.
    """

    def __init__(self, make_scheduler: Callable[[], AnyScheduler]) -> None:
        super().__init__()
        self._make_scheduler = make_scheduler
        self._life = trio.CancelScope()

    def crash(self) -> None:
        """Lose the scheduler and every sequence, as when an engine process dies."""
        self._lose_all("restarting", "crashed on request")
        self._life.cancel()

    async def _live(self) -> str:
        scheduler = self._make_scheduler()
        self._become_ready(scheduler.info)
        with trio.CancelScope() as self._life:
            while True:
                if scheduler.has_work:
                    await trio.lowlevel.checkpoint()
                else:
                    await self._wait_for_commands()
                scheduler.submit(self._take_commands())
                self._route(scheduler.step())
        return "crashed on request"


class ProcessEngine(Engine):
    """An engine in a process of its own.

    `threads` is for torch; leave a core to the server. `scheduler` names what the process makes its
    scheduler with, as "module:callable".
    """

    def __init__(
        self, config: EngineConfig, *, threads: int, scheduler: str = "engine.scheduler:Scheduler"
    ) -> None:
        super().__init__()
        self._config = config
        self._threads = threads
        self._scheduler = scheduler
        self.process_id: int | None = None  # None while there is no process

    async def _live(self) -> str:
        try:
            process, stream = await self._start()
        except OSError as error:  # no descriptors, no memory: may pass
            return f"the engine process could not be started: {error}"
        self.process_id = process.pid
        log.info("engine_started", process_id=process.pid, model=self._config.model)
        try:
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                end = await self._read(stream)
                nursery.cancel_scope.cancel()
            if isinstance(end, str):
                self._lose_all("restarting", end)  # now: nobody has to wait until it is reaped
        except BaseException:
            process.terminate()
            raise
        finally:
            self.process_id = None
            await _reap(process)
        if isinstance(end, Unusable):
            raise EngineUnavailable(end.message)
        return f"{end}, {_describe_exit(process.returncode)}"

    async def _start(self) -> tuple[trio.Process, trio.SocketStream]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-m", "engine.worker", str(theirs.fileno()), self._scheduler],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR_DESCRIPTOR,
                    env=self._environment(),
                )
            except BaseException:
                ours.close()
                raise
        return process, trio.SocketStream(trio.socket.from_stdlib_socket(ours))

    def _environment(self) -> dict[str, str]:
        """Ours, but for what has to be set before torch is imported and for where our packages lie."""
        packages = str(Path(__file__).resolve().parent.parent)
        threads = str(self._threads)
        return os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONPATH": os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")])),
        }

    async def _write(self, stream: trio.SocketStream) -> None:
        """Say the configuration, then whatever there is to say. A dead engine is the reader's to notice."""
        try:
            await stream.send_all(frames.encode(self._config))
            while True:
                await self._wait_for_commands()
                await stream.send_all(frames.encode(Commands(commands=self._take_commands())))
        except trio.BrokenResourceError:
            return

    async def _read(self, stream: trio.SocketStream) -> str | Unusable:
        """Take what the engine says until it says no more, and return why it stopped."""
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        reader = frames.FrameReader()
        while True:
            try:
                received = await stream.receive_some(frames.READ_BYTES)
            except trio.BrokenResourceError:  # it died before it had read all that it was told
                received = b""
            if not received:
                return "the engine process ended"
            try:
                messages = [decoder.decode(payload) for payload in reader.feed(received)]
            except msgspec.DecodeError as error:
                return f"the engine process said what is no message ({error})"
            for message in messages:
                if isinstance(message, Step):
                    self._route(message)
                elif isinstance(message, Ready):
                    self._become_ready(message.info)
                else:
                    return message


async def _reap(process: trio.Process) -> None:
    """See a process end whose socket is closed: let it say its last words, then insist. Shielded, bounded."""
    with trio.CancelScope(shield=True):
        with trio.move_on_after(EXIT_GRACE):
            await process.wait()
        process.kill()
        await process.wait()


def _describe_exit(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}"
