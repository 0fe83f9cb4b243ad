"""The engine process: a scheduler at one end of a socketpair.

    python -m engine.worker FD MODULE:CALLABLE

FD is the inherited end; MODULE:CALLABLE makes the scheduler from the `EngineConfig` that comes as the first
message. The worker knows no model: torch comes in with the scheduler's module. While there is work it looks
once a step whether commands have come; without work, or while none is due yet, it blocks in the socket and
costs no CPU. When the
other end closes, the server is gone, however it went, and so is this process.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from engine import frames
from engine.messages import (
    Command,
    Commands,
    EngineConfig,
    EngineStatistics,
    Event,
    FromEngine,
    ModelInfo,
    Ready,
    Sampled,
    Step,
    Unusable,
)
from engine.outline import ModelError

PROCESS_NAME = "fermata-engine"  # Linux shows 15 characters
COLLECT_AFTER = (
    1.0  # seconds without work; held runs come back from their tools sooner and must not wait for it
)


# Seconds that sampled tokens wait for others, so that a fast model's tokens come several to a message: a
# message costs
# the two processes more than a small model's token. No delta is late by more, and a leg's end or beginning by
# nothing.
GATHER = 0.002


class AnyScheduler(Protocol):
    """What the process and the inline engine need of a scheduler; `engine.scheduler.Scheduler` is one.

    A scheduler that works by a clock also has a property `seconds_until_due`; see the function of that name.
    """

    info: ModelInfo

    def submit(self, commands: Iterable[Command]) -> None:
        """Queue work."""

    def step(self) -> Step:
        """Do some of it, and say what came of it."""

    @property
    def has_work(self) -> bool:
        """Whether another step would do anything before new commands come."""


def seconds_until_due(scheduler: AnyScheduler) -> float:
    """How long a step of a scheduler that has work would do nothing, unless commands come first."""
    seconds: float = getattr(scheduler, "seconds_until_due", 0.0)
    return seconds


class ServerGone(Exception):
    """The other end of the socket is closed."""


class Channel:
    """The blocking side of the socketpair."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = frames.FrameReader()

    def send(self, message: FromEngine) -> None:
        """Send one message. Waits only while the server's event loop is late; it always reads."""
        try:
            self._connection.sendall(frames.encode(message))
        except (BrokenPipeError, ConnectionResetError):
            raise ServerGone from None

    def receive(self) -> list[bytearray]:
        """Wait until at least one message is complete, and return all that are."""
        while not (payloads := self._reader.feed(self._read(0))):
            pass
        return payloads

    def poll(self) -> list[bytearray]:
        """All messages that are complete by now, without waiting."""
        payloads: list[bytearray] = []
        try:
            while True:
                payloads += self._reader.feed(self._read(socket.MSG_DONTWAIT))
        except BlockingIOError:
            return payloads

    def is_silent_for(self, seconds: float) -> bool:
        """Whether nothing at all comes within `seconds`; returns as soon as something does."""
        readable, _, _ = select.select([self._connection], [], [], seconds)
        return not readable

    def _read(self, flags: int) -> bytes:
        try:
            received = self._connection.recv(frames.READ_BYTES, flags)
        except ConnectionResetError:
            raise ServerGone from None
        if not received:
            raise ServerGone
        return received


class Report:
    """What the server was not told yet. Sampled tokens may wait a moment for others, nothing else may."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tokens: dict[int, list[int]] = {}  # of each sequence, in its event
        self._statistics = EngineStatistics()
        self._is_urgent = False
        self._last_sent = 0.0

    def add(self, step: Step) -> None:
        """One more step. Its events come after those before it; tokens of one sequence become one event."""
        self._statistics = step.statistics
        for event in step.events:
            if not isinstance(event, Sampled):
                self._is_urgent = True
                self._events.append(event)
            elif (tokens := self._tokens.get(event.sequence)) is not None:
                tokens += event.tokens
            else:
                self._tokens[event.sequence] = list(event.tokens)
                self._events.append(Sampled(event.sequence, self._tokens[event.sequence]))

    def is_due(self, seconds_to_next: float) -> bool:
        """Whether to send now, if the next step can bring something only in so many seconds."""
        if not self._events:
            return False
        return self._is_urgent or time.monotonic() + seconds_to_next >= self._last_sent + GATHER

    def take(self) -> Step:
        """All of it, as one step."""
        step = Step(self._events, self._statistics)
        self._events, self._tokens, self._is_urgent = [], {}, False
        self._last_sent = time.monotonic()
        return step


def serve(channel: Channel, scheduler: AnyScheduler) -> None:
    """Carry commands to the scheduler and its steps back, until `ServerGone`.

    Steps without events are not sent, but for the last one before there is nothing to do: the server's
    statistics are then those of the idle engine.
    """
    decoder = msgspec.msgpack.Decoder(Commands)
    report = Report()
    while True:
        if scheduler.has_work:
            seconds = seconds_until_due(scheduler)
            if seconds > 0:
                channel.is_silent_for(seconds)
            payloads = channel.poll()
        else:
            payloads = _receive_while_idle(channel)
        for payload in payloads:
            scheduler.submit(decoder.decode(payload).commands)
        report.add(scheduler.step())
        if not scheduler.has_work or report.is_due(seconds_until_due(scheduler)):
            channel.send(report.take())


def _receive_while_idle(channel: Channel) -> list[bytearray]:
    if channel.is_silent_for(COLLECT_AFTER):
        gc.collect()
    return channel.receive()


def _stop_collecting() -> None:
    """No collection while there is work: it would stop every running sequence for as long as it takes.

    What loading left (modules, weights, tables) stays for the life of the process, so it is frozen and never
    looked at again. Messages and sequences are freed by their reference counts (2,000 steps were measured to
    leave nothing in cycles); anything else waits for an idle moment.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def _limit_threads() -> None:
    """Say it to torch as well: what it makes of OMP_NUM_THREADS alone depends on how it was built."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _show_name() -> None:
    name_file = Path("/proc/self/comm")
    if name_file.exists():  # Linux
        name_file.write_text(PROCESS_NAME)


def _resolve(factory: str) -> Callable[[EngineConfig], AnyScheduler]:
    module, _, name = factory.partition(":")
    make: Callable[[EngineConfig], AnyScheduler] = getattr(importlib.import_module(module), name)
    return make


def main(arguments: list[str]) -> None:
    """Serve the socket `FD` with the scheduler `MODULE:CALLABLE`."""
    # The terminal's ^C and a service manager's SIGTERM reach the whole group; what they mean is the server's
    # to decide, which may have legs to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _show_name()
    descriptor, factory = arguments
    with socket.socket(fileno=int(descriptor)) as connection:
        # A child of ours that held it open would hide our death from the server.
        connection.set_inheritable(False)
        channel = Channel(connection)
        try:
            (payload,) = channel.receive()
            config = msgspec.msgpack.decode(payload, type=EngineConfig)
            try:
                make_scheduler = _resolve(factory)
                _limit_threads()
                scheduler = make_scheduler(config)
            except ModelError as error:
                channel.send(Unusable(message=str(error)))
                return
            except (
                Exception
            ) as error:  # ours: the server says that it is unusable, the traceback goes to stderr
                channel.send(Unusable(message=str(error) or type(error).__name__))
                raise
            _stop_collecting()
            channel.send(Ready(info=scheduler.info))
            serve(channel, scheduler)
        except ServerGone:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
