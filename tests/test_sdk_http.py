"""The openai SDK over HTTP, as people use it: with threads, with trio and with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from harness import TOOLS, Bench, Json, call, said, serving, thought
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, RateLimitError
from openai.types.responses import Response, ResponseStreamEvent
from strict_sdk import check_event
from test_http_responses import edge_of, post

SCRIPTS = {
    "look": [[thought("hm"), said("let me look"), call("read_file", path="a")], [said("it is empty")]],
    "endless": [[said("word " * 1600)]],
}
DEADLINE = 120.0  # s, of a whole test
LOOK: Json = {"model": "forced:look", "input": "what is in a?", "tools": TOOLS}


@asynccontextmanager
async def listening(**settings: Any) -> AsyncIterator[tuple[Bench, str]]:
    """A service, and the base URL of a real port that its edge listens on."""
    async with serving(SCRIPTS) as bench:
        edge = edge_of(bench, **settings)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        with trio.fail_after(DEADLINE):
            async with trio.open_nursery() as nursery:
                await nursery.start(trio.serve_listeners, edge.serve_stream, listeners)
                yield bench, f"http://127.0.0.1:{port}/v1"
                nursery.cancel_scope.cancel()


def sdk(base_url: str, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, **{"api_key": "sk-1", "max_retries": 0, **options})


def answer(response: Response) -> list[Any]:
    """The result of the only call of a Response."""
    [called] = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": called.call_id, "output": "nothing"}]


def check_stream(events: Iterable[ResponseStreamEvent]) -> Response:
    """Check every event, and that they are those of the script's first leg; the Response."""
    events = list(events)
    for event in events:
        check_event(event.to_dict(mode="json", exclude_unset=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "let me look"
    last = events[-1]
    assert last.type == "response.completed"
    return last.response


LOOK_INPUT: list[Any] = [{"role": "user", "content": LOOK["input"]}]


async def a_loop_of_tools(client: AsyncOpenAI) -> None:
    """What an agent does, streaming and not, with the server's store."""
    stream = await client.responses.create(**LOOK, stream=True)
    first = check_stream([event async for event in stream])
    second = await client.responses.create(
        model="forced:look", tools=TOOLS, input=answer(first), previous_response_id=first.id
    )
    assert (second.status, second.output_text) == ("completed", "it is empty")
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.previous_response_id == first.id
    history = [*LOOK_INPUT, *[item.to_dict() for item in first.output], *answer(first)]
    again = await client.responses.create(model="forced:look", tools=TOOLS, input=history)  # type: ignore[arg-type]
    assert again.output_text == "it is empty"
    async with client.responses.stream(**LOOK) as helper:
        assert (await helper.get_final_response()).output_text == "let me look"


async def the_other_routes(client: AsyncOpenAI) -> None:
    """Everything else that can be done with a Response."""
    response = await client.responses.create(**LOOK)
    assert await client.responses.retrieve(response.id) == response
    items = [item async for item in client.responses.input_items.list(response.id, limit=1)]
    assert [item.content[0].text for item in items] == [LOOK["input"]]  # type: ignore[union-attr]
    counted = await client.responses.input_tokens.count(**LOOK)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    assert (await client.responses.cancel(response.id)).status == "completed"
    await client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(NotFoundError) as raised:
            await gone(response.id)
        assert raised.value.code == "response_not_found"
    with pytest.raises(BadRequestError) as refused:
        await client.responses.create(**LOOK, background=True)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "background")
    with pytest.raises(BadRequestError):
        await client.responses.create(**LOOK, previous_response_id=response.id, stream=True)
    with pytest.raises(NotFoundError):
        await client.chat.completions.create(model="forced:look", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(NotFoundError):
        await client.responses.compact(model="forced:look", input="x")


async def test_on_trio() -> None:
    async with listening() as (bench, url), sdk(url) as client:
        await a_loop_of_tools(client)
        await the_other_routes(client)
        await bench.check_nothing_is_left()


async def test_on_asyncio() -> None:
    async def everything() -> None:
        async with sdk(url) as client:
            await asyncio.gather(a_loop_of_tools(client), the_other_routes(client))

    async with listening() as (bench, url):
        await trio.to_thread.run_sync(asyncio.run, everything())
        await bench.check_nothing_is_left()


async def test_in_a_thread() -> None:
    def everything() -> None:
        with OpenAI(base_url=url, api_key="sk-1", max_retries=0) as client:
            first = check_stream(client.responses.create(**LOOK, stream=True))
            second = client.responses.create(
                model="forced:look", tools=TOOLS, input=answer(first), previous_response_id=first.id
            )
            assert second.output_text == "it is empty"
            assert client.responses.retrieve(second.id) == second
            assert len(client.responses.input_items.list(second.id).data) == 1
            assert client.responses.cancel(second.id).status == "completed"
            client.responses.delete(second.id)
            assert client.responses.input_tokens.count(**LOOK).input_tokens > 0

    async with listening() as (bench, url):
        await trio.to_thread.run_sync(everything)
        await bench.check_nothing_is_left()


async def test_a_stream_that_is_closed_ends_its_run() -> None:
    async with listening() as (bench, url), sdk(url) as client:
        stream = await client.responses.create(model="forced:endless", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        [run] = bench.runs
        await stream.close()
        while bench.runs:
            await trio.lowlevel.checkpoint()
        assert run.response is not None
        assert run.response.incomplete_details is not None
        assert run.response.incomplete_details.reason == "cancelled"


async def test_a_request_that_is_cancelled_ends_its_run() -> None:
    async with listening() as (bench, url), sdk(url) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.responses.create(model="forced:endless", input="x"))
            while not bench.runs:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        while bench.runs:
            await trio.lowlevel.checkpoint()
        assert bench.service._ended["cancelled"] == 1


async def test_another_client_cancels_a_stream() -> None:
    async with listening() as (_, url), sdk(url) as client:
        stream = await client.responses.create(model="forced:endless", input="x", stream=True)
        created = await anext(aiter(stream))
        assert created.type == "response.created"
        cancelled = await client.responses.cancel(created.response.id)
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response == cancelled


async def test_the_sdk_comes_again_when_it_was_told_to() -> None:
    async with (
        listening(max_in_flight=1) as (bench, url),
        sdk(url, max_retries=3) as client,
        sdk(url) as other,
        trio.open_nursery() as nursery,
    ):
        with bench.engine_stopped():
            nursery.start_soon(lambda: client.responses.create(**LOOK))
            while not bench.runs:
                await trio.lowlevel.checkpoint()
            with pytest.raises(RateLimitError) as raised:
                await other.responses.create(**LOOK)
            assert raised.value.response.headers["retry-after"] == "1"
        assert (await client.responses.create(**LOOK)).status == "completed"


async def test_a_reset_ends_a_run() -> None:
    async with listening() as (bench, url):
        client = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2].removesuffix("/v1")))
        await client.send_all(post(model="forced:endless", stream=True))
        await client.receive_some(1)
        linger_on_for_no_time = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        client.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger_on_for_no_time)
        await trio.aclose_forcefully(client)
        while bench.runs:
            await trio.lowlevel.checkpoint()
        assert bench.service._ended["cancelled"] == 1
