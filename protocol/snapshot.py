"""The Response object of a run at one moment, from its state. Pure functions.

Instructions and tools are repeated in the first and the last event only: they can be tens of kilobytes, and a
pause must not cost bytes that grow with anything but its own leg.
"""

from __future__ import annotations

from time import time

from protocol import wire
from protocol.models import Model
from protocol.state import RunState


def created(state: RunState, model: Model) -> wire.Response:
    """As in `response.created`."""
    return _with_request(_base(state, model, "in_progress"), state)


def in_progress(state: RunState, model: Model) -> wire.Response:
    """As in `response.in_progress`: an answer, or a heartbeat."""
    return _base(state, model, "in_progress")


def done(state: RunState, model: Model, *, again: bool) -> wire.Response:
    """As in `response.done`: items, usage and work of the leg that is over. `cached_tokens` are those whose
    KV was there when the leg's input came. Sent `again`, for results that are still missing, it has what came
    since: no items.
    """
    response = _base(state, model, "in_progress")
    work = state.leg_work
    if again:
        response.work = work.as_json()
        return response
    response.output = state.output[state.leg_output :]
    response.usage = leg_usage(state)
    response.work = work.as_json()
    return response


def leg_usage(state: RunState) -> wire.Usage:
    """Of the leg that is over, while it is the one that is accounted for."""
    output_tokens = len(state.ledger) - state.leg_start
    reused = state.leg_work.tokens_reused
    return _usage(state.leg_input, reused, output_tokens, state.leg_reasoning_tokens)


def ended(state: RunState, model: Model, usage: wire.Usage | None = None) -> wire.Response:
    """As in the terminal event: every item, usage and work of the whole run. Each input token is counted
    once, and `cached_tokens` is what the first leg found already there. Another `usage` takes its place.
    """
    ending = state.ending
    assert ending is not None
    response = _with_request(_base(state, model, ending.status), state)
    response.output = list(state.output)
    response.usage = usage or _usage(
        state.rendered, state.reused_at_start, state.sampled, state.reasoning_tokens
    )
    response.work = state.work.as_json()
    response.error = ending.error
    if ending.reason is not None:
        response.incomplete_details = wire.IncompleteDetails(ending.reason)
    if ending.status == "completed":
        response.completed_at = int(time())
    return response


def _base(state: RunState, model: Model, status: wire.Status) -> wire.Response:
    request = state.request
    sampling = model.sampling(request)
    response = wire.Response(
        id=state.id,
        created_at=state.created_at,
        status=status,
        model=model.id,
        output=[],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        metadata=request.metadata or {},
        store=request.store is not False,
        user=request.user,
        prompt_cache_key=request.prompt_cache_key,
        safety_identifier=request.safety_identifier,
        lifecycle=state.lifecycle,
    )
    if request.tool_choice is not None:
        response.tool_choice = request.tool_choice
    return response


def _with_request(response: wire.Response, state: RunState) -> wire.Response:
    response.instructions = state.request.instructions
    response.tools = state.request.tools or []
    return response


def _usage(input_tokens: int, cached: int, output_tokens: int, reasoning: int) -> wire.Usage:
    return wire.Usage(
        input_tokens=input_tokens,
        input_tokens_details=wire.InputTokensDetails(cached_tokens=cached),
        output_tokens=output_tokens,
        output_tokens_details=wire.OutputTokensDetails(reasoning_tokens=reasoning),
        total_tokens=input_tokens + output_tokens,
    )
