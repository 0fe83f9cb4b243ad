"""Responses that are kept: read, listed, continued, cancelled and deleted over HTTP, by whoever made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from edge_fakes import get, read_replies
from harness import TOOLS, Json, call, custom_call, said, serving, thought, turns, user
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from test_http_responses import ask, connected, edge_of, events_of, post

Clock = trio.testing.MockClock

SCRIPTS = {
    "hello": [[said("hello there")], [said("hello again")], [said("and again")]],
    "look": [[thought("hm"), said("let me look"), call("read_file", path="a")], [said("it is empty")]],
    "endless": [[said("word " * 1600)]],
}
MINE, OTHERS = "Authorization: Bearer sk-1", "Authorization: Bearer sk-2"
KEYS = ("sk-1", "sk-2")


async def made(client: Any, **fields: Any) -> Json:
    """A Response that was made just now."""
    status, _, body = await ask(client, post("/v1/responses", MINE, **{"model": "forced:hello", **fields}))
    assert status == 200, body
    response: Json = json.loads(body)
    return response


async def asked(client: Any, method: str, path: str, key: str = MINE) -> tuple[int, Json]:
    """Status and body of what is at this path below /v1/responses."""
    await client.send_all(get(f"/v1/responses/{path}", key, method=method))
    status, _, body = (await read_replies(client, [method]))[0]
    return status, json.loads(body)


async def test_a_response_can_be_read_again(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        response = await made(client, input="hi", metadata={"a": "b"})
        assert await asked(client, "GET", response["id"]) == (200, response)
        events = events_of(await ask(client, post(model="forced:look", tools=TOOLS, stream=True)))
        ended = events[-1]["response"]
        assert await asked(client, "GET", ended["id"]) == (200, ended)


async def test_one_that_was_made_over_a_socket_can_be_read_too(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        peer = bench.connect()
        peer.create("forced:hello")
        response = (await peer.until("response.completed"))["response"]
        assert await asked(client, "GET", response["id"]) == (200, response)
        peer.create("forced:hello", store=False)
        unstored = (await peer.until("response.completed"))["response"]
        assert (await asked(client, "GET", unstored["id"]))[0] == 404


async def test_one_that_goes_on_is_read_in_progress(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        peer = bench.connect()
        peer.create("forced:look", input="what?")
        held = (await peer.until("response.done"))["response"]
        status, response = await asked(client, "GET", held["id"])
        assert (status, response["status"], response["id"]) == (200, "in_progress", held["id"])
        status, listed = await asked(client, "GET", f"{held['id']}/input_items")
        assert [item["content"][0]["text"] for item in listed["data"]] == ["what?"]
        status, error = await asked(client, "DELETE", held["id"])
        assert (status, error["error"]["code"]) == (400, "response_in_progress")


async def test_a_deleted_response_is_gone(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        response_id = (await made(client))["id"]
        gone = {"id": response_id, "object": "response", "deleted": True}
        assert await asked(client, "DELETE", response_id) == (200, gone)
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            assert (await asked(client, method, response_id + path))[0] == 404
        status, _, body = await ask(client, post(model="forced:hello", previous_response_id=response_id))
        assert (status, json.loads(body)["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]
)
async def test_another_key_finds_nothing(method: str, path: str, autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench, api_keys=KEYS)) as client:
        response = await made(client)
        status, error = await asked(client, method, response["id"] + path, OTHERS)
        _, unknown = await asked(client, method, "resp_unknown" + path, OTHERS)
        assert status == 404
        assert (
            error["error"]["message"].replace(response["id"], "resp_unknown") == unknown["error"]["message"]
        )
        fields = {"model": "forced:hello", "previous_response_id": response["id"]}
        assert (await ask(client, post("/v1/responses", OTHERS, **fields)))[0] == 400
        assert (await asked(client, "GET", response["id"]))[0] == 200


async def test_another_key_cannot_cancel_what_goes_on(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench:
        edge = edge_of(bench, api_keys=KEYS)
        async with connected(edge) as first, connected(edge) as second:
            await first.send_all(post("/v1/responses", MINE, model="forced:endless"))
            await turns(20)
            [run] = bench.runs
            assert (await asked(second, "POST", f"{run.state.id}/cancel", OTHERS))[0] == 404
            status, response = await asked(second, "POST", f"{run.state.id}/cancel")
            assert (status, response["status"]) == (200, "incomplete")
            assert response["incomplete_details"] == {"reason": "cancelled"}
            assert json.loads((await read_replies(first, ["POST"]))[0][2]) == response
        await bench.check_nothing_is_left()


async def test_a_cancel_ends_a_held_run_and_leaves_an_ended_one_as_it_is(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        peer = bench.connect()
        peer.create("forced:look")
        held = await peer.until("response.done")
        _, response = await asked(client, "POST", f"{held['response']['id']}/cancel")
        assert (await peer.until("response.incomplete"))["response"] == response
        ended = await made(client)
        assert await asked(client, "POST", f"{ended['id']}/cancel") == (200, ended)
        await bench.check_nothing_is_left()


async def test_a_stored_response_is_continued(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        first = await made(client, input="one " * 20)
        second = await made(client, input="two", previous_response_id=first["id"])
        third = await made(client, input="three", previous_response_id=second["id"], store=False)
        assert [each["lifecycle"] for each in (first, second, third)] == ["stateless", "stored", "stored"]
        assert third["output"][0]["content"][0]["text"] == "and again"
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 16
        fork = await made(client, input="other", previous_response_id=first["id"])
        assert fork["output"][0]["content"][0]["text"] == "hello again"
        _, _, body = await ask(client, post(model="forced:hello", previous_response_id=third["id"]))
        assert json.loads(body)["error"]["code"] == "previous_response_not_found"


async def test_a_tool_call_is_answered_in_the_next_request(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        fields: Json = {"model": "forced:look", "tools": TOOLS}
        first = await made(client, **fields, input="what is in a?")
        called = first["output"][-1]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "nothing"}
        second = await made(client, **fields, input=[output], previous_response_id=first["id"])
        assert second["output"][0]["content"][0]["text"] == "it is empty"
        stray = {**output, "call_id": "call_unknown"}
        body = (await ask(client, post(**fields, input=[stray], previous_response_id=first["id"])))[2]
        assert "No tool call found" in json.loads(body)["error"]["message"]


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    async with serving(SCRIPTS, state_dir=tmp_path) as bench, connected(edge_of(bench)) as client:
        first = await made(client, input="one")
    async with serving(SCRIPTS, state_dir=tmp_path) as bench, connected(edge_of(bench)) as client:
        assert await asked(client, "GET", first["id"]) == (200, first)
        second = await made(client, input="two", previous_response_id=first["id"])
        assert second["output"][0]["content"][0]["text"] == "hello again"
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        assert (await asked(client, "DELETE", first["id"]))[0] == 200
    async with serving(SCRIPTS, state_dir=tmp_path) as bench, connected(edge_of(bench)) as client:
        assert (await asked(client, "GET", first["id"]))[0] == 404
        assert (await asked(client, "GET", second["id"]))[0] == 200


async def test_tokens_of_another_vocabulary_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(SCRIPTS, state_dir=tmp_path) as bench, connected(edge_of(bench)) as client:
        first = await made(client, input="one")
    monkeypatch.setattr("protocol.service._vocabulary_of", lambda folder: "another")
    async with serving(SCRIPTS, state_dir=tmp_path) as bench, connected(edge_of(bench)) as client:
        peer = bench.connect()
        peer.create(
            "forced:hello", input="two", previous_response_id=first["id"], lifecycle="held", tools=None
        )
        await peer.until("response.in_progress")
        assert bench.runs[0].state.inherited == 0
        assert bench.runs[0].state.inherited_items == 2
        second = (await peer.until("response.completed"))["response"]
        assert second["output"][0]["content"][0]["text"] == "hello again"


HISTORY: list[Json] = [
    {"type": "message", "role": "developer", "content": "be kind"},
    user("what is in a?"),
    {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": None},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
    {**call("read_file", path="a"), "call_id": "c", "id": "fc_x"},
    {**custom_call("apply_patch", "+ x"), "call_id": "d"},
    {"type": "function_call_output", "call_id": "c", "output": "nothing"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "ok"}]},
]


async def test_input_items_are_those_of_the_api(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        first = await made(client, input=HISTORY)
        status, listed = await asked(client, "GET", f"{first['id']}/input_items?order=asc")
        assert (status, listed["object"], listed["has_more"]) == (200, "list", False)
        assert [item["type"] for item in listed["data"]] == [item["type"] for item in HISTORY]
        assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
        items = TypeAdapter(list[ResponseItem]).validate_python(listed["data"], strict=True)
        assert [item.type for item in items] == [item["type"] for item in HISTORY]
        second = await made(client, input="and?", previous_response_id=first["id"])
        _, listed = await asked(client, "GET", f"{second['id']}/input_items")
        assert [item["content"][0]["text"] for item in listed["data"]] == ["and?"]


async def test_input_items_come_in_pages(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        response = await made(client, input=[user(str(number)) for number in range(25)])
        path = f"{response['id']}/input_items"

        async def pages(query: str) -> list[list[str]]:
            found: list[list[str]] = []
            after = ""
            while True:
                _, page = await asked(client, "GET", f"{path}?{query}{after}")
                found.append([item["content"][0]["text"] for item in page["data"]])
                if not page["has_more"]:
                    return found
                after = f"&after={page['last_id']}"

        newest_first = [str(number) for number in reversed(range(25))]
        assert await pages("") == [newest_first[:20], newest_first[20:]]
        assert await pages("order=asc&limit=10") == [
            [str(number) for number in range(begin, min(begin + 10, 25))] for begin in (0, 10, 20)
        ]
        assert await pages("limit=25") == [newest_first]
        for query, param in (
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=msg_unknown", "after"),
        ):
            status, error = await asked(client, "GET", f"{path}?{query}")
            assert (status, error["error"]["param"]) == (400, param)


async def test_a_response_cannot_be_streamed_again(autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        response = await made(client)
        status, error = await asked(client, "GET", response["id"] + "?stream=true")
        assert (status, error["error"]["param"]) == (400, "stream")
        assert (await asked(client, "GET", response["id"] + "?stream=false"))[0] == 200


@given(
    instructions=st.none() | st.text(max_size=8),
    text=st.text(max_size=30),
    with_tools=st.booleans(),
    tool_choice=st.sampled_from(["auto", "none"]),
    again=st.text(max_size=8),
    same_instructions=st.booleans(),
)
async def test_input_tokens_are_those_of_the_usage(
    instructions: str | None,
    text: str,
    with_tools: bool,
    tool_choice: str,
    again: str,
    same_instructions: bool,
) -> None:
    tools = {"tools": TOOLS, "tool_choice": tool_choice} if with_tools else {}
    first: Json = {"model": "random", "instructions": instructions, "input": text, **tools}
    other = {} if same_instructions else {"instructions": "otherwise"}
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        response: Json = {"id": None}
        for fields in (first, {**first, "input": again, **other}):
            fields["previous_response_id"] = response["id"]
            status, _, body = await ask(client, post("/v1/responses/input_tokens", MINE, **fields))
            response = await made(client, **fields, max_output_tokens=5)
            counted = json.loads(body)
            assert (status, counted["object"]) == (200, "response.input_tokens")
            assert counted["input_tokens"] == response["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [({}, 400), ({"model": "x"}, 404), ({"model": "random", "previous_response_id": "resp_x"}, 400)],
)
async def test_what_cannot_be_counted(fields: Json, status: int, autojump_clock: Clock) -> None:
    async with serving(SCRIPTS) as bench, connected(edge_of(bench)) as client:
        assert (await ask(client, post("/v1/responses/input_tokens", **fields)))[0] == status
