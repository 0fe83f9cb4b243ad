"""The agent loop: ask, read a leg, make the calls it asks for, send their results, until nothing is owed.

It knows legs and calls. It does not know what tools do (`call_tool` does), nor how the loop looks on a
screen: `watch` is told after each change of the result, which fills while the run goes on. Strategy: who
keeps the conversation between two legs is a `Lifecycle`, the loop is the same for all of them. Times are
seconds of trio's clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import trio

from protocol.client import Connection, Items, Run
from protocol.client.views import Event, Item
from protocol.wire import RequiredInput

Tool: TypeAlias = Callable[[str, str], Awaitable[str]]


@dataclass(slots=True)
class Call:
    """A tool call: as the model writes it, and then as it is made."""

    id: str
    name: str
    arguments: str = ""
    output: str | None = None
    began: float | None = None
    ended: float | None = None

    @property
    def seconds(self) -> float | None:
        """How long the tool took; None while it has not answered."""
        return None if self.began is None or self.ended is None else self.ended - self.began


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a leg or a run: sampled, prefilled, and kept (their KV was there when the input came)."""

    sampled: int = 0
    prefilled: int = 0
    kept: int = 0

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(self.sampled - other.sampled, self.prefilled - other.prefilled, self.kept - other.kept)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.sampled + other.sampled, self.prefilled + other.prefilled, self.kept + other.kept)


@dataclass(slots=True)
class Leg:
    """One leg: its text, its calls, its tokens (None while it is being sampled), and when things happened."""

    number: int
    asked: float
    first_token: float | None = None
    ended: float | None = None
    answered: float | None = None
    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: Tokens | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the create or append to the first sign of output."""
        return None if self.first_token is None else self.first_token - self.asked

    @property
    def waiting(self) -> float | None:
        """Seconds that the run was held after this leg, until the results were sent."""
        return None if self.ended is None or self.answered is None else self.answered - self.ended


@dataclass(slots=True)
class AgentResult:
    """What an agent has done, so far and in the end. `work` is the server's accounting of the whole run."""

    response_id: str = ""
    status: str = "in_progress"
    reason: str = ""
    legs: list[Leg] = field(default_factory=list)
    work: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> str:
        """The text of the last leg."""
        return self.legs[-1].text.strip() if self.legs else ""

    @property
    def calls(self) -> list[Call]:
        """The calls of all legs, in order."""
        return [call for leg in self.legs for call in leg.calls]

    @property
    def tokens(self) -> Tokens:
        """The tokens of all legs."""
        return sum((leg.tokens for leg in self.legs if leg.tokens), Tokens())


class Lifecycle(Protocol):
    """Who keeps the conversation between two legs."""

    async def send(self, items: Items) -> Run:
        """Sends the next items; the run whose events are the next leg."""

    def owed(self, event: Event) -> Sequence[RequiredInput]:
        """The results that are owed after a leg that ended with `event`."""

    def tokens(self, event: Event, earlier: Sequence[Leg]) -> Tokens:
        """The tokens of the leg that ended with `event`."""

    async def aclose(self) -> None:
        """Cancels what is not over."""


class Held:
    """The run itself: it is paused between two legs, and its terminal event counts all of them."""

    def __init__(self, connection: Connection, fields: dict[str, Any]) -> None:
        self._connection = connection
        self._fields = fields
        self._run: Run | None = None

    async def send(self, items: Items) -> Run:
        """The first items create the run, later ones are appended."""
        if self._run is None:
            self._run = await self._connection.held(input=items, **self._fields)
        else:
            await self._run.append(items)
        return self._run

    def owed(self, event: Event) -> Sequence[RequiredInput]:
        """What `response.done` says."""
        return event.required_input

    def tokens(self, event: Event, earlier: Sequence[Leg]) -> Tokens:
        """`response.done` counts its leg; of a terminal event, what the earlier legs have not counted."""
        told = _told_tokens(event)
        return told - sum((leg.tokens for leg in earlier if leg.tokens), Tokens()) if event.terminal else told

    async def aclose(self) -> None:
        """Cancels the run if it is not over."""
        if self._run is not None:
            await self._run.aclose()


LIFECYCLES: dict[str, Callable[[Connection, dict[str, Any]], Lifecycle]] = {"held": Held}


async def run_agent(
    connection: Connection,
    *,
    model: str,
    instructions: str | None,
    tools: Sequence[dict[str, Any]],
    task: str,
    call_tool: Tool,
    lifecycle: str = "held",
    max_calls: int | None = None,
    watch: Callable[[AgentResult], None] = lambda result: None,
    **fields: Any,
) -> AgentResult:
    """Runs `task` to its end. The calls of a leg are made in parallel, by `call_tool(name, arguments)`.

    A leg that would bring the number of calls above `max_calls` ends the run as incomplete, for the reason
    `max_calls`. `fields` are further fields of the API. Raises what the connection raises (ServerError,
    ConnectionLost); what `call_tool` raises comes in an ExceptionGroup. There is no deadline for tools: give
    them one in `call_tool`. Cancellation, like any exception, cancels the run, within the client's
    `GOODBYE_TIMEOUT`.
    """
    request = {"model": model, "instructions": instructions, "tools": tools, **fields}
    conversation = LIFECYCLES[lifecycle](connection, request)
    result = AgentResult()
    items: Items = [{"type": "message", "role": "user", "content": task}]
    try:
        while True:
            leg = Leg(len(result.legs) + 1, trio.current_time())
            result.legs.append(leg)
            watch(result)
            run = await conversation.send(items)
            result.response_id = run.id
            last = await _read_leg(run, leg, lambda: watch(result))
            leg.tokens = conversation.tokens(last, result.legs[:-1])
            owed = conversation.owed(last)
            if not owed:
                _conclude(result, last)
                return result
            watch(result)
            if max_calls is not None and len(result.calls) > max_calls:
                result.status, result.reason = "incomplete", "max_calls"
                return result
            items = await _results(leg, owed, call_tool, lambda: watch(result))
            leg.answered = trio.current_time()
    finally:
        await conversation.aclose()
        watch(result)


async def _read_leg(run: Run, leg: Leg, changed: Callable[[], None]) -> Event:
    """Takes in the events of a leg; returns the one that ends it."""
    async for event in run:
        _take(leg, event)
        if event.type == "response.done" or event.terminal:
            leg.ended = trio.current_time()
            return event
        changed()
    raise AssertionError("a run's events ended without a terminal one")


def _take(leg: Leg, event: Event) -> None:
    match event:
        case Event(type="response.output_item.added", item=Item() as item):
            if item.type in ("function_call", "custom_tool_call"):
                leg.calls.append(Call(item.call_id or "", item.name or ""))
            elif leg.text:
                leg.text += "\n"
        case Event(type="response.output_item.done", item=Item() as item):
            for call in leg.calls:
                if call.id == item.call_id:
                    call.arguments = item.arguments or item.input or ""
        case Event(type="response.function_call_arguments.delta" | "response.custom_tool_call_input.delta"):
            for call in leg.calls[-1:]:
                call.arguments += event.delta
        case Event(type="response.output_text.delta"):
            leg.text += event.delta
        case Event(type="response.reasoning_text.delta"):
            leg.reasoning += event.delta
        case _:
            return
    leg.first_token = leg.first_token or trio.current_time()


async def _results(
    leg: Leg, owed: Sequence[RequiredInput], call_tool: Tool, changed: Callable[[], None]
) -> list[dict[str, Any]]:
    """Makes the calls that are owed, in parallel; their results in the order of `owed`."""
    calls = {call.id: call for call in leg.calls}

    async def make(call: Call) -> None:
        call.began = trio.current_time()
        changed()
        call.output = await call_tool(call.name, call.arguments)
        call.ended = trio.current_time()
        changed()

    async with trio.open_nursery() as nursery:
        for one in owed:
            if one.call_id not in calls:
                calls[one.call_id] = Call(one.call_id, one.name)
                leg.calls.append(calls[one.call_id])
            nursery.start_soon(make, calls[one.call_id])
    return [{"type": one.type, "call_id": one.call_id, "output": calls[one.call_id].output} for one in owed]


def _told_tokens(event: Event) -> Tokens:
    """The tokens that an event tells of: in its `work`, or without that in its `usage`."""
    response = event.response
    if response is None:
        return Tokens()
    if work := response.work:
        return Tokens(
            work.get("tokens_sampled", 0), work.get("tokens_prefilled", 0), work.get("tokens_reused", 0)
        )
    if usage := response.usage:
        kept = usage.input_tokens_details.cached_tokens
        return Tokens(usage.output_tokens, usage.input_tokens - kept, kept)
    return Tokens()


def _conclude(result: AgentResult, last: Event) -> None:
    response = last.response
    result.status = last.type.removeprefix("response.")
    if response is None:
        return
    result.work = response.work
    for why in (response.error, response.incomplete_details):
        if why is not None:
            result.reason = why.reason or why.message or why.code or ""
