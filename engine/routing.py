"""Which event goes to which sequence, and whether there is an engine at all.

It knows nothing of how an engine is run: `engine.handle` has the two ways. An `Engine` lives as many lives
as it takes; a life is one scheduler from its loading to its death, and no sequence survives its life. The
first restart is at once, those that follow wait longer and longer until a life has lasted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import msgspec
import structlog
import trio

from engine.messages import Command, EngineStatistics, ModelInfo, Open, Step
from engine.sequence import EngineSequence

EngineState: TypeAlias = Literal["starting", "ready", "restarting", "failed"]

FIRST_BACKOFF = 0.5  # seconds before the second restart in a row; the first one is at once
MAX_BACKOFF = 30.0  # seconds: about what loading a large model takes, so trying is at most half of the time
HEALTHY_AFTER = 60.0  # seconds of life after which a death counts as the first again

log: structlog.stdlib.BoundLogger = structlog.get_logger("engine.routing")


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
