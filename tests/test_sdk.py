"""The openai SDK as a client: every event is one of its types, and its connection can be used as it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio.testing
from harness import (
    Bench,
    Json,
    Peer,
    call,
    custom_call,
    result,
    results,
    said,
    serving,
    thought,
    user,
)
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseSteerFailedEvent,
)
from openai.types.responses.responses_server_event import (
    ResponseTextWsDelta,
    ResponseWsCompleted,
    ResponseWsCreated,
    ResponseWsError,
)
from pydantic import ValidationError
from real_server import RealServer
from strict_sdk import DONE, EVENTS, EXTRA_CODES, EXTRA_REASONS, check_event

pytest_plugins = ["shared_server"]

Clock = trio.testing.MockClock

# Everything that a server can send that has neither hosted tools, audio, images, refusals nor summaries.
SENT = {
    *("response.created", "response.in_progress", DONE),
    *("response.completed", "response.incomplete", "response.failed", "error"),
    *("response.output_item.added", "response.output_item.done"),
    *("response.content_part.added", "response.content_part.done"),
    *("response.output_text.delta", "response.output_text.done"),
    *("response.reasoning_text.delta", "response.reasoning_text.done"),
    *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
    *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
    *("response.steer.accepted", "response.steer.failed", "response.inject.failed"),
}
LONG = "word " * 300
SCRIPTS = {
    "all": [
        [thought("hm"), said("first"), call("read_file", path="a"), custom_call("apply_patch", "+ x")],
        [said("done")],
    ],
    "look": [[call("read_file", path="a")], [said("done")]],
    "long": [[said(LONG)]],
    "long-call": [[call("read_file", path=LONG)]],
}


async def run_all(bench: Bench) -> list[Peer]:
    """Clients that between them were sent every kind of event, on named lanes and on the default one."""
    whole = bench.connect()
    for lane in ({}, {"stream_id": "a.lane"}):
        whole.create("forced:all", instructions="be brief", metadata={"a": "b"}, **lane)
        done = await whole.until(DONE)
        whole.say("response.steer", previous_response_id=done["response"]["id"], input="quick")
        whole.append(results(done, "a", "b")[0], **lane)
        await whole.until(DONE)
        whole.append(results(done, "a", "b")[1], user("and?"), **lane)
        await whole.until("response.completed")
    whole.create("forced:all", generate=False, tools=None)
    await whole.until("response.completed")

    cut = bench.connect()
    for model, limit in (("forced:long", 3), ("forced:long-call", 30)):
        cut.create(model, max_output_tokens=limit)
        await cut.until("response.incomplete")
    cut.create("forced:long")
    response = (await cut.until("response.created"))["response"]
    cut.say("response.cancel", response_id=response["id"])
    await cut.until("response.incomplete")
    cut.create("forced:look")
    await cut.until(DONE)
    cut.create("forced:look")
    for kind in ("response.incomplete", DONE, "response.incomplete"):  # superseded, and the hold timeout
        await cut.until(kind)

    failing = bench.connect()
    failing.create("forced:long", input="x" * 150)
    await failing.until("response.failed")
    failing.create("forced:long", input="x" * 1000)
    await failing.until("error")
    failing.create("unknown", stream_id="b")
    await failing.until("error")
    failing.say_raw("{")
    await failing.until("error")
    failing.say("response.steer", previous_response_id="resp_1", input=[user("more")])
    await failing.until("response.steer.failed")
    failing.say("response.inject", response_id="resp_1", input=[result(done)])
    await failing.until("response.inject.failed")

    waiting = bench.connect()
    waiting.create("forced:look")
    await waiting.until(DONE)
    await bench.service.drain()
    await waiting.until("response.incomplete")
    waiting.create("forced:look")
    await waiting.until("error")
    return [whole, cut, failing, waiting]


async def test_every_event_is_one_of_the_sdk(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS, engine={"max_context": 400}) as bench:
        heard = [event for peer in await run_all(bench) for event in peer.heard]
    for event in heard:
        check_event(event)
    assert {event["type"] for event in heard} == SENT
    responses = [event["response"] for event in heard if "response" in event]
    reasons = {(response["incomplete_details"] or {}).get("reason") for response in responses}
    assert reasons >= EXTRA_REASONS | {"max_output_tokens"}
    codes = {(event.get("response", event).get("error") or {}).get("code") for event in heard}
    assert codes >= EXTRA_CODES
    items = [item for response in responses for item in response["output"]]
    assert {(item["type"], item["status"]) for item in items} >= {
        *(("message", "completed"), ("message", "incomplete")),
        *(("function_call", "completed"), ("function_call", "incomplete")),
        *(("reasoning", "completed"), ("custom_tool_call", "completed")),
    }


def test_the_check_itself_sees_what_is_wrong() -> None:
    delta: Json = {
        **{"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0},
        **{"delta": "x", "logprobs": [], "sequence_number": 1},
    }
    assert type(check_event(delta)) is ResponseTextWsDelta
    for name in delta.keys() - {"type"}:
        with pytest.raises(ValidationError):
            check_event({key: value for key, value in delta.items() if key != name})
        with pytest.raises(ValidationError):
            check_event({**delta, name: None})
    with pytest.raises(AssertionError):
        check_event({**delta, "extra": 1})
    with pytest.raises(KeyError):
        check_event({**delta, "type": "response.nonsense"})


def test_what_is_sent_is_known_to_the_sdk_but_for_one_event() -> None:
    assert SENT - EVENTS.keys() == {DONE}


# ---- its client
# ---------------------------------------------------------------------------------------------------


def test_models_are_listed_sync_and_async(server: RealServer) -> None:
    async def list_models() -> list[str]:
        async with AsyncOpenAI(api_key="any", base_url=server.url + "/v1") as client:
            return [model.id async for model in await client.models.list()]

    with OpenAI(api_key="any", base_url=server.url + "/v1") as client:
        models = [model.id for model in client.models.list()]
        assert models[0] == "fermata-embedded"
        assert "forced:hello" in models
        assert client.models.retrieve("forced:hello").object == "model"
    assert asyncio.run(list_models()) == models


def test_its_connection_runs_responses_on_several_lanes(server: RealServer) -> None:
    asyncio.run(use_connection(server.url))


async def use_connection(url: str) -> None:
    client = AsyncOpenAI(api_key="any", base_url=url + "/v1")
    tool: Any = {"type": "function", "name": "exec_command", "parameters": {}, "strict": False}
    async with client, client.responses.connect() as connection, asyncio.timeout(60):
        lanes = ["one", "two", "three"]
        for lane in lanes:
            await connection.response.create(model="forced:hello", input="hello", stream_id=lane)
        completed = {}
        async for event in connection:
            assert event.stream_id in lanes
            if isinstance(event, ResponseWsCreated):
                assert event.sequence_number == 0
            if isinstance(event, ResponseWsCompleted):
                completed[event.stream_id] = event.response.output_text
                if len(completed) == len(lanes):
                    break
        assert completed == dict.fromkeys(lanes, "hello there")

        await connection.response.create(model="forced:look", input="look", tools=[tool])
        async for event in connection:
            assert event.stream_id is None
            if isinstance(event, ResponseWsCompleted):
                break
        called = event.response.output[-1]
        assert isinstance(called, ResponseFunctionToolCall)
        assert (called.name, called.arguments) == ("exec_command", '{"cmd": "ls"}')
        assert event.response.usage is not None
        assert event.response.usage.output_tokens > 0

        await connection.response.create(model="forced:look", background=True, stream_id="one")
        error = await connection.recv()
        assert isinstance(error, ResponseWsError)
        assert (error.status, error.error.param, error.stream_id) == (400, "background", "one")
        await connection.response.steer(previous_response_id=event.response.id, input="more")
        failed = await connection.recv()
        assert isinstance(failed, ResponseSteerFailedEvent)
        assert failed.steer.input == "more"
        await connection.response.create(model="forced:hello", input=[], generate=False)
        async for event in connection:
            if isinstance(event, ResponseWsCompleted):
                assert event.response.output == []
                break
