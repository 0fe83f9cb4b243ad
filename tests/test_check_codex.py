"""scripts.check_codex without Codex: the recording has what was said, however the bytes were cut, and a task
that went wrong in any one way is found out.
"""

from __future__ import annotations

import copy
import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import Ping, TextMessage

from scripts.check_codex import Outcome, judge
from scripts.codex_clients import CLIENTS, FAREWELL
from scripts.recording import Listener, Message, Recording, Speaker, recorded

ASK = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"OpenAI-Beta: some=thing\r\n\r\n"
)
AGREE = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
POST = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
GOODBYE = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ngoodbye"
WORD = "0123456789abcdef"

Json = dict[str, Any]

texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=300), max_size=5)


@given(said=texts, speaker=st.sampled_from(["client", "server"]), data=st.data())
def test_a_listener_has_every_message_however_the_bytes_are_cut(said, speaker, data):
    peer = Connection(ConnectionType.CLIENT if speaker == "client" else ConnectionType.SERVER)
    stream = ASK if speaker == "client" else AGREE
    for text in said:
        whole = as_json(text)
        half = data.draw(st.integers(0, len(whole)))
        stream += peer.send(TextMessage(whole[:half], message_finished=False))
        stream += peer.send(Ping())
        stream += peer.send(TextMessage(whole[half:]))
    recording = heard(stream, speaker, data)
    check(recording, said, speaker)
    assert [each["openai-beta"] for each in recording.requests] == ["some=thing"] * (speaker == "client")


@given(said=texts, data=st.data())
def test_a_listener_has_every_body_however_the_bytes_are_cut(said, data):
    stream = b""
    for text in said:
        body = as_json(text).encode()
        stream += POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    recording = heard(stream, "client", data)
    check(recording, said, "client")
    assert len(recording.requests) == len(said)


@given(said=st.lists(texts, max_size=3), data=st.data())
def test_a_listener_has_every_server_sent_event_however_the_bytes_are_cut(said, data):
    stream = b""
    for part in said:
        events = "".join(f"event: said\ndata: {as_json(text)}\n\n" for text in part).encode()
        stream += b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM
        for chunk in cut(events, data):
            stream += b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunk else b""
        stream += b"0\r\n\r\n"
    check(heard(stream, "server", data), [text for part in said for text in part], "server")


def as_json(text: str) -> str:
    return json.dumps({"type": "said", "text": text}, ensure_ascii=False)


def cut(stream: bytes, data: st.DataObject) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def heard(stream: bytes, speaker: Speaker, data: st.DataObject) -> Recording:
    recording = Recording()
    listener = Listener(speaker, recording)
    for part in cut(stream, data):
        listener.hear(part)
    return recording


def check(recording: Recording, said: list[str], speaker: Speaker) -> None:
    assert [message.event["text"] for message in recording.said_by(speaker)] == said
    assert [message.size for message in recording.messages] == [len(as_json(text).encode()) for text in said]


def test_an_event_is_there_before_its_stream_ends():
    recording = Recording()
    Listener("server", recording).hear(STREAM + b'10\r\ndata: {"a": 1}\n\n\r\n')
    assert [message.event for message in recording.messages] == [{"a": 1}]


def test_bodies_that_are_not_json_are_not_looked_at():
    recording = Recording()
    Listener("client", recording).hear(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b"Content-Type: text/plain\r\nUpgrade: websocket\r\nContent-Length: 5\r\n\r\nsorry"
    Listener("server", recording).hear(b"HTTP/1.1 426 Upgrade Required\r\n" + answer)
    assert recording.messages == []
    assert len(recording.requests) == 1


async def test_the_relay_changes_nothing_and_passes_on_the_end(nursery):
    received = b""

    async def say_goodbye(stream: trio.SocketStream) -> None:
        nonlocal received
        async for data in stream:
            received += data
        await stream.send_all(GOODBYE)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, say_goodbye, [listener])
    async with recorded(listener.socket.getsockname()[1], Recording()) as port:
        client = await trio.open_tcp_stream("127.0.0.1", port)
        await client.send_all(POST + b"Content-Length: 2\r\n\r\n{}")
        await client.send_eof()
        answer = b"".join([bytes(data) async for data in client])
    assert received == POST + b"Content-Length: 2\r\n\r\n{}"
    assert answer == GOODBYE
    nursery.cancel_scope.cancel()


def client_says(type: str, *results: Json, **fields: str) -> Message:
    # The body of an HTTP request has no type.
    return Message(
        "client", 1, {"input": list(results), **fields} | ({} if type == "body" else {"type": type})
    )


def server_calls(type: str, call_id: str) -> Message:
    return Message(
        "server", 1, {"type": "response.output_item.done", "item": {"type": type, "call_id": call_id}}
    )


def server_ends(type: str, response_id: str) -> Message:
    response = {"id": response_id, "usage": {"total_tokens": 100}}
    return Message("server", 1, {"type": type, "response": response})


NOTES = {"type": "function_call_output", "call_id": "call_1", "output": f"{WORD} one two"}
PATCHED = {"type": "function_call_output", "call_id": "call_2", "output": "patched"}
PATCHED_BY_TOOL = {**PATCHED, "type": "custom_tool_call_output"}

CONVERSATIONS = {
    "held": [
        client_says("response.create"),
        server_calls("function_call", "call_1"),
        server_ends("response.done", "resp_0"),
        client_says("response.append", NOTES),
        server_calls("custom_tool_call", "call_2"),
        server_ends("response.done", "resp_0"),
        client_says("response.append", PATCHED_BY_TOOL),
        server_ends("response.completed", "resp_0"),
    ],
    "chained": [
        client_says("response.create"),
        server_ends("response.completed", "resp_0"),
        client_says("response.create", previous_response_id="resp_0"),
        server_calls("function_call", "call_1"),
        server_ends("response.completed", "resp_1"),
        client_says("response.create", NOTES, previous_response_id="resp_1"),
        server_calls("function_call", "call_2"),
        server_ends("response.completed", "resp_2"),
        client_says("response.create", PATCHED, previous_response_id="resp_2"),
        server_ends("response.completed", "resp_3"),
    ],
    "stateless": [
        client_says("body"),
        server_calls("function_call", "call_1"),
        server_ends("response.completed", "resp_0"),
        client_says("body", NOTES),
        server_calls("function_call", "call_2"),
        server_ends("response.completed", "resp_1"),
        client_says("body", NOTES, PATCHED),
        server_ends("response.completed", "resp_2"),
    ],
}
EVERY_MESSAGE = [(name, number) for name, said in CONVERSATIONS.items() for number in range(len(said))]


def good_outcome(lifecycle: str = "held") -> Outcome:
    requests: list[dict[str, str]]
    match lifecycle:
        case "held":
            requests, legs = [{"openai-beta": "responses_websockets=2026-02-04"}], [3]
        case "chained":
            requests, legs = [{"openai-beta": "responses_websockets=2026-02-06"}], [0, 1, 1, 1]
        case _:
            requests, legs = [{}, {}, {}], [1, 1, 1]
    log: list[Json] = []
    for number in legs:
        log.append({"event": "response_created", "lifecycle": lifecycle})
        log.append({"event": "response_ended", "status": "completed", "legs": number, "tokens_prefilled": 20})
    return Outcome(
        word=WORD,
        exit_code=0,
        farewell=FAREWELL,
        files={"sorted.txt": f"{WORD}\none\ntwo\n", "notes.txt": f"{WORD}\none\nzwei\n"},
        recording=Recording(requests, copy.deepcopy(CONVERSATIONS[lifecycle])),
        log=[{"level": "info", **entry} for entry in log],
    )


def wrong(outcome: Outcome, lifecycle: str = "held") -> list[str]:
    return [finding.what for finding in judge(outcome, CLIENTS[lifecycle]) if not finding.is_good]


@pytest.mark.parametrize("lifecycle", CLIENTS)
def test_a_task_that_went_well_is_good(lifecycle):
    assert wrong(good_outcome(lifecycle), lifecycle) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"exit_code": 1}, "Codex's exit code"),
        ({"farewell": None}, "Codex's final message"),
        ({"files": {"notes.txt": f"{WORD}\none\nzwei\n"}}, "the command's file"),
        ({"files": {"sorted.txt": f"{WORD}\none\ntwo\n"}}, "the patched file"),
        ({"log": []}, "lifecycles in the server's log"),
        ({"log": []}, "Responses that ended"),
    ],
)
def test_what_went_wrong_outside_of_the_socket_is_found(change, what):
    assert what in wrong(replace(good_outcome(), **change))


def test_trouble_in_the_log_is_found():
    good = good_outcome()
    for trouble in (
        {"level": "warning", "event": "grace_exceeded"},
        {"level": "info", "event": "request_refused"},
    ):
        assert wrong(replace(good, log=[*good.log, trouble])) == ["trouble in the server's log"]


@pytest.mark.parametrize(("lifecycle", "lost"), EVERY_MESSAGE)
def test_a_message_that_is_missing_is_found(lifecycle, lost):
    outcome = good_outcome(lifecycle)
    del outcome.recording.messages[lost]
    assert wrong(outcome, lifecycle)


@pytest.mark.parametrize("lifecycle", CLIENTS)
def test_one_request_too_many_and_another_version_are_found(lifecycle):
    outcome = good_outcome(lifecycle)
    outcome.recording.requests.append(outcome.recording.requests[0])
    assert wrong(outcome, lifecycle) == ["beta headers, one a request"]

    outcome = good_outcome(lifecycle)
    outcome.recording.requests[0]["openai-beta"] = "another"
    assert wrong(outcome, lifecycle) == ["beta headers, one a request"]


def test_another_response_and_a_result_from_nowhere_are_found():
    outcome = good_outcome()
    outcome.recording.messages[-1].event["response"]["id"] = "resp_1"
    assert wrong(outcome) == ["Responses"]

    outcome = good_outcome()
    outcome.recording.messages[3].event["input"][0]["output"] = "made up"
    assert wrong(outcome) == ["results that quote the notes"]


def test_a_chain_that_is_broken_is_found():
    for previous in (None, "resp_0", "resp_unknown"):
        outcome = good_outcome("chained")
        outcome.recording.messages[5].event["previous_response_id"] = previous
        assert wrong(outcome, "chained") == ["which Response each message continues"]


@pytest.mark.parametrize("lifecycle", CLIENTS)
def test_a_second_prefill_is_found(lifecycle):
    outcome = good_outcome(lifecycle)
    outcome.log[-1]["tokens_prefilled"] = 101
    assert wrong(outcome, lifecycle) == ["tokens prefilled more than once"]


@pytest.mark.parametrize("lifecycle", CLIENTS)
def test_a_configuration_names_server_and_features(lifecycle):
    client = CLIENTS[lifecycle]
    config = tomllib.loads(client.config(port=8765))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:8765/v1"
    assert provider["supports_websockets"] == (lifecycle != "stateless")
    assert config["features"] == dict.fromkeys(client.features, True)
