"""What goes wrong with real processes, sockets and signals: what clients send or stop doing, and how engines
and servers end.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from harness import said, serving
from hypothesis import given
from hypothesis import strategies as st
from real_server import (
    LONG,
    TOOLS,
    Client,
    Closed,
    Json,
    RealServer,
    answered,
    connected,
    texts,
    until_gone,
)
from wsproto.events import BytesMessage, CloseConnection, TextMessage

from protocol import snapshot

pytest_plugins = ["shared_server"]

CREATE: Json = {
    "type": "response.create",
    "model": "forced:hello",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "function_call", "call_id": "call_1", "name": "exec_command", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
        {"role": "user", "content": "hello"},
    ],
    "instructions": "help",
    "tools": TOOLS,
    "metadata": {"a": "b"},
    "max_output_tokens": 100,
    "temperature": 0.5,
    "stream_id": "main",
}
LIMIT = 16 * 1024 * 1024  # bytes of a frame, as at the public service


async def check_serves(client: Client, stream_id: str = "check") -> None:
    """What was there before is over; a Response can still be made on this connection."""
    await client.create("forced:hello", stream_id=stream_id)
    while True:
        event = await client.receive()
        if event.get("stream_id") == stream_id:
            assert event["type"] != "error", event
            if event["type"] == "response.completed":
                assert event["response"]["output"][0]["content"][0]["text"] == "hello there"
                return


# ---- frames
# -------------------------------------------------------------------------------------------------------


def frame(**changes: Any) -> str:
    """A good create but for these fields."""
    return json.dumps({**CREATE, **changes})


def with_raw(name: str, value: str) -> str:
    """A good create with one more field, whose JSON is written as it is."""
    return json.dumps(CREATE)[:-1] + f', "{name}": {value}}}'


NESTED = "[" * 100_000 + "]" * 100_000
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
ORPHAN = {"type": "function_call_output", "call_id": "call_0", "output": "ok"}
NAMELESS = {"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}
BAD_FRAMES: list[tuple[str, str, str | None]] = [
    ("", "invalid_json", None),
    ("hello", "invalid_json", None),
    ("[]", "invalid_json", None),
    ("null", "invalid_json", None),
    ('{"type":"response.create"', "invalid_json", None),
    ("\ufeff" + frame(), "invalid_json", None),
    (frame() + frame(), "invalid_json", None),
    (with_raw("temperature", "NaN"), "invalid_json", None),
    (with_raw("top_p", "-Infinity"), "invalid_json", None),
    (with_raw("instructions", '"\\ud800"'), "invalid_json", None),
    (with_raw("instructions", '"\\ud800 and on"'), "invalid_json", None),
    (with_raw("anything", NESTED), "invalid_json", None),
    (with_raw("input", NESTED), "invalid_json", None),
    ("{}", "unknown_event_type", "type"),
    ('{"type":null}', "unknown_event_type", "type"),
    ('{"type":"response.nonsense"}', "unknown_event_type", "type"),
    (json.dumps({"type": "x" * 100_000}), "unknown_event_type", "type"),
    ('{"type":"response.append","type":"response.create"}', "invalid_value", "type"),
    (frame(stream_id=""), "invalid_stream_id", "stream_id"),
    (frame(stream_id="a b"), "invalid_stream_id", "stream_id"),
    (frame(stream_id=1), "invalid_stream_id", "stream_id"),
    (with_raw("temperature", "1e999"), "invalid_value", "temperature"),
    (frame(temperature=2.5), "invalid_value", "temperature"),
    (frame(top_k=10**30), "invalid_value", "top_k"),
    (frame(max_output_tokens=10**30), "invalid_value", "max_output_tokens"),
    (frame(max_output_tokens=0), "invalid_value", "max_output_tokens"),
    (frame(max_tool_calls=10**30), "invalid_value", "max_tool_calls"),
    (frame(seed=-1), "invalid_value", "seed"),
    (frame(metadata={"a": "b" * 100_000}), "invalid_value", "metadata[...]"),
    (frame(user="u" * 100_000), "invalid_value", "user"),
    (frame(model=None), "missing_required_parameter", "model"),
    (frame(model="gpt"), "model_not_found", "model"),
    (frame(model="g" * 100_000), "invalid_value", "model"),
    (frame(lifecycle="eternal"), "invalid_value", "lifecycle"),
    (frame(background=True), "unsupported_parameter", "background"),
    (frame(conversation="conv_1"), "unsupported_parameter", "conversation"),
    (frame(previous_response_id="resp_1"), "previous_response_not_found", "previous_response_id"),
    (frame(input=[{"type": "message"}]), "missing_required_parameter", "input[0].role"),
    (frame(input=[{"role": "tool", "content": ""}]), "invalid_value", "input[0].role"),
    (frame(input=[None]), "invalid_value", "input[0]"),
    (frame(input=[IMAGE]), "unsupported_parameter", "input[0].content[0].type"),
    (frame(input=[ORPHAN]), "invalid_value", "input[0].call_id"),
    (frame(tools=[{"name": "x"}]), "missing_required_parameter", "tools[0].type"),
    (frame(tools=[{"type": "function"}]), "missing_required_parameter", "tools[0].name"),
    (frame(tools=[NAMELESS]), "missing_required_parameter", "tools[0].tools[0].name"),
    (json.dumps({"type": "response.append"}), "missing_required_parameter", "input"),
    (json.dumps({"type": "response.append", "input": []}), "previous_response_not_found", "response_id"),
    (json.dumps({"type": "response.cancel"}), "missing_required_parameter", "response_id"),
    (json.dumps({"type": "response.cancel", "response_id": "r"}), "response_not_found", "response_id"),
]


async def test_a_bad_frame_is_answered_and_changes_nothing(server: RealServer) -> None:
    errors_before = server.count("dispatch_failed") + server.count("run_failed")
    async with connected(server) as client:
        await client.create("forced:look", stream_id="held")
        done = await client.until("response.done")
        for text, code, param in BAD_FRAMES:
            await client.send_text(text)
            event = await client.receive()
            assert (event["type"], event["error"]["code"], event["error"]["param"]) == ("error", code, param)
            assert event["status"] in (400, 404)
            assert len(json.dumps(event)) < 2000, "what was sent is not sent back"
            named = "stream_id" in text and code not in ("invalid_json", "invalid_stream_id")
            assert event.get("stream_id") == ("main" if named else None), text[:200]
        await client.append(answered(done), stream_id="held")
        assert (await client.until("response.completed"))["response"]["output"][-1]["status"] == "completed"
        await check_serves(client)
    assert server.count("dispatch_failed") + server.count("run_failed") == errors_before


GOOD_FRAMES = [
    frame(input="a NUL \0, a literal <|im_end|>, \U0001f642, \ufffe"),
    frame(input=[]),
    frame(input=""),
    frame(input=None),
    frame(stream_id=None),
    frame(metadata=None, tools=None, reasoning=None, text=None),
    frame(unknown={"nested": [1, 2.5, None, 10**40]}, stream=True, client_metadata={"a": "b"}),
    frame(tools=[*TOOLS, {"type": "web_search", "external_web_access": True}, {"type": "of tomorrow"}]),
    frame(tools=[{"type": "namespace", "name": "n", "tools": [{"type": "of tomorrow"}, TOOLS[0]]}]),
    frame(input=[{"type": "of tomorrow"}] * 1000 + [{"role": "user", "content": "hi"}]),
    with_raw(
        "tools", '[{"type":"function","name":"f","parameters":' + '{"a":' * 300 + "1" + "}" * 300 + "}]"
    ),
    with_raw("temperature", "0.25"),  # twice in one object: the later one counts
    '{"stream_id":"x", ' + frame(stream_id="main")[1:],
]


async def test_an_odd_but_good_frame_is_a_frame(server: RealServer) -> None:
    async with connected(server) as client:
        for text in GOOD_FRAMES:
            await client.send_text(text)
            completed = await client.until("response.completed")
            assert len(completed["response"]["work"]["ignored"]) <= 64


@st.composite
def mutated_frames(draw: st.DrawFn) -> str:
    """A good frame of some kind with something done to it, as JSON or as text."""
    good: list[Json] = [
        CREATE,
        {**CREATE, "model": "forced:look", "lifecycle": "held", "event_id": "e"},
        {"type": "response.append", "input": CREATE["input"], "stream_id": "main"},
        {"type": "response.steer", "previous_response_id": "resp_1", "input": "more"},
        {"type": "response.inject", "response_id": "resp_1", "input": CREATE["input"]},
        {"type": "response.cancel", "response_id": "resp_1"},
        {"type": "response.processed", "response_id": "resp_1"},
    ]
    event: Any = json.loads(json.dumps(draw(st.sampled_from(good))))
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    )
    for _ in range(draw(st.integers(0, 3))):
        place = event
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if key is not None and draw(st.booleans()):
            place[key] = draw(anything)
        elif key is not None:
            del place[key]
        elif isinstance(place, list):
            place.append(draw(anything))
    text = json.dumps(event)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return text.encode("utf-8", "replace").decode()


@given(st.lists(mutated_frames(), max_size=20))
def test_no_mutation_of_a_frame_is_our_error(server: RealServer, frames: list[str]) -> None:
    async def send_all() -> None:
        async with connected(server) as client:
            for text in frames:
                await client.send_text(text)
            await check_serves(client)
            for event in client.heard:
                error = event.get("error") or event.get("response", {}).get("error") or {}
                assert error.get("code") != "server_error", event

    trio.run(send_all)
    assert server.process.poll() is None
    assert server.count("dispatch_failed") + server.count("run_failed") == 0


async def test_text_comes_in_fragments_of_any_size(server: RealServer) -> None:
    text = frame(input="dreißig € \U0001f642")
    async with connected(server) as client:
        for size in (1, 7, 100):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            for piece in pieces[:-1]:
                await client.send_event(TextMessage(piece, message_finished=False))
            await client.send_event(TextMessage(pieces[-1]))
            await client.until("response.completed")


async def test_a_frame_of_16_mib_is_taken(server: RealServer) -> None:
    async with connected(server) as client:
        filler = {"type": "of tomorrow", "data": ""}
        filler["data"] = "x" * (LIMIT - len(frame(input=[filler])))
        text = frame(input=[filler])
        assert len(text) == LIMIT
        await client.send_text(text)
        assert (await client.until("response.completed"))["response"]["work"]["bytes_in"] == LIMIT


async def test_16_mib_of_text_cost_what_the_context_takes(server: RealServer) -> None:
    """They are 13 million tokens, which nobody has to count to see that they do not fit."""
    async with connected(server) as client:
        memory = (await server.until_metrics(bool))["process_resident_memory_bytes"]
        await client.send_text(frame(input="word " * (LIMIT // 5 - 200)))
        error = await client.until("error")
        assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded")
        assert (await server.until_metrics(bool))["process_resident_memory_bytes"] - memory < 500_000_000
        await check_serves(client)


async def test_text_of_long_tokens_may_fit_where_others_do_not() -> None:
    """However many characters a token has, what fits is taken and what does not is refused."""
    script = {"hello": [[said("hello there")]]}
    async with serving(script, engine={"max_context": 400}) as bench:
        peer = bench.connect()
        token = '", "parameters": {"type": "object", "properties": {"'  # one of the tokenizer's
        for count, kind in ((80, "response.completed"), (395, "error"), (3000, "error")):
            peer.create("forced:hello", input=token * count, tools=[])
            event = await peer.until(kind)
        assert event["error"]["code"] == "context_length_exceeded"


async def test_what_means_nothing_here_is_not_repeated(server: RealServer) -> None:
    """Neither is it kept: a Response that repeats 9 MB twice is more than its log holds."""
    async with connected(server) as client:
        unknown = {"type": "of tomorrow", "data": "x" * 9_000_000}
        await client.create("forced:hello", tools=[TOOLS[0], unknown])
        completed = await client.until("response.completed")
        assert completed["response"]["tools"] == [TOOLS[0]]
        assert completed["response"]["work"]["ignored"] == ["tools[1]: tool of type of tomorrow"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (TextMessage("x" * (LIMIT + 100_000)), 1009),
        (BytesMessage(b"{}"), 1003),
        (b"\x81\x82\0\0\0\0\xc3\x28", 1007),
    ],
)
async def test_what_is_no_text_message_ends_the_connection(
    message: TextMessage | BytesMessage | bytes, code: int, server: RealServer
) -> None:
    async with connected(server) as client:
        await client.create("forced:look")
        await client.until("response.done")
        raw = message if isinstance(message, bytes) else client.frames.send(message)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_raw, raw)
            assert await client.until_closed() == code
            nursery.cancel_scope.cancel()
    await server.until_idle()


async def test_a_flood_is_answered_or_cut_off_and_harms_nobody_else(server: RealServer) -> None:
    size = 3000
    async with connected(server) as client, connected(server) as other:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_raw, client.frames.send(TextMessage("?")) * size)
            await check_serves(other)
            code = None
            try:
                while len(client.heard) < size:
                    await client.receive()
            except Closed as closed:
                code = closed.code
            assert code in (None, 1008)
            codes = {event["error"]["code"] for event in client.heard}
            assert codes <= {"invalid_json", "rate_limit_exceeded"}
            nursery.cancel_scope.cancel()
        await check_serves(other, "again")


# ---- clients
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goes", ["by a close frame", "by a reset", "by the end of the stream"])
async def test_a_client_that_goes_takes_its_runs_with_it(goes: str, server: RealServer) -> None:
    ended_before = server.count("response_ended", reason="cancelled")
    async with connected(server) as client:
        await client.create("forced:look", stream_id="held")
        await client.until("response.done")
        await client.create("forced:endless", stream_id="sampling")
        await client.until("response.output_text.delta")
        if goes == "by a close frame":
            await client.send_event(CloseConnection(1000))
            assert await client.until_closed() == 1000
        elif goes == "by a reset":
            await client.reset()
    await server.until("response_ended", count=ended_before + 2, reason="cancelled")
    await server.until_idle()


@pytest.fixture(scope="module")
def hasty(scripts: Path) -> Iterator[RealServer]:
    """A server of two keys whose patience is short. It may be ended when nothing else needs it."""
    with RealServer(
        f"--script={scripts}",
        *("--api-key=one", "--api-key=two", "--hold-timeout=1"),
        send_timeout=1,
        ping_interval=1,
        ping_timeout=4,
    ) as server:
        server.wait_for("models_ready")
        yield server


def with_key(key: str) -> str:
    return f"Authorization: Bearer {key}"


async def test_a_client_that_is_half_gone_is_found_out(hasty: RealServer) -> None:
    async with connected(hasty, with_key("one")) as client:
        await client.create("forced:look", stream_id="held")
        await client.until("response.done")
        await hasty.until("socket_closed", code=1006)
        assert await client.until_closed() == 1006
    await hasty.until_idle()


async def test_a_client_that_stops_reading_costs_nobody_anything(hasty: RealServer) -> None:
    """It has a share of memory that does not grow with what it leaves unread, and is dropped in time."""
    closed_before = hasty.count("socket_closed", code=1006)
    repeated = "function " * 11_000  # 99 kB in the first event and in the last
    async with connected(hasty, with_key("one")) as client, connected(hasty, with_key("two")) as other:
        await check_serves(other)
        memory = (await hasty.until_metrics(bool))["process_resident_memory_bytes"]
        for lane in "abc":
            await client.create("forced:long", stream_id=lane)
        for _ in range(28):
            await client.create("forced:hello", generate=False, instructions=repeated)
        for number in range(3):
            await check_serves(other, f"lane{number}")
        await hasty.until("socket_closed", count=closed_before + 1, code=1006)
        await check_serves(other)
        await hasty.until_idle()
        grown = (await hasty.until_metrics(bool))["process_resident_memory_bytes"] - memory
        assert grown < 100_000_000


async def test_keys_know_nothing_of_each_other(hasty: RealServer) -> None:
    async with connected(hasty, with_key("one")) as one, connected(hasty, with_key("two")) as two:
        await one.create("forced:look", event_id="same")
        theirs = (await one.until("response.done"))["response"]["id"]
        await two.create("forced:hello", event_id="same")
        assert (await two.until("response.completed"))["response"]["id"] != theirs
        for response_id in (theirs, "resp_none"):
            answers = []
            await two.append({"role": "user", "content": "hi"}, response_id=response_id)
            answers.append((await two.until("error"))["error"])
            await two.send("response.cancel", response_id=response_id)
            answers.append((await two.until("error"))["error"])
            await two.create("forced:hello", previous_response_id=response_id)
            answers.append((await two.until("error"))["error"])
            await two.send("response.steer", previous_response_id=response_id, input="hi")
            answers.append((await two.until("response.steer.failed"))["error"])
            assert [answer["code"] for answer in answers] == [
                *("previous_response_not_found", "response_not_found"),
                *("previous_response_not_found", "response_not_found"),
            ]
            said = json.dumps(answers).replace(response_id, "ID")
        assert said == json.dumps(answers).replace("resp_none", "ID")


# ---- bugs of ours
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["ended", "created"])
async def test_a_bug_in_how_a_run_ends_ends_that_run_only(
    broken: str, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving({"hello": [[said("hello there")]]}) as bench:
        keeping, unlucky = bench.connect(), bench.connect()
        with monkeypatch.context() as patched:
            patched.setattr(snapshot, broken, lambda state, model: 1 / 0)
            unlucky.create("forced:hello", stream_id="a")
            error = await unlucky.until("error")
            assert (error["status"], error["error"]["code"]) == (500, "server_error")
            assert error["stream_id"] == "a"
        for peer in (keeping, unlucky):
            peer.create("forced:hello", stream_id="a")
            await peer.until("response.completed")
        await bench.check_nothing_is_left()


# ---- the engine
# ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(scripts: Path) -> Iterator[RealServer]:
    """A server whose engine may be killed, and that may be told to end when nothing else needs it."""
    with RealServer(f"--script={scripts}") as server:
        server.wait_for("models_ready")
        yield server


async def test_runs_outlive_the_engine(mortal: RealServer) -> None:
    """Killed while one run is held and another in the middle of a leg, it is missed by neither."""
    async with connected(mortal) as held, connected(mortal) as sampling:
        await held.create("forced:long-look", seed=1)
        done = await held.until("response.done")
        await sampling.create("forced:long-look", seed=1)
        await sampling.until("response.output_text.delta")
        os.kill(mortal.engine_process, signal.SIGKILL)
        await mortal.until("engine_died")
        status, health = await trio.to_thread.run_sync(mortal.health)
        assert (status, health["status"]) == (503, "restarting")
        assert "SIGKILL" in health["reason"] or "ended" in health["reason"]
        await held.append(answered(done))
        completed = await held.until("response.completed")
        assert texts(held.heard) == [LONG, '{"cmd": "ls"}', LONG]
        assert completed["response"]["work"]["engine_restarts"] >= 1
        await sampling.append(answered(await sampling.until("response.done")))
        again = await sampling.until("response.completed")
        for client in (held, sampling):
            numbers = [event["sequence_number"] for event in client.heard]
            assert numbers == list(range(len(numbers)))
            assert texts(client.heard) == [LONG, '{"cmd": "ls"}', LONG]
        assert again["response"]["work"]["engine_restarts"] >= 1
        assert again["response"]["usage"] == completed["response"]["usage"]
    assert (await trio.to_thread.run_sync(mortal.health)) == (200, {"status": "ok", "engine_restarts": 1})
    await mortal.until_idle()


# ---- the server
# ---------------------------------------------------------------------------------------------------


async def test_the_first_signal_ends_what_is_held_and_lets_legs_finish(mortal: RealServer) -> None:
    engine = mortal.engine_process
    async with (
        connected(mortal) as idle,
        connected(mortal) as held,
        connected(mortal) as sampling,
        connected(mortal) as going_on,
    ):
        await held.create("forced:look")
        await held.until("response.done")
        await sampling.create("forced:long")
        await going_on.create("forced:long-look")
        await sampling.until("response.output_text.delta")
        await going_on.until("response.output_text.delta")
        mortal.signal(signal.SIGTERM)
        incomplete = await held.until("response.incomplete")
        assert incomplete["response"]["incomplete_details"] == {"reason": "shutdown"}
        await idle.create("forced:hello")
        assert (await idle.until("error"))["error"]["code"] == "server_is_overloaded"
        await sampling.until("response.completed")
        assert texts(sampling.heard) == [LONG]
        incomplete = await going_on.until("response.incomplete")
        assert incomplete["response"]["incomplete_details"] == {"reason": "shutdown"}
        for client in (idle, held, sampling, going_on):
            assert await client.until_closed() == 1001
    assert await mortal.until_exit() == 0
    await until_gone(engine)


async def test_the_second_signal_ends_the_process_at_once(hasty: RealServer) -> None:
    engine = hasty.engine_process
    async with connected(hasty, with_key("one")) as client:
        await client.create("forced:endless")
        await client.until("response.output_text.delta")
        hasty.signal(signal.SIGTERM)
        await hasty.until("draining")
        hasty.signal(signal.SIGTERM)
        assert await hasty.until_exit() == -signal.SIGTERM
        await until_gone(engine)


async def test_the_engine_does_not_outlive_a_server_that_was_killed() -> None:
    with RealServer() as server:
        engine = server.engine_process
        server.signal(signal.SIGKILL)
        await server.until_exit()
        await until_gone(engine)


def test_a_port_in_use_is_said_and_ends_the_process(server: RealServer) -> None:
    with RealServer(f"--port={server.port}") as second:
        assert second.wait_for_exit() == 1
        assert any("in use" in line.get("text", "") and "--port" in line["text"] for line in second.log)


def test_a_model_that_cannot_be_loaded_is_said_for_as_long_as_the_process_runs(tmp_path: Path) -> None:
    with RealServer(f"--model={tmp_path}") as server:
        server.wait_for("engine_unusable")
        status, health = server.health()
        assert (status, health["status"]) == (503, "failed")
        assert str(tmp_path) in health["reason"]
        assert server.get("/v1/models") == (200, b'{"object":"list","data":[]}')
        server.signal(signal.SIGTERM)
        assert server.wait_for_exit() == 0
