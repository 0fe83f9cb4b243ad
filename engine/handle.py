"""The engine as the server holds it: `ProcessEngine` in production, `InlineEngine` where there must be no
process.

It never imports torch and knows tokens only. To the rest both are an `Engine`: open sequences, learn
whether it is ready, survive its death. In `ProcessEngine` one task writes commands to a socketpair and one
reads steps from it, so the event loop never waits for the engine. In `InlineEngine` a task calls the
scheduler itself, for tests on a virtual clock and for measuring the bare engine.

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
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import trio

from engine import frames
from engine.messages import Commands, EngineConfig, FromEngine, Ready, Step, Unusable
from engine.routing import Engine, EngineState, EngineUnavailable, HandleStatistics
from engine.sequence import EngineSequence, SequenceLost
from engine.worker import AnyScheduler, seconds_until_due

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

EXIT_GRACE = 5.0  # seconds a process has to end by itself: a traceback or a core dump fits
STDERR_DESCRIPTOR = 2  # where the engine's stdout goes as well: the server's own stdout is for its user

log: structlog.stdlib.BoundLogger = structlog.get_logger("engine.handle")


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
                if not scheduler.has_work:
                    await self._wait_for_commands()
                elif (seconds := seconds_until_due(scheduler)) > 0:
                    with trio.move_on_after(seconds):
                        await self._wait_for_commands()
                else:
                    await trio.lowlevel.checkpoint()
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
            process.kill()  # it has nothing that the server does not have, and may be deep in a load
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
