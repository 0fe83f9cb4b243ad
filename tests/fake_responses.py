"""The other end of the client, for tests: a peer over any stream, and scripted runs of the held lifecycle.

`Peer` is the bare other end, for tests that write the dialogue out. `serve_script` answers creates and
appends by a list of legs. It knows the wire only; what it says is checked against the real server by the
tests that use both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import trio
import trio.testing
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream


class Peer:
    """The server's end of a connection: frames as dictionaries."""

    def __init__(self, websocket: WebSocketConnection) -> None:
        self.websocket = websocket
        self.numbers: dict[str, int] = {}

    async def receive(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(await self.websocket.get_message())
        return frame

    async def send(self, type: str, lane: str | None = None, **fields: Any) -> None:
        frame = {"type": type, **fields} | ({"stream_id": lane} if lane else {})
        if type != "error":
            frame["sequence_number"] = self.numbers[lane or ""] = self.numbers.get(lane or "", -1) + 1
        await self.websocket.send_message(json.dumps(frame))

    async def refuse(self, code: str, lane: str | None = None, *, status: int = 400, **fields: Any) -> None:
        error = {"type": "invalid_request_error", "code": code, "message": f"No: {code}.", "param": None}
        await self.send("error", lane, status=status, error=error | fields)

    async def begin(self, create: dict[str, Any], id: str = "resp_1") -> None:
        self.numbers[create["stream_id"]] = -1
        await self.send("response.created", create["stream_id"], response=response(id, "in_progress"))
        await self.send("response.in_progress", create["stream_id"], response=response(id, "in_progress"))

    async def text(self, lane: str, text: str) -> None:
        await self.send(
            "response.output_item.added", lane, output_index=0, item={"type": "message", "id": "m"}
        )
        for piece in text.split(" "):
            await self.send(
                "response.output_text.delta", lane, output_index=0, item_id="m", delta=piece + " "
            )


def response(id: str, status: str, **fields: Any) -> dict[str, Any]:
    """A Response object with what clients read."""
    return {"id": id, "object": "response", "status": status, "model": "fake", "output": [], **fields}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call_id}",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def required(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "name": call["name"]}


async def peer_over(stream: trio.abc.Stream, nursery: trio.Nursery) -> Peer:
    """Accepts the handshake that comes over `stream`."""
    request = await wrap_server_stream(nursery, stream, message_queue_size=16)
    return Peer(await request.accept())


@dataclass(frozen=True)
class ScriptedLeg:
    """What a run says in one leg: text, calls (call_id, name, arguments), and how many tokens that took."""

    text: str = ""
    calls: Sequence[tuple[str, str, str]] = ()
    prefilled: int = 10
    sampled: int = 5


async def serve_script(peer: Peer, legs: Sequence[ScriptedLeg], received: list[dict[str, Any]]) -> None:
    """Plays one run after the other, all by one script, until the client goes. Keeps what it received."""
    runs = 0
    try:
        while True:
            create = await peer.receive()
            received.append(create)
            runs += 1
            await _play(peer, create, f"resp_{runs}", legs, received)
    except ConnectionClosed:
        return


async def _play(
    peer: Peer, create: dict[str, Any], id: str, legs: Sequence[ScriptedLeg], received: list[dict[str, Any]]
) -> None:
    lane = create["stream_id"]
    await peer.begin(create, id)
    in_context = kept = 0
    done: list[ScriptedLeg] = []
    for leg in legs:
        usage = _usage(in_context + leg.prefilled, in_context, leg.sampled)
        reused = in_context
        kept += reused
        in_context += leg.prefilled + leg.sampled
        done.append(leg)
        if leg.text:
            await peer.text(lane, leg.text)
        calls = [function_call(*call) for call in leg.calls]
        for index, call in enumerate(calls):
            begun = call | {"arguments": "", "status": "in_progress"}
            await peer.send("response.output_item.added", lane, output_index=index, item=begun)
            delta = {"output_index": index, "item_id": call["id"], "delta": call["arguments"]}
            await peer.send("response.function_call_arguments.delta", lane, **delta)
            await peer.send("response.output_item.done", lane, output_index=index, item=call)
        if not calls:
            break
        counts = {"tokens_prefilled": leg.prefilled, "tokens_reused": reused, "tokens_sampled": leg.sampled}
        held = response(id, "in_progress", output=calls, usage=usage, work=counts)
        await peer.send(
            "response.done", lane, response=held, required_input=[required(call) for call in calls]
        )
        frame = await peer.receive()
        received.append(frame)
        if frame["type"] == "response.cancel":
            cut = response(id, "incomplete", incomplete_details={"reason": "cancelled"})
            await peer.send("response.incomplete", lane, response=cut)
            return
        await peer.send("response.in_progress", lane, response=response(id, "in_progress"))
    prefilled, sampled = sum(leg.prefilled for leg in done), sum(leg.sampled for leg in done)
    work = {
        "tokens_prefilled": prefilled,
        "tokens_reused": kept,
        "tokens_sampled": sampled,
        "legs": len(done),
        "pre_passes": 1,
        "post_passes": 1,
        "times_ms": {"prefill": 12.5, "decode": 34.0, "waiting": 3.25},
    }
    whole = response(id, "completed", usage=_usage(prefilled, 0, sampled), work=work)
    await peer.send("response.completed", lane, response=whole)


def _usage(input: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input + output,
    }
