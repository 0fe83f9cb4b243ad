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

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import structlog
import trio

from engine.handle import EngineUnavailable
from engine.messages import Began, Event, Failed, Prefilled, Sampled, Stopped
from protocol import snapshot, wire
from protocol.appended import count_turns, drop_echoes, sort_appended
from protocol.conversation import Conversation, LegRequest
from protocol.dialects.base import Fragment, Malformed, Parsed, Parser, ReasoningDelta, RenderingError
from protocol.errors import RequestError, context_too_long, nested_too_deeply, overloaded, server_error
from protocol.filters import Filters
from protocol.items import ItemWriter
from protocol.log import EventLog
from protocol.state import MOVES, Ending, Phase, RunState
from protocol.work import Work

if TYPE_CHECKING:
    from engine.handle import Engine
    from protocol.models import Model

# Characters. Tokenising more takes over a millisecond, which the event loop should not lose.
TOKENISE_IN_THREAD = 16_384

log: structlog.stdlib.BoundLogger = structlog.get_logger("protocol.response")


class RunEnd(Exception):
    """Raised by a stage to end the run here and now."""

    def __init__(self, ending: Ending) -> None:
        self.ending = ending


class Run:
    """One run. `on_change` is called, without waiting, after every change of phase."""

    def __init__(
        self,
        state: RunState,
        *,
        model: Model,
        engine: Engine,
        filters: Filters | None = None,
        hold_timeout: float,
        heartbeat: float,
    ) -> None:
        self.state = state
        self.response: wire.Response | None = None  # as the terminal event has it
        self.log = EventLog(next_number=state.next_number)
        self.on_change: Callable[[], None] | None = None
        self.received = monotonic()  # when the last input came
        self.owner: object = None  # whose going ends the run, if it is not held for another
        self.is_started = False  # its task is running, or has been
        self._model = model
        self._dialect = model.dialect
        self._filters = filters or Filters()
        self._conversation = Conversation(state.ledger, engine, state.owner)
        self._tools = wire.parse_tools(state.request.tools, [])
        self._hold_timeout = hold_timeout
        self._heartbeat = heartbeat
        self._writer: ItemWriter | None = None
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
        """Once: filter, render and tokenise what the client sent, and let its prefill begin."""
        state = self.state
        if state.phase is not Phase.PREPARING:
            return
        state.leg_work.pre_passes += 1
        tools = () if state.request.tool_choice == "none" else self._tools
        instructions = state.request.instructions
        opening = self._render(lambda: self._dialect.opening(instructions, tools), state.leg_work)
        tokens = await self._take_in(state.input, "input", opening=opening)
        self._check_fits(len(tokens))
        state.turns = count_turns(state.input)
        self._emit(wire.Created(response=snapshot.created(state, self._model)))
        self._emit(wire.InProgress(response=snapshot.in_progress(self.state, self._model)))
        if state.request.generate is False:
            self._conversation.add(tokens)
            raise RunEnd(Ending("completed"))
        self._start_leg(tokens)

    async def sample(self) -> list[wire.RequiredInput] | None:
        """One leg, shown as it is sampled. Returns what the client owes then; nothing when all is said."""
        state = self.state
        while state.phase is Phase.SAMPLING:
            reader = self._begin_reading()
            if self._has_its_only_call:
                reason = "stop"
            else:
                self._conversation.begin(self._leg_request())
                reason = await self._read_leg(reader)
            self._end_reading(complete=reason == "stop")
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
        self._conversation.release()
        state.leg_work.post_passes += 1
        with state.leg_work.timed("post"):
            self._close_leg_accounts()
        if self.log.next_number == 0 and ending.error is None:
            self._emit(wire.Created(response=snapshot.created(state, self._model)))
        kind = {"completed": wire.Completed, "incomplete": wire.Incomplete, "failed": wire.Failed}[
            ending.status
        ]
        if self.log.refusal is None:
            self.response = snapshot.ended(state, self._model)
            self._emit(kind(response=self.response))
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
        work: Work,
        received: float,
        event_id: str | None = None,
        acknowledge: Callable[[], None] | None = None,
    ) -> None:
        """Take results and messages from the client, all or nothing.

        `work` has what it cost to receive them, `received` when they came (on `time.monotonic`). An accepted
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
                echoes = len(items) - len(new_items)
                results, messages = sort_appended(new_items, state.required, echoes)
            tokens = {item.call_id: await self._take_in([item], "input", work=work) for item in results}
            message_tokens = await self._take_in(messages, "input", work=work) if messages else []
            self._check_takes_input()  # it may have ended meanwhile
            self._check_fits(
                len(state.ledger)
                + sum(map(len, [*state.arrived.values(), *state.messages, *tokens.values()]))
                + len(message_tokens)
            )
            # From here on nothing can fail and nothing waits.
            self.received = received
            state.leg_work.add(work)
            state.arrived.update(tokens)
            if message_tokens:
                state.messages.append(message_tokens)
            if event_id is not None:
                state.event_ids.append(event_id)
            self._place_results()
            return self._acknowledge(acknowledge)

    async def steer(self, items: Sequence[wire.Item]) -> None:
        """As `append`, for messages of the user; answered by `response.steer.accepted`."""
        messages = [item for item in items if isinstance(item, wire.Message) and item.role == "user"]
        if len(messages) < len(items) or not any(wire.item_text(message) for message in messages):
            raise RequestError("Steering takes messages of the user, with text.", param="input")
        steer = wire.SteerRef(previous_response_id=self.state.id, id=f"steer_{secrets.token_hex(16)}")
        await self.append(
            items,
            work=Work(),
            received=monotonic(),
            acknowledge=lambda: self._emit(wire.SteerAccepted(steer=steer)),
        )

    def close(self) -> None:
        """The server shuts down: the leg that is going on may end, but no other begins. Never waits."""
        self._closing = True
        if self.state.phase is Phase.HELD:
            self.interrupt("shutdown")

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
            self._end_reading(complete=False)
            self._move(Phase.FINISHING)

    def _failure(self, error: RequestError) -> Ending:
        if self.log.next_number == 0:
            self.log.refuse(error)
        return Ending("failed", error=wire.ErrorDetail(error.code, error.message))

    def _render(self, render: Callable[[], Fragment], work: Work) -> Fragment:
        try:
            with work.timed("render"):
                fragment = render()
        except RenderingError as error:
            raise RequestError(str(error), param=error.param) from error
        except RecursionError as error:
            raise nested_too_deeply() from error
        work.characters_rendered += characters(fragment)
        return fragment

    async def _take_in(
        self,
        items: Sequence[wire.Item],
        param: str,
        *,
        opening: Fragment | None = None,
        work: Work | None = None,
    ) -> list[int]:
        """New items as tokens: filtered, rendered, tokenised, each once. Raises RequestError."""
        work = self.state.leg_work if work is None else work
        with work.timed("safety_in"):
            items = self._filters.input(items, param)
        fragment = (opening or []) + self._render(lambda: self._dialect.items(items), work)
        length = characters(fragment)
        work.characters_tokenised += length
        with work.timed("tokenise"):
            if length < TOKENISE_IN_THREAD:
                return self._dialect.tokenize(fragment)
            return await trio.to_thread.run_sync(self._dialect.tokenize, fragment)

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
        return [*self._turn_end(), *chain.from_iterable(queued)]

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
        if limit is not None and self.state.sampled >= limit:
            return Ending("incomplete", "max_output_tokens")
        error = context_too_long(len(self.state.ledger), self._model.max_context)
        return Ending("failed", error=wire.ErrorDetail(error.code, error.message))

    def _begin_reading(self) -> Parser:
        """A parser and a writer. What was shown of this leg before a restart is read again, silently."""
        tools = () if self.state.request.tool_choice == "none" else self._tools
        parser = self._dialect.parser(tools)
        self._writer = ItemWriter(self.state.id, len(self.state.output), self._emit)
        with self._writer.silent():
            for read in range(self.state.leg_start, len(self.state.ledger)):
                self._show(self._filters.output(parser.feed([self.state.ledger.tokens[read]])))
                if self._has_its_only_call:  # it stopped while the leg was being cut
                    self.state.ledger.cut(read + 1)
                    break
        return parser

    async def _read_leg(self, parser: Parser) -> str:
        """Show what is sampled as it comes. Returns why the leg stopped: `stop` or `length`."""
        while True:
            read = len(self.state.ledger)
            events = await self._engine_events()
            self._account(events)
            for event in events:
                match event:
                    case Sampled(tokens=tokens):
                        for token in tokens:
                            read += 1
                            self._write(parser.feed([token]))
                            if self._has_its_only_call:
                                self._account(await self._conversation.cut(read))
                                self._show(self._filters.flush())
                                return "stop"
                    case Failed(code=code, message=message):
                        raise RequestError(message, status=503, code=ENGINE_ERRORS[code])
                    case Stopped(reason=reason):
                        self._write(parser.finish())
                        self._show(self._filters.flush())
                        return reason

    async def _engine_events(self) -> list[Event]:
        """What the engine has to say. While it says nothing, and nothing else was logged, heartbeats are."""
        while True:
            with trio.move_on_at(self.log.last_append + self._heartbeat):
                return await self._conversation.events()
            self._emit(wire.InProgress(response=snapshot.in_progress(self.state, self._model)))

    def _account(self, events: Sequence[Event]) -> None:
        work = self.state.leg_work
        for event in events:
            match event:
                case Sampled(tokens=tokens):
                    work.tokens_sampled += len(tokens)
                case Prefilled():
                    self._account_prefill(event)
                case Stopped(decode_seconds=seconds):
                    work.times_ms.decode += seconds * 1e3
                case Began(at=at):
                    waited = at - self._conversation.handed_over
                    if waited > 0:  # else these are results that were placed while others were awaited
                        work.times_ms.queue += waited * 1e3
                        work.times_ms.first_step += (at - self.received) * 1e3

    def _account_prefill(self, event: Prefilled) -> None:
        state, work = self.state, self.state.leg_work
        work.tokens_prefilled += event.prefilled
        work.tokens_reused += max(0, state.leg_input - event.prefilled)
        work.times_ms.prefill += event.prefill_seconds * 1e3
        if state.work.legs == 0:  # the first leg is not over
            state.reused_at_start = event.reused

    def _write(self, parsed: Sequence[Parsed]) -> None:
        """Show what the parser read, and count what is remarkable in it."""
        work = self.state.leg_work
        for each in parsed:
            if isinstance(each, Malformed):
                work.malformed_calls += 1
                log.info("malformed_call", why=each.why)
            elif isinstance(each, ReasoningDelta):
                self.state.leg_reasoning_tokens += 1
        self._show(self._filters.output(parsed))

    @property
    def _has_its_only_call(self) -> bool:
        """Whether a call has ended and the request allows one a turn."""
        return self.state.request.parallel_tool_calls is False and bool(self._writer and self._writer.calls)

    def _show(self, parsed: Sequence[Parsed]) -> None:
        assert self._writer is not None
        for each in parsed:
            self._writer.write(each)

    def _end_reading(self, *, complete: bool) -> None:
        """The leg's items are whole, or as whole as they get."""
        if self._writer is None:
            return
        state = self.state
        self._writer.close(complete=complete)
        state.leg_work.engine_restarts += self._conversation.restarts
        self._conversation.restarts = 0
        state.leg_output = len(state.output)
        state.output += self._writer.items
        state.turns += bool(len(state.ledger) > state.leg_start)
        self._writer = None

    def _required_calls(self) -> list[wire.RequiredInput]:
        if self.state.lifecycle != "held":
            return []
        return [
            wire.RequiredInput(wire.OUTPUT_TYPES[type(item)], item.call_id, item.name)
            for item in self.state.output[self.state.leg_output :]
            if isinstance(item, wire.OutputCall) and item.status == "completed"
        ]

    def _place_results(self) -> None:
        """Results enter the ledger in call order, and are prefilled while those after them are awaited."""
        state = self.state
        while state.owed and state.owed[0].call_id in state.arrived:
            call = state.owed.pop(0)
            self._conversation.add([*self._turn_end(), *state.arrived.pop(call.call_id)])
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


def characters(fragment: Fragment) -> int:
    """Characters of text in a fragment; control tokens are none."""
    return sum(len(part) for part in fragment if isinstance(part, str))
