"""What becomes of the runs of one connection when they have ended, and what continues them.

It knows runs, lanes and pasts, and neither sockets nor client events. Strategy: a run finds what it continues
when its turn comes, and leaves a past when it ends. Both happen between two awaits: nobody sees a lane whose
latest Response is in neither place. Steering rides along with the past (see `protocol.steering`).
"""

from __future__ import annotations

from functools import partial

import msgspec

from protocol import steering, wire
from protocol.appended import required_input
from protocol.edge.access import Caller
from protocol.errors import RequestError
from protocol.lanes import Lane, named
from protocol.outbox import Outbox
from protocol.past import ConnectionMemory, Past
from protocol.response import Run
from protocol.service import Service
from protocol.state import RunState


class Chains:
    """The ended Responses of one connection, by lane. `release` them when it goes."""

    def __init__(self, service: Service, caller: Caller, prototype: bool, outbox: Outbox) -> None:
        self.memory = ConnectionMemory(service.shelf)
        self.is_expired = False  # the connection is too old: nothing new begins
        self._service = service
        self._caller = caller
        self._prototype = prototype
        self._outbox = outbox

    def link(self, run: Run, lane: Lane) -> None:
        """Let a new run find what it continues, when its turn comes."""
        previous = run.state.request.previous_response_id
        if previous is None:
            return

        async def find_past() -> Past:
            found = self.memory.take(lane.name, previous)
            return found or await self._service.find_past(previous, self._caller)

        run.find_past = find_past
        run.past = self.memory.pin(lane.name, previous) or run.past

    def accept(self, run: Run, lane: Lane, *, after: Run | None = None) -> None:
        """Have a run go on on this lane, and keep what it leaves; `after` another if that was steered. Raises
        RequestError.
        """
        lane.accept(run, after=after)
        run.keep = partial(self._keep, lane, run, automatic=after is not None)

    def can_be_appended_to(self, lane: Lane) -> bool:
        """Whether the lane is free and its last Response has ended, can be continued, and never was held. Not
        for clients of the prototype, who start over.
        """
        last = lane.run
        return (
            not (self._prototype or lane.runs)
            and last is not None
            and last.state.lifecycle != "held"
            and self.memory.find(last.state.id) is not None
        )

    def why_gone(self, response_id: str) -> str:
        """Why a Response that does not go on here takes nothing, as answers to steering call it."""
        past = self.memory.find(response_id)
        if past is None:
            return "response_not_found"
        is_complete = past.state.ending is not None and past.state.ending.status == "completed"
        return "response_already_completed" if is_complete else "response_not_active"

    def _keep(self, lane: Lane, run: Run, past: Past, *, automatic: bool) -> None:
        """`automatic`: no request of the client made the run."""
        state, ending = past.state, past.state.ending
        assert ending is not None
        if ending.status == "failed":
            past.release()
            previous = state.request.previous_response_id
            if previous is not None and not automatic:
                self.memory.evict(lane.name, previous)
            message = "" if ending.error is None else ending.error.message
            self._give_back(lane, run, past, "successor_creation_failed", message)
            if automatic and run.log.refusal is not None:
                lane.hide(run)
        elif not state.has_taken_in:
            past.release()
            self._give_back(lane, run, past, "successor_creation_failed", "The response was stopped.")
        else:
            if state.lifecycle == "held":
                past.release()  # held for as long as the run; a later turn finds what the pool still has
            for forgotten in self.memory.keep(lane.name, past):
                self._give_back_late(forgotten)
            if past.steers:
                self._succeed(lane, run, past)

    def _succeed(self, lane: Lane, run: Run, past: Past) -> None:
        """Continue a Response that was steered, or tell that its client has to."""
        ending = past.state.ending
        assert ending is not None
        if ending.status == "incomplete" and ending.reason != "max_output_tokens":
            self._give_back(lane, run, past, "response_not_active", "The response was stopped.")
        elif required := required_input(past.state.output):
            lane.say(run, *steering.pending_frames(past.steers, required, run.log.next_number))
        else:
            try:
                successor = self._create_successor(past.state)
            except RequestError as error:
                return self._give_back(lane, run, past, "successor_creation_failed", error.message)
            self.link(successor, lane)
            self.accept(successor, lane, after=run)
        return None

    def _create_successor(self, state: RunState) -> Run:
        if self.is_expired:
            raise connection_expired()
        request = continuation(state)
        run, _ = self._service.create(request, frame="{}", caller=self._caller, prototype=self._prototype)
        return run

    def _give_back(self, lane: Lane, run: Run, past: Past, code: str, message: str) -> None:
        """Steering that came to nothing, behind what is shown of the run."""
        steers, past.steers = past.steers, []
        if steers:
            lane.say(run, *steering.returned_frames(steers, code, message, run.log.next_number))

    def _give_back_late(self, past: Past) -> None:
        """Steering that nobody has made use of for so long that its Response is forgotten."""
        message = "The response is not kept any more."
        for frame in steering.returned_frames(past.steers, "response_not_active", message, 0):
            self._outbox.say(named(frame, past.lane))


def connection_expired() -> RequestError:
    """The connection is older than connections get."""
    return RequestError(
        "Responses websocket connection limit reached (60 minutes). "
        "Create a new websocket connection to continue.",
        code="websocket_connection_limit_reached",
    )


def continuation(state: RunState) -> wire.Create:
    """A request that continues this Response of one leg with its settings, and has no input yet."""
    return msgspec.structs.replace(
        state.request, previous_response_id=state.id, lifecycle="chained", generate=None, event_id=None
    )
