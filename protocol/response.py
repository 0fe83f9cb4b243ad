"""A run: one Response being made. `Run.run` is the project in five lines; its stages are the rest.

It knows items, events, tokens and the engine, and nothing of sockets: whoever looks at a run reads its event
log, whoever answers it calls `append`. A run outlives the connection it came by, so its task lives in the
server's nursery.

Strategy. All that a run knows is in its `RunState`. Each stage looks at the phase first and returns at once
if its work is done, so the loop can start from any state that was written down. Between two awaits a stage
moves ledger, log and state together, so whatever cancels a task leaves a state that is whole. How a run ends
is decided in one place (`_endings`), and every way out leads through `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import structlog
import trio

from engine.handle import EngineUnavailable
from engine.messages import Event, Failed, Sampled, Sampling, Stopped
from protocol import snapshot, wire
from protocol.appended import check_history, count_turns, drop_echoes, required_input, sort_appended
from protocol.conversation import Conversation, LegRequest
from protocol.errors import RequestError, context_too_long, overloaded, server_error
from protocol.filters import Filters
from protocol.intake import Intake
from protocol.leg import Leg
from protocol.log import EventLog
from protocol.past import NOTHING, FindPast, Past, find_nothing
from protocol.state import MOVES, Arrived, Ending, Phase, RunState
from protocol.steering import SteeringInput, check_room, new_steered
from protocol.work import Work

if TYPE_CHECKING:
    from engine.handle import Engine
    from protocol.models import Model

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.response")


class RunEnd(Exception):
    """Raised by a stage to end the run here and now."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending


class Run:
    """One run. `on_change` is called, without waiting, after every change of phase; `keep` once, with what
    another run may continue: without a keeper its KV is given back.
    """

    def __init__(
        self,
        state: RunState,
        *,
        model: Model,
        engine: Engine,
        namespace: str = "",
        filters: Filters | None = None,
        hold_timeout: float,
    ) -> None:
        self.state = state
        self.log = EventLog(next_number=state.next_number)
        self.on_change: Callable[[], None] | None = None
        self.keep: Callable[[Past], None] = Past.release
        self.find_past: FindPast = find_nothing
        self.past = NOTHING  # found, and not continued yet
        self.response: wire.Response | None = None  # as it ended
        self.received = monotonic()  # when the last input came
        self.owner: object = None  # whose going ends the run, if it is not held for another
        self.is_started = False  # its task is running, or has been
        self._model = model
        self._dialect = model.dialect
        self._engine = engine
        self._namespace = namespace  # that its KV is shared within
        self._filters = filters or Filters()
        self._conversation = Conversation(state.ledger, engine, namespace)
        shown = state.request.tool_choice != "none"
        self._tools = wire.parse_tools(state.request.tools, []) if shown else []
        self._intake = Intake(self._dialect, self._filters, self._tools, limit=model.max_input)
        self._hold_timeout = hold_timeout
        self._leg: Leg | None = None
        self._scope = trio.CancelScope()
        self._interrupted: str | None = None
        self._closing = False
        self._appending = trio.Lock()
        self._news = trio.Event()
        self._prepared = trio.Event()
        if state.phase is not Phase.PREPARING:
            self._prepared.set()

    async def run(self) -> None:
        """Make the Response, from whatever state it is in to its terminal event.

        Never raises for what a client, a model or the engine did. Cancelled from outside, it stops where it
        is, without a terminal event, and its state can be run again.
        """
        with structlog.contextvars.bound_contextvars(response=self.state.id), self._endings():
            await self.prepare()
            while (required := await self.sample()) is not None:
                await self.announce(required)
                await self.absorb()
        await self.finish()

    # ---- stages ----

    async def prepare(self) -> None:
        """Once: find what is continued, take in what the client sent, and let its prefill begin."""
        state = self.state
        if state.phase is not Phase.PREPARING:
            return
        await trio.lowlevel.checkpoint()  # one that was cancelled while it waited goes no further
        work = state.leg_work
        work.pre_passes += 1
        opening = await self._intake.opening(state.request.instructions, work)
        if self.past is NOTHING:
            self.past = await self.find_past()
        state.steers, self.past.steers = [*state.steers, *self.past.steers], []
        history = self.past.state.items
        check_history(state.items, history, state.positions)
        items = [*chain.from_iterable(each.items for each in state.steers), *state.items]
        if self.past.begins_with(opening):
            tokens = await self._intake.items(items, work, positions=state.positions)
            self._continue(self.past)
        else:
            items_tokens = await self._intake.items([*history, *items], work, positions=state.positions)
            tokens = [*opening, *items_tokens]
        tokens = [*self._turn_end(), *tokens]
        self._check_fits(len(state.ledger) + len(tokens))
        state.opening = len(opening)
        state.inherited_items = len(history)
        state.items = [*history, *items]
        state.turns = count_turns(state.items)
        state.positions, state.steers = [], []
        self._emit(wire.Created(response=snapshot.created(state, self._model)))
        self._emit(wire.InProgress(response=snapshot.in_progress(state, self._model)))
        if state.request.generate is False:
            await self._warm_up(tokens)
            raise RunEnd(Ending("completed"))
        self._start_leg(tokens)

    async def sample(self) -> list[wire.RequiredInput] | None:
        """One leg, shown as it is sampled. Returns what the client owes then; nothing when all is said."""
        state = self.state
        while state.phase is Phase.SAMPLING:
            leg = self._leg = Leg(state, self._dialect.parser(self._tools), self._filters, self._emit)
            if leg.has_its_only_call:
                reason = "stop"
            else:
                self._conversation.begin(self._leg_request())
                reason = await self._read(leg)
            self._end_leg(complete=reason == "stop")
            if reason == "length":
                raise RunEnd(self._out_of_tokens())
            state.owed = self._required_calls()
            if state.owed:
                self._move(Phase.OWING)
            elif state.messages:
                self._close_leg_accounts()
                self._start_leg(self._take_messages())
            else:
                break
        return state.required if state.phase in (Phase.OWING, Phase.HELD) else None

    async def announce(self, required: list[wire.RequiredInput]) -> None:
        """Tell the client that the run waits for it: `response.done`."""
        if self.state.phase is Phase.OWING:
            self._emit_done(required, again=False)
            self._move(Phase.HELD)

    async def absorb(self) -> None:
        """Blocks here, KV held, until every result is in the ledger; then the next leg can begin.

        The wait's deadline is the hold timeout, counted anew from each append.
        """
        state = self.state
        if self._closing:
            raise RunEnd(Ending("incomplete", "shutdown"))
        while state.owed:
            self._news = trio.Event()
            held_since = perf_counter()
            with trio.move_on_after(self._hold_timeout) as waiting:
                await self._news.wait()
            state.leg_work.times_ms.waiting += (perf_counter() - held_since) * 1e3
            if waiting.cancelled_caught:
                raise RunEnd(Ending("incomplete", "hold_timeout"))
        self._start_leg(self._take_messages())

    async def finish(self) -> None:
        """Once: usage, record, terminal event; the KV goes back. Does not wait."""
        state = self.state
        if state.phase is Phase.ENDED:
            return
        ending = state.ending
        assert ending is not None
        self.past.release()
        # Prototype clients add this usage up with that of every `response.done`.
        by_leg = state.prototype and not state.ended_unasked
        usage = snapshot.leg_usage(state) if by_leg else None
        state.leg_work.post_passes += 1
        with state.leg_work.timed("post"):
            self._close_leg_accounts()
        if self.log.next_number == 0 and ending.error is None:
            self._emit(wire.Created(response=snapshot.created(state, self._model)))
        if self.log.refusal is None:
            self.response = snapshot.ended(state, self._model, usage)
            self._emit(TERMINAL[ending.status](response=self.response))
        steers, state.steers = [*state.steers, *self.past.steers], []  # what has come to nothing so far
        self.keep(Past(state, self._conversation, steers))
        log.info(
            "response_ended",
            status=ending.status,
            reason=ending.reason,
            error=ending.error and ending.error.code,
            legs=state.work.legs,
            tokens_prefilled=state.work.tokens_prefilled,
            tokens_sampled=state.work.tokens_sampled,
        )
        self._move(Phase.ENDED)

    # ---- what comes from outside while the run goes on ----

    async def append(
        self,
        items: Sequence[wire.Item],
        *,
        positions: Sequence[int] | None = None,
        work: Work,
        received: float,
        event_id: str | None = None,
        acknowledge: Callable[[], None] | None = None,
    ) -> None:
        """Take results and messages from the client, all or nothing.

        `positions` is where the client has them, if not from 0 on; `work` has what it cost to receive them,
        `received` when they came (on `time.monotonic`). An accepted
        append is answered in the log: by `response.in_progress` (or by what `acknowledge` logs) and, while
        results are still missing, by a `response.done` that says which. Waits only for `prepare`, other
        appends and the tokenising of long texts; cancelled there, nothing was applied. Raises RequestError;
        the run is then untouched.
        """
        state = self.state
        await self._prepared.wait()
        async with self._appending:
            self._check_takes_input()
            if event_id is not None and event_id in state.event_ids:
                return self._acknowledge(acknowledge)
            with work.timed("validate"):
                work.items_validated += len(items)
                new_items = drop_echoes(items, state.output[state.leg_output :])
                places = (positions or range(len(items)))[len(items) - len(new_items) :]
                results, messages = sort_appended(new_items, state.required, places)
            arrived = {item.call_id: await self._taken_in([item], work) for item in results}
            said = [await self._taken_in(messages, work)] if messages else []
            self._check_takes_input()  # it may have ended meanwhile
            waiting = [*state.arrived.values(), *state.messages, *arrived.values(), *said]
            self._check_fits(len(state.ledger) + sum(len(each.tokens) for each in waiting))
            # From here on nothing can fail and nothing waits.
            self.received = received
            state.leg_work.add(work)
            state.arrived.update(arrived)
            state.messages += said
            if event_id is not None:
                state.event_ids.append(event_id)
            self._place_results()
            return self._acknowledge(acknowledge)

    async def steer(self, items: Sequence[wire.Item], sent: SteeringInput) -> None:
        """Take messages of the user while the run goes on; answered by `response.steer.accepted`. A held run
        takes them as `append` does; any other keeps them, and what was `sent`, for its successor.
        """
        state = self.state
        steered = new_steered(state.id, items, sent)
        accepted = wire.SteerAccepted(steer=steered.ref)
        if state.lifecycle == "held":
            acknowledge = partial(self._emit, accepted)
            return await self.append(items, work=Work(), received=monotonic(), acknowledge=acknowledge)
        if state.request.generate is False:
            raise RequestError("A warm-up says nothing to steer.", code="steering_not_supported")
        await self._prepared.wait()
        self._check_takes_input()
        check_room(state.steers, steered)
        state.steers.append(steered)
        return self._emit(accepted)

    def close(self) -> None:
        """The server shuts down: the leg that is going on may end, but no other begins. Never waits."""
        self._closing = True
        if self.state.phase is Phase.HELD:
            self.interrupt("shutdown")

    def abandon(self) -> None:
        """After a bug in how a run ends: give back what it has, and let its client and its lane go on."""
        self._conversation.release()
        if not self.log.ended:
            self.log.break_off(server_error())
        self.state.phase = Phase.ENDED
        if self.on_change is not None:
            self.on_change()

    @property
    def silent_since(self) -> float | None:
        """When a run that is at work showed anything last, on trio's clock."""
        works = self.state.phase in (Phase.PREPARING, Phase.SAMPLING) and self.log.next_number > 0
        return self.log.last_append if works else None

    def show_life(self) -> None:
        """The heartbeat of a run that has had nothing to show for a while."""
        self._emit(wire.InProgress(response=snapshot.in_progress(self.state, self._model)))

    def interrupt(self, reason: str) -> None:
        """End the run within a step, as incomplete for this reason. Never waits. Idempotent."""
        if self._interrupted is None:
            self._interrupted = reason
            self._scope.cancel()

    # ---- the parts of stages ----

    @contextmanager
    def _endings(self) -> Iterator[None]:
        """Turns every way to end into `state.ending`. Cancellation from outside passes through."""
        ending = self.state.ending
        try:
            with self._scope:
                yield
            if self._scope.cancelled_caught:
                ending = ending or Ending("incomplete", self._interrupted)
            else:
                ending = ending or Ending("completed")
        except RunEnd as end:
            ending = end.ending
        except RequestError as error:
            ending = self._failure(error)
        except EngineUnavailable as error:
            ending = self._failure(overloaded(f"The engine is not available: {error.reason}"))
        except Exception:  # ours: the client gets a terminal event, the log gets the traceback
            log.exception("run_failed")
            ending = self._failure(server_error())
        if self.state.ending is None:
            self.state.ending = ending
            self.state.ended_unasked = self.state.phase in (Phase.OWING, Phase.HELD)
            self._end_leg(complete=False)
            self._move(Phase.FINISHING)

    def _failure(self, error: RequestError) -> Ending:
        if self.log.next_number == 0:
            self.log.refuse(error)
        return Ending("failed", error=wire.ErrorDetail(error.code, error.message))

    async def _warm_up(self, tokens: list[int]) -> None:
        """Prefill and say nothing."""
        state = self.state
        self._conversation.add(tokens)
        state.leg_start = state.leg_input = len(state.ledger)
        self._conversation.begin(
            LegRequest(start=state.leg_start, max_tokens=0, stop_tokens=(), sampling=Sampling())
        )
        self._leg = Leg(state, self._dialect.parser(self._tools), self._filters, self._emit)
        await self._read(self._leg)
        self._end_leg(complete=True)

    def _continue(self, past: Past) -> None:
        """Go on from where this past ended, with its KV if that is still there."""
        kept = past.conversation
        if kept is not None:
            self._conversation = kept.succeed(fork=False)
        else:
            self._conversation = Conversation(past.state.ledger.copy(), self._engine, self._namespace)
        self.state.ledger = self._conversation.ledger
        self.state.inherited = len(self.state.ledger)

    async def _taken_in(self, items: Sequence[wire.Item], work: Work) -> Arrived:
        return Arrived(list(items), await self._intake.items(items, work))

    def _check_takes_input(self) -> None:
        if self.state.phase not in (Phase.SAMPLING, Phase.OWING, Phase.HELD):
            raise nothing_to_append_to(self.state.id)

    def _check_fits(self, tokens: int) -> None:
        limit = self._model.max_input
        if tokens > limit:
            raise context_too_long(tokens, limit)

    def _start_leg(self, tokens: list[int]) -> None:
        """Everything is in: add the last of it, and what makes the model speak."""
        if self._closing:
            raise RunEnd(Ending("incomplete", "shutdown"))
        state = self.state
        self._conversation.add([*tokens, *self._model.turn_start])
        state.leg_start = state.leg_input = len(state.ledger)
        state.leg_work.legs += 1
        self._move(Phase.SAMPLING)

    def _take_messages(self) -> list[int]:
        """The queued messages, as they continue the ledger."""
        queued, self.state.messages = self.state.messages, []
        self.state.items += chain.from_iterable(each.items for each in queued)
        return [*self._turn_end(), *chain.from_iterable(each.tokens for each in queued)]

    def _turn_end(self) -> list[int]:
        """What closes the sampled turn that the ledger ends with, if it does."""
        spans = self.state.ledger.spans
        if not (spans and spans[-1].sampled):
            return []
        return self._dialect.tokenize(self._dialect.turn_end(self.state.ledger.tokens[-1]))

    def _leg_request(self) -> LegRequest:
        state, request = self.state, self.state.request
        sampled_before = state.sampled - (len(state.ledger) - state.leg_start)
        budget = self._model.max_context - state.leg_start
        if request.max_output_tokens is not None:
            budget = min(budget, request.max_output_tokens - sampled_before)
        elif self._model.longest_leg is not None:
            budget = min(budget, self._model.longest_leg)
        if budget <= 0:
            raise RunEnd(self._out_of_tokens())
        return LegRequest(
            start=state.leg_start,
            max_tokens=budget,
            stop_tokens=self._dialect.stop_tokens,
            sampling=self._model.sampling(request),
            forced=self._model.forced_turn(state.turns),
        )

    def _out_of_tokens(self) -> Ending:
        limit = self.state.request.max_output_tokens
        is_reached = limit is not None and self.state.sampled >= limit
        if is_reached or len(self.state.ledger) < self._model.max_context:
            return Ending("incomplete", "max_output_tokens")
        error = context_too_long(len(self.state.ledger), self._model.max_context)
        return Ending("failed", error=wire.ErrorDetail(error.code, error.message))

    async def _read(self, leg: Leg) -> str:
        """Show what is sampled as it comes. Returns why the leg stopped: `stop` or `length`."""
        while True:
            read = len(self.state.ledger)
            events = await self._conversation.events()
            self._account(leg, events)
            for event in events:
                match event:
                    case Sampled(tokens=tokens):
                        for token in tokens:
                            read += 1
                            leg.read(token)
                            if leg.has_its_only_call:
                                self._account(leg, await self._conversation.cut(read))
                                leg.flush()
                                return "stop"
                    case Failed(code=code, message=message):
                        raise RequestError(message, status=503, code=ENGINE_ERRORS[code])
                    case Stopped(reason=reason):
                        leg.finish()
                        return reason

    def _account(self, leg: Leg, events: Sequence[Event]) -> None:
        leg.account(events, handed_over=self._conversation.handed_over, received=self.received)

    def _end_leg(self, *, complete: bool) -> None:
        """The leg's items are whole, or as whole as they get."""
        if self._leg is not None:
            self._leg.close(complete=complete)
            self._leg = None
            self.state.leg_work.engine_restarts += self._conversation.restarts
            self._conversation.restarts = 0

    def _required_calls(self) -> list[wire.RequiredInput]:
        if self.state.lifecycle != "held":
            return []
        return required_input(self.state.output[self.state.leg_output :])

    def _place_results(self) -> None:
        """Results enter the ledger in call order, and are prefilled while those after them are awaited.

        After the last the next leg begins: it goes to the engine together with what makes the model speak,
        for two passes would cost twice what one does.
        """
        state = self.state
        owed_before = len(state.owed)
        while state.owed and state.owed[0].call_id in state.arrived:
            arrived = state.arrived.pop(state.owed.pop(0).call_id)
            self._conversation.note([*self._turn_end(), *arrived.tokens])
            state.items += arrived.items
        if 0 < len(state.owed) < owed_before:
            self._conversation.add([])
        self._news.set()

    def _acknowledge(self, acknowledge: Callable[[], None] | None) -> None:
        """Answer an append that changed something, or that had changed it before."""
        if acknowledge is not None:
            acknowledge()
        else:
            self._emit(wire.InProgress(response=snapshot.in_progress(self.state, self._model)))
        if self.state.phase is Phase.HELD and self.state.required:
            self._emit_done(self.state.required, again=True)

    def _emit(self, event: wire.ServerEvent) -> None:
        self.log.append(event)
        self.state.next_number = self.log.next_number

    def _emit_done(self, required: list[wire.RequiredInput], *, again: bool) -> None:
        """`response.done` for the leg that is over."""
        response = snapshot.done(self.state, self._model, again=again)
        self._close_leg_accounts()
        self._emit(wire.Done(response=response, required_input=required))

    def _close_leg_accounts(self) -> None:
        """What is counted from here on belongs to the next leg."""
        state = self.state
        state.work.add(state.leg_work)
        state.leg_work = Work()
        state.reasoning_tokens += state.leg_reasoning_tokens
        state.leg_reasoning_tokens = 0

    def _move(self, phase: Phase) -> None:
        assert phase in MOVES[self.state.phase], f"a run cannot go from {self.state.phase} to {phase}"
        self.state.phase = phase
        self._prepared.set()
        if self.on_change is not None:
            self.on_change()


TERMINAL = {"completed": wire.Completed, "incomplete": wire.Incomplete, "failed": wire.Failed}
"""The terminal event for each way to end."""

ENGINE_ERRORS = {
    "context_length_exceeded": "context_length_exceeded",
    "out_of_kv": "server_is_overloaded",
    "engine_error": "server_error",
}
"""What the engine's failures are called on the wire."""


def nothing_to_append_to(response_id: str | None) -> RequestError:
    """The addressee of an append is not there, or not any more."""
    whom = (
        "No response to append to on this connection."
        if response_id is None
        else f"Response {response_id!r} takes no input now."
    )
    return RequestError(whom, code="previous_response_not_found", param="response_id")
