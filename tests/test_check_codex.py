"""scripts.check_codex without Codex: the recording has what was said, however the bytes were cut, and a task
that went wrong in any one way is found out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import Ping, TextMessage

from scripts.check_codex import CLIENTS, FAREWELL, Outcome, beta_of, judge
from scripts.recording import Listener, Message, Recording, recorded

ASK = "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nOpenAI-Beta: some=thing"
AGREE = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket"
CLIENT = CLIENTS["0.107.0"]
WORD = "0123456789abcdef"

texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=300), max_size=5)


@given(said=texts, speaker=st.sampled_from(["client", "server"]), data=st.data())
def test_a_listener_has_every_message_however_the_bytes_are_cut(said, speaker, data):
    peer = Connection(ConnectionType.CLIENT if speaker == "client" else ConnectionType.SERVER)
    stream = (ASK if speaker == "client" else AGREE).encode() + b"\r\n\r\n"
    for text in said:
        whole = json.dumps({"type": "said", "text": text}, ensure_ascii=False)
        half = data.draw(st.integers(0, len(whole)))
        stream += peer.send(TextMessage(whole[:half], message_finished=False))
        stream += peer.send(Ping())
        stream += peer.send(TextMessage(whole[half:]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))

    recording = Recording()
    listener = Listener(speaker, recording)
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        listener.hear(stream[start:end])

    assert [message.event["text"] for message in recording.said_by(speaker)] == said
    sizes = [len(json.dumps(each.event, ensure_ascii=False).encode()) for each in recording.messages]
    assert [message.size for message in recording.messages] == sizes
    assert recording.heads == ([ASK] if speaker == "client" else [])


def test_what_follows_a_head_that_opens_no_websocket_is_not_looked_at():
    recording = Recording()
    Listener("client", recording).hear(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n\r\n{}")
    Listener("server", recording).hear(b"HTTP/1.1 404 Not Found\r\n\r\nsorry")
    assert recording.messages == []
    assert len(recording.heads) == 1


async def test_the_relay_changes_nothing_and_passes_on_the_end(nursery):
    heard = b""

    async def echo(stream: trio.SocketStream) -> None:
        nonlocal heard
        async for data in stream:
            heard += data
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\ngoodbye")

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, echo, [listener])
    async with recorded(listener.socket.getsockname()[1], Recording()) as port:
        client = await trio.open_tcp_stream("127.0.0.1", port)
        await client.send_all(b"GET / HTTP/1.1\r\n\r\nand more")
        await client.send_eof()
        answer = b"".join([bytes(data) async for data in client])
    assert heard == b"GET / HTTP/1.1\r\n\r\nand more"
    assert answer == b"HTTP/1.1 200 OK\r\n\r\ngoodbye"
    nursery.cancel_scope.cancel()


def test_a_beta_header_is_found_in_any_case():
    assert beta_of(ASK) == beta_of(ASK.lower()) == "some=thing"
    assert beta_of(AGREE) is None


def good_outcome() -> Outcome:
    def client(type: str, *results: dict[str, str]) -> Message:
        return Message("client", 1, {"type": type, "input": list(results)})

    def server(type: str, **fields: Any) -> Message:
        return Message("server", 1, {"type": type, **fields})

    def call(type: str, call_id: str) -> Message:
        return server("response.output_item.done", item={"type": type, "call_id": call_id})

    def result(type: str, call_id: str, output: str) -> Message:
        return client("response.append", {"type": type, "call_id": call_id, "output": output})

    response = {"id": "resp_1"}
    messages = [
        client("response.create"),
        call("function_call", "call_1"),
        server("response.done", response=response),
        result("function_call_output", "call_1", f"{WORD} one two"),
        call("custom_tool_call", "call_2"),
        server("response.done", response=response),
        result("custom_tool_call_output", "call_2", "patched"),
        server("response.completed", response=response),
    ]
    info = {"level": "info"}
    return Outcome(
        word=WORD,
        exit_code=0,
        farewell=FAREWELL,
        files={"sorted.txt": f"{WORD}\none\ntwo\n", "notes.txt": f"{WORD}\none\nzwei\n"},
        recording=Recording([f"GET / HTTP/1.1\r\nopenai-beta: {CLIENT.beta}"], messages),
        log=[
            info | {"event": "response_created", "lifecycle": "held"},
            info | {"event": "response_ended", "status": "completed", "legs": 3},
        ],
    )


def wrong(outcome: Outcome) -> list[str]:
    return [finding.what for finding in judge(outcome, CLIENT) if not finding.is_good]


def test_a_task_that_went_well_is_good():
    assert wrong(good_outcome()) == []


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


@pytest.mark.parametrize("lost", range(8))
def test_a_message_that_is_missing_is_found(lost):
    outcome = good_outcome()
    del outcome.recording.messages[lost]
    assert wrong(outcome)


def test_a_second_connection_another_response_and_a_result_from_nowhere_are_found():
    outcome = good_outcome()
    outcome.recording.heads.append(outcome.recording.heads[0])
    assert wrong(outcome) == ["beta headers, one a connection"]

    outcome = good_outcome()
    outcome.recording.messages[-1].event["response"] = {"id": "resp_2"}
    assert wrong(outcome) == ["Responses"]

    outcome = good_outcome()
    outcome.recording.messages[3].event["input"][0]["output"] = "made up"
    assert wrong(outcome) == ["results that quote the notes"]
