"""What a create can ask for; texts so long that a thread tokenises them."""

from __future__ import annotations

import pytest
import trio

import protocol.intake
from protocol.intake import TOKENISE_IN_THREAD
from tests.harness import (
    TOOLS,
    Json,
    assembled,
    call,
    clock_stands_still,
    result,
    results,
    said,
    serving,
    thought,
    user,
)
from tests.run_scripts import SCRIPTS, held, types

# ---- what a create can ask for


async def test_one_call_a_leg_cuts_the_second_from_ledger_and_engine(autojump_clock: trio.abc.Clock) -> None:
    one_call = [[thought("Three at once."), call("read_file", path="a")], [said("All done.")]]
    async with serving({**SCRIPTS, "one": one_call}) as bench:
        ledgers, outputs = [], []
        for model, parallel in (("forced:parallel", False), ("forced:one", True)):
            peer = bench.connect()
            done = await held(peer, model, parallel_tool_calls=parallel)
            assert [each["name"] for each in done["required_input"]] == ["read_file"]
            assert len(done["response"]["output"]) == 2
            run = bench.runs[0]
            in_leg = len(run.state.ledger) - run.state.leg_start
            assert done["response"]["usage"]["output_tokens"] == in_leg, "what was cut is not output"
            ledger = run.state.ledger
            peer.append(result(done, "x"))
            completed = await peer.until("response.completed")
            assert assembled(peer.heard) == completed["response"]["output"]
            assert completed["response"]["usage"]["output_tokens"] == run.state.sampled
            ledgers.append(ledger.tokens)
            outputs.append([item["type"] for item in completed["response"]["output"]])
            await bench.check_nothing_is_left()
        assert outputs == [["reasoning", "function_call", "message"]] * 2
        # The stop token of the uncut leg was sampled, that of the cut one was rendered: the same tokens.
        assert ledgers[0] == ledgers[1]


async def test_without_tools_to_choose_a_call_is_text(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", tool_choice="none")
        completed = await peer.until("response.completed")
        assert [item["type"] for item in completed["response"]["output"]] == ["message"]
        assert "read_file" in completed["response"]["output"][0]["content"][0]["text"]
        assert completed["response"]["work"]["malformed_calls"] == 1


async def test_a_call_to_a_tool_that_there_is_not_is_text(autojump_clock: trio.abc.Clock) -> None:
    async with serving({"none": [[call("delete_all", path="/"), call("read_file", path="a")]]}) as bench:
        peer = bench.connect()
        done = await held(peer, "forced:none")
        assert [item["type"] for item in done["response"]["output"]] == ["message", "function_call"]
        assert done["response"]["work"]["malformed_calls"] == 1


async def test_warming_up_ends_at_once(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:two", generate=False, input=[])
        completed = await peer.until("response.completed")
        assert types(peer.heard) == ["created", "in_progress", "completed"]
        assert (completed["response"]["output"], completed["response"]["status"]) == ([], "completed")
        assert completed["response"]["usage"]["output_tokens"] == 0
        await bench.check_nothing_is_left()


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "model"),
        ({"model": None}, 400, "missing_required_parameter", "model"),
        ({"lifecycle": "borrowed"}, 400, "invalid_value", "lifecycle"),
        ({"previous_response_id": "resp_x"}, 400, "previous_response_not_found", "previous_response_id"),
        ({"background": True}, 400, "unsupported_parameter", "background"),
        ({"conversation": "c"}, 400, "unsupported_parameter", "conversation"),
        ({"truncation": "auto"}, 400, "unsupported_parameter", "truncation"),
        ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice"),
        ({"top_logprobs": 3}, 400, "unsupported_parameter", "top_logprobs"),
        ({"text": {"format": {"type": "json_object"}}}, 400, "unsupported_parameter", "text.format"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"input": [{"role": "user"}]}, 400, "missing_required_parameter", "input[0].content"),
        ({"tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, 400, "invalid_value", "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, 400, "invalid_value", "tools[0].name"),
    ],
)
async def test_a_create_that_cannot_be_done_is_one_error_and_the_connection_goes_on(
    fields: Json, status: int, code: str, param: str, autojump_clock: trio.abc.Clock
) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(peer)
        peer.create(**{"model": "forced:two", "stream_id": "other", **fields})
        error = await peer.until("error")
        assert (error["status"], error["error"]["code"], error["error"]["param"]) == (status, code, param)
        assert error["stream_id"] == "other"
        peer.append(result(done))
        await peer.until("response.completed")
        await bench.check_nothing_is_left()


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "previous_response_id": None, "stream": True, "store": False},
        {"tools": None, "instructions": None, "tool_choice": "auto", "parallel_tool_calls": True},
        {"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "truncation": "disabled"},
        {"client_metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"], "metadata": None},
        {"tools": [*TOOLS, {"type": "web_search"}, {"type": "tool_search", "execution": "client"}]},
        {"input": [user("a"), {"type": "item_reference", "id": "x"}, {"role": "user", "content": "b"}]},
    ],
)
async def test_what_real_clients_send_along_is_taken(fields: Json, autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        peer.create("forced:long", **fields)
        await peer.until("response.completed")


async def test_what_has_no_meaning_here_is_listed(autojump_clock: trio.abc.Clock) -> None:
    async with serving(SCRIPTS) as bench:
        peer = bench.connect()
        done = await held(
            peer,
            tools=[*TOOLS, {"type": "web_search"}],
            input=[{"type": "item_reference", "id": "x"}, user("hello")],
            client_metadata={},
        )
        assert done["response"]["work"]["ignored"] == [
            *("input[0]: item of type item_reference", "tools[3]: tool of type web_search"),
            "client_metadata",
        ]
        peer.append({"type": "local_shell_call"}, result(done))
        completed = await peer.until("response.completed")
        assert completed["response"]["work"]["ignored"][3:] == ["input[0]: item of type local_shell_call"]


# ---- texts so long that a thread tokenises them


async def test_long_texts_are_tokenised_beside_everything_else(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(SCRIPTS) as bench:
        ledgers = []
        for longest in (TOKENISE_IN_THREAD, 1):
            monkeypatch.setattr(protocol.intake, "TOKENISE_IN_THREAD", longest)
            with clock_stands_still():
                peer = bench.connect()
                done = await held(peer, "forced:parallel")
                ledger = bench.runs[0].state.ledger
                peer.append(*results(done), user("go on"))
                completed = await peer.until("response.completed")
                assert assembled(peer.heard) == completed["response"]["output"]
                ledgers.append(ledger)
        assert ledgers[0] == ledgers[1]


async def test_a_run_that_ends_while_its_result_is_tokenised_refuses_it(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with serving(SCRIPTS) as bench:
        with clock_stands_still():
            peer = bench.connect()
            done = await held(peer)
            run = bench.runs[0]
            ledger = list(run.state.ledger.tokens)
            peer.append(result(done, "word " * 20000))
            while not run._appending.locked():
                await trio.lowlevel.checkpoint()
            run.interrupt("cancelled")
            await peer.until("response.incomplete")
            error = await peer.until("error")
            assert error["error"]["code"] == "previous_response_not_found"
            assert run.state.ledger.tokens == ledger
        await bench.check_nothing_is_left()
