"""Coding agents as they were recorded, played against the server: what they need is what they get."""

from __future__ import annotations

import json

import pytest
import trio.testing
from harness import Peer, call, custom_call, said, serving, thought
from real_server import PATCH, Client, Json, RealServer, connected
from recorded_frames import (
    APPEND_HEADERS,
    CHAINED_HEADERS,
    CHAINED_TOOLS,
    OLDEST_HEADERS,
    PATCHING_TOOLS,
    append,
    append_create,
    chained_create,
    empty_warm_up,
    first_turn,
    prose,
    warm_up,
)
from strict_sdk import DONE, check_event

pytest_plugins = ["shared_server"]

Clock = trio.testing.MockClock

ENDS = (DONE, "response.completed")


async def turn(client: Client | Peer, frame: Json) -> tuple[list[Json], Json]:
    """One request of a client that reads like these: the items of `output_item.done`, up to the event that
    ends the turn for it, and that event. AssertionError for what it could not read.
    """
    text = json.dumps(frame)
    if isinstance(client, Peer):
        client.say_raw(text)
    else:
        await client.send_text(text)
    items = []
    while True:
        event = await (client.next() if isinstance(client, Peer) else client.receive())
        if "response" in event:
            check_event({**event, "response": {**event["response"], "tools": []}})  # tools are its own
        else:
            check_event(event)
        if event["type"] == "response.output_item.done":
            items.append(event["item"])
        if event["type"] in ENDS:
            response = event["response"]
            usage = response["usage"]
            assert response["id"].startswith("resp_")
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            assert usage["output_tokens"] > 0 or frame.get("generate") is False
            return items, event


def output(item: Json, text: str) -> Json:
    """What such a client's tool made of a call."""
    return {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": text}


def echo(item: Json) -> Json:
    """The server's own item as an old client sends it back: without id and status."""
    return {name: value for name, value in item.items() if name not in ("id", "status")}


# ---- the append client
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("echoes", [False, True])
async def test_a_run_of_the_append_client(echoes: bool, server: RealServer) -> None:
    """`echoes`: as versions before 0.100 did, with the server's own output in front of the results."""
    create = append_create("forced:patch")
    assert len(json.dumps(create)) == 19_682
    async with connected(server, *APPEND_HEADERS) as client:
        assert "sec-websocket-extensions" not in client.head.lower()
        assert "sec-websocket-protocol" not in client.head.lower()

        items, end = await turn(client, create)
        assert end["type"] == DONE
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        assert (items[2]["name"], items[2]["arguments"]) == ("exec_command", '{"cmd": "cat a.py"}')
        run = end["response"]["id"]

        before = [echo(item) for item in items] if echoes else []
        items, end = await turn(client, append(*before, output(items[2], prose(143)), metadata=not echoes))
        assert (end["type"], end["response"]["id"]) == (DONE, run)
        assert [item["type"] for item in items] == ["message", "custom_tool_call"]
        assert (items[1]["name"], items[1]["input"]) == ("apply_patch", PATCH)

        before = [echo(item) for item in items] if echoes else []
        items, end = await turn(client, append(*before, output(items[1], prose(91)), metadata=not echoes))
        assert (end["type"], end["response"]["id"]) == ("response.completed", run)
        assert [item["content"][0]["text"] for item in items] == ["done"]
        work = end["response"]["work"]
        assert work["legs"] == 3
        assert "tools[5]: tool of type web_search" in work["ignored"]

        # Nothing is left over that it would read as the answer to its next request.
        await client.send_text(json.dumps(append(output({"type": "function_call", "call_id": "c"}, "late"))))
        error = await client.receive()
        assert (error["type"], error["status"]) == ("error", 500)
        assert error["error"]["code"] == "previous_response_not_found"
        _, end = await turn(client, create)
        assert end["type"] == DONE


async def test_echoes_cost_the_append_client_nothing(server: RealServer) -> None:
    """The run's tokens are the same with them and without."""
    tokens = []
    for echoes in (False, True):
        async with connected(server, *APPEND_HEADERS) as client:
            items, _ = await turn(client, {**append_create("forced:look"), "instructions": ""})
            before = [echo(item) for item in items] if echoes else []
            _, end = await turn(client, append(*before, output(items[-1], "a.py")))
            tokens.append(end["response"]["usage"]["total_tokens"])
    assert tokens[0] == tokens[1]


async def test_a_client_without_a_beta_header_is_not_held(server: RealServer) -> None:
    """It appends after `response.completed`: that is an error, and the connection stays."""
    async with connected(server, *OLDEST_HEADERS) as client:
        items, end = await turn(client, {**append_create("forced:look"), "instructions": ""})
        assert end["type"] == "response.completed"
        history = [*map(echo, items), output(items[-1], "a.py")]
        await client.send_text(json.dumps(append(*history, metadata=False)))
        error = await client.receive()
        assert (error["type"], error["status"]) == ("error", 400)
        assert error["error"]["code"] == "previous_response_not_found"
        create = {**append_create("forced:look"), "instructions": ""}
        items, end = await turn(client, {**create, "input": [*create["input"], *history]})
        assert items[0]["content"][0]["text"] == "it is empty"
        assert end["type"] == "response.completed"


LOOK = [[thought("hm"), said("a look"), call("exec_command", cmd="ls")], [said("done")]]
LOOK_TOOLS = [{"type": "function", "name": "exec_command", "parameters": {"type": "object"}}]


async def held_prototype(peer: Peer) -> None:
    peer.create("forced:look", tools=LOOK_TOOLS, lifecycle=None)
    await peer.until(DONE)
    peer.heard.clear()


async def test_a_hold_timeout_is_a_closed_socket_and_no_frame(autojump_clock: Clock) -> None:
    async with serving({"look": LOOK}, hold_timeout=600) as bench:
        peer = bench.connect(prototype=True)
        await held_prototype(peer)
        code, _ = await peer.until_closed()
        assert code == 1000
        assert peer.heard == []
        await bench.check_nothing_is_left()


async def test_a_new_request_supersedes_without_a_frame_of_the_old(autojump_clock: Clock) -> None:
    async with serving({"look": LOOK}) as bench:
        peer = bench.connect(prototype=True)
        await held_prototype(peer)
        await held_prototype(peer)
        peer.create("forced:look", tools=LOOK_TOOLS, lifecycle=None)
        assert (await peer.next())["type"] == "response.created"
        await peer.until(DONE)


async def test_a_shutdown_is_a_closed_socket_and_no_frame(autojump_clock: Clock) -> None:
    async with serving({"look": LOOK}) as bench:
        peer = bench.connect(prototype=True)
        await held_prototype(peer)
        await bench.service.drain()
        await peer.until_closed()
        assert peer.heard == []


async def test_a_broken_call_is_not_awaited(autojump_clock: Clock) -> None:
    """A custom call that is cut by the token limit: the run ends, and says so."""
    script = [[custom_call("apply_patch", PATCH)]]
    async with serving({"cut": script}) as bench:
        peer = bench.connect(prototype=True)
        peer.create("forced:cut", max_output_tokens=20, lifecycle=None)
        incomplete = await peer.until("response.incomplete")
        assert incomplete["response"]["output"][0]["status"] == "incomplete"


# ---- the chained client


@pytest.mark.parametrize("tools", [CHAINED_TOOLS, PATCHING_TOOLS])
async def test_a_chain_from_the_warm_up_to_the_answer(tools: list[Json], server: RealServer) -> None:
    """Every frame has the tools again; of the items only new ones come, and only those are prefilled."""
    frame = warm_up("forced:look", tools)
    if tools is CHAINED_TOOLS:
        assert abs(len(json.dumps(frame)) - 36_966) < 500
    async with connected(server, *CHAINED_HEADERS) as client:
        items, end = await turn(client, frame)
        assert (items, end["response"]["output"]) == ([], [])
        assert end["type"] == "response.completed"
        warm = end["response"]["usage"]["input_tokens"]
        assert warm > 5000
        items, end = await turn(
            client, chained_create("forced:look", first_turn(), tools, end["response"]["id"])
        )
        called = items[-1]
        assert (called["type"], called["name"]) == ("function_call", "exec_command")
        assert end["response"]["usage"]["input_tokens_details"]["cached_tokens"] == warm - 1
        result = [output(called, prose(143))]
        items, end = await turn(client, chained_create("forced:look", result, tools, end["response"]["id"]))
        assert items[0]["content"][0]["text"] == "it is empty"
        assert end["response"]["work"]["tokens_prefilled"] < 200


async def test_a_conversation_that_is_sent_whole_goes_on() -> None:
    """What the chained client does when its parent is not known: everything again, on a new connection."""
    async with serving({"look": LOOK}) as bench:
        peer = bench.connect()
        history = [*warm_up("forced:look", CHAINED_TOOLS)["input"], *first_turn()]
        items, end = await turn(peer, chained_create("forced:look", history, CHAINED_TOOLS, None))
        assert end["type"] == "response.completed"
        called = items[-1]
        assert (called["type"], called["name"]) == ("function_call", "exec_command")
        history += [{**item, "id": f"sent_{item['id']}"} for item in items]
        history.append({**output(called, prose(143)), "id": "fco_1"})
        items, end = await turn(peer, chained_create("forced:look", history, CHAINED_TOOLS, None))
        assert items[0]["content"][0]["text"] == "done"
        assert end["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 5000


async def test_an_empty_warm_up_is_completed(server: RealServer) -> None:
    async with connected(server, *CHAINED_HEADERS) as client:
        items, end = await turn(client, empty_warm_up("forced:hello"))
        assert items == []
        assert {"id", "object", "created_at", "status", "model"} <= end["response"].keys()
        assert end["response"]["status"] == "completed"
        unknown = {"type": "additional_tools", "role": "developer", "tools": CHAINED_TOOLS}
        items, _ = await turn(client, chained_create("forced:hello", [unknown, *first_turn()], [], None))
        assert items[0]["content"][0]["text"] == "hello there"
