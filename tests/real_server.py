"""A real server for tests: `fermata serve` as a process on a free port, and a client of its sockets.

It knows the command line, the log and HTTP, and nothing of what a test expects.

Strategy. Nothing sleeps for a time that was guessed. The log of the server, a line of JSON an event, says
what has happened: a thread collects it, `RealServer.wait_for` waits for a line. A `Client` has no task of its
own: it reads when it is told to, so that a client which stalls is simply one that is not asked.

Run as a program it is `fermata serve` with more options: a JSON object, its first argument, has settings that
the command line does not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from wsproto import Connection, ConnectionType
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 60.0  # s, of any one wait: loading torch on a machine that does much else takes 10
POLL = 0.02  # s between two looks at /metrics
HANDSHAKE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")

Json = dict[str, Any]


class RealServer:
    """A server process. Made, it is running; leaving its block kills it if it still does."""

    def __init__(self, *options: str, **settings: Any) -> None:
        keys = [option.partition("=")[2] for option in options if option.startswith("--api-key=")]
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        command = [sys.executable, str(Path(__file__)), json.dumps(settings)]
        options = ("--port=0", "--log-format=json", *options)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
        )
        self.log: list[Json] = []  # what is not JSON is {"event": None, "text": line}
        self._grown = threading.Condition()
        self._log_is_over = False
        threading.Thread(target=self._collect_log, daemon=True).start()

    def __enter__(self) -> RealServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for(self, event: str, *, count: int = 1, **fields: Any) -> Json:
        """The `count`-th line of the log about this event, with these fields, as soon as it is there.
        AssertionError if the process ends without it, or at the deadline.
        """

        def found() -> list[Json]:
            return [line for line in self.log if line["event"] == event and fields.items() <= line.items()]

        with self._grown:
            self._grown.wait_for(lambda: len(found()) >= count or self._log_is_over, DEADLINE)
            assert len(found()) >= count, f"no {event} {fields} in the log: {self.log[-25:]}"
            return found()[count - 1]

    async def until(self, event: str, *, count: int = 1, **fields: Any) -> Json:
        """`wait_for`, for trio."""
        return await trio.to_thread.run_sync(lambda: self.wait_for(event, count=count, **fields))

    def wait_for_exit(self) -> int:
        """The exit code, once the process has ended and its log is read to the end."""
        with self._grown:
            assert self._grown.wait_for(lambda: self._log_is_over, DEADLINE), "the server does not end"
        return self.process.wait(DEADLINE)

    async def until_exit(self) -> int:
        """`wait_for_exit`, for trio."""
        return await trio.to_thread.run_sync(self.wait_for_exit)

    def count(self, event: str, **fields: Any) -> int:
        """Lines of the log about this event, up to now."""
        return sum(line["event"] == event and fields.items() <= line.items() for line in self.log)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)

    @property
    def url(self) -> str:
        """Where it listens."""
        return str(self.wait_for("listening")["addresses"][0])

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rpartition(":")[2])

    @property
    def engine_process(self) -> int:
        """The id of the engine process that was started last."""
        return int(self.wait_for("engine_started", count=max(1, self.count("engine_started")))["process_id"])

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=DEADLINE) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def health(self) -> tuple[int, Json]:
        """Status and body of /healthz."""
        status, body = self.get("/healthz")
        return status, json.loads(body)

    def metrics(self) -> dict[str, float]:
        """All numbers of /metrics, by name and labels."""
        lines = self.get("/metrics")[1].decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_metrics(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """/metrics, as soon as it is so. TooSlowError at the deadline."""
        async for _ in polls():
            metrics = await trio.to_thread.run_sync(self.metrics)
            if condition(metrics):
                break
        return metrics

    async def until_idle(self) -> dict[str, float]:
        """Wait until no run is left and no block of KV is in use."""
        return await self.until_metrics(is_idle)

    def _collect_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": None, "text": line.decode(errors="replace")}
            with self._grown:
                self.log.append(entry)
                self._grown.notify_all()
        with self._grown:
            self._log_is_over = True
            self._grown.notify_all()


def is_idle(metrics: dict[str, float]) -> bool:
    """No run, no sequence, no block in use."""
    return not any(
        value
        for name, value in metrics.items()
        if name.startswith("fermata_runs_live")
        or name
        in ("fermata_engine_sequences_open", "fermata_engine_blocks_running", "fermata_engine_blocks_held")
    )


async def polls() -> AsyncIterator[None]:
    """Look again, and again, at what tells nobody when it changes. TooSlowError at the deadline."""
    deadline = trio.current_time() + DEADLINE
    while trio.current_time() < deadline:
        yield
        await trio.sleep(POLL)
    raise trio.TooSlowError


async def until_gone(process_id: int) -> None:
    """Wait until a process that is no child of ours has ended: it is not there, or a zombie."""
    async for _ in polls():
        try:
            stat = await trio.Path(f"/proc/{process_id}/stat").read_text()
        except FileNotFoundError:
            return
        if stat.rpartition(")")[2].split()[0] == "Z":
            return


def write_script(folder: Path, name: str, *legs: list[Json]) -> None:
    """A script of forced legs, as `--script` takes them: its model is `forced:NAME`."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(leg) + "\n" for leg in legs), encoding="utf-8")


# ---- what its models say


def said(text: str) -> Json:
    """A message of the assistant."""
    return {"type": "message", "content": text}


def call(name: str, **arguments: Any) -> Json:
    """A call to a function tool."""
    return {"type": "function_call", "name": name, "arguments": json.dumps(arguments)}


def custom_call(name: str, text: str) -> Json:
    """A call to a custom tool."""
    return {"type": "custom_tool_call", "name": name, "input": text}


def thought(text: str) -> Json:
    """Reasoning."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


LONG = " ".join(f"line {number} of a long answer," for number in range(20))
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = 1\n+x = 2\n*** End Patch"
SCRIPTS: dict[str, tuple[list[Json], ...]] = {
    "hello": ([said("hello there")],),
    "look": ([said("let me look"), call("exec_command", cmd="ls")], [said("it is empty")]),
    "patch": (
        [thought("first the file"), said("a look first"), call("exec_command", cmd="cat a.py")],
        [said("now the change"), custom_call("apply_patch", PATCH)],
        [said("done")],
    ),
    "long": ([said(LONG)],),
    "long-look": ([said(LONG), call("exec_command", cmd="ls")], [said(LONG)]),
    "endless": ([said(LONG * 200)],),
    "two": ([call("exec_command", cmd="ls"), call("exec_command", cmd="pwd")], [said("both are in")]),
}
EXEC: Json = {"type": "function", "name": "exec_command", "parameters": {"type": "object"}}
APPLY_PATCH: Json = {"type": "custom", "name": "apply_patch"}
TOOLS = [EXEC, APPLY_PATCH]


# ---- a client


class Closed(Exception):
    """The server closed the socket; 1006: without a close frame."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{code} {reason}".rstrip())
        self.code = code


class Client:
    """One WebSocket, read only when asked. `stream` and `frames` are there for what no good client does."""

    def __init__(self, stream: trio.SocketStream, head: str) -> None:
        self.stream = stream
        self.head = head  # of the server's 101
        self.frames = Connection(ConnectionType.CLIENT)
        self.heard: list[Json] = []
        self._events: list[Event] = []
        self._text = ""
        self._sending = trio.Lock()

    async def send_raw(self, data: bytes) -> None:
        """Send these bytes, or as many of them as the server takes before it hangs up."""
        async with self._sending:
            try:
                await self.stream.send_all(data)
            except trio.BrokenResourceError:
                return

    async def send_event(self, event: Event) -> None:
        """Send a frame."""
        await self.send_raw(self.frames.send(event))

    async def send_text(self, text: str) -> None:
        """Send a text message."""
        await self.send_event(TextMessage(text))

    async def send(self, type: str, **fields: Any) -> None:
        """Send a client event."""
        await self.send_text(json.dumps({"type": type, **fields}))

    async def create(self, model: str, **fields: Any) -> None:
        """Send `response.create`: held and with tools, unless told otherwise."""
        defaults = {"lifecycle": "held", "input": "hello", "tools": TOOLS}
        await self.send("response.create", model=model, **{**defaults, **fields})

    async def append(self, *items: Json, **fields: Any) -> None:
        """Send `response.append`."""
        await self.send("response.append", input=list(items), **fields)

    async def receive(self) -> Json:
        """The next server event. Raises Closed."""
        while True:
            match await self.next_frame():
                case TextMessage(data=data, message_finished=finished):
                    self._text += data
                    if finished:
                        text, self._text = self._text, ""
                        event: Json = json.loads(text)
                        self.heard.append(event)
                        return event
                case Ping(payload=payload):
                    await self.send_event(Pong(payload))
                case CloseConnection(code=code, reason=reason) as close:
                    if self.frames.state is ConnectionState.REMOTE_CLOSING:
                        await self.send_event(close.response())
                    raise Closed(code, reason or "")
                case BytesMessage():
                    raise AssertionError("the server never sends binary")

    async def next_frame(self) -> Event:
        """The next frame, whatever it is, unanswered. Raises Closed at the end of the stream."""
        with trio.fail_after(DEADLINE):
            while not self._events:
                try:
                    data = bytes(await self.stream.receive_some(1 << 16))
                except trio.BrokenResourceError:
                    data = b""
                if not data:
                    raise Closed(1006)
                self.frames.receive_data(data)
                self._events += self.frames.events()
        return self._events.pop(0)

    async def until(self, *types: str) -> Json:
        """Read up to an event of one of these types. AssertionError at an end that was not asked for."""
        while True:
            event = await self.receive()
            if event["type"] in types:
                return event
            assert event["type"] not in TERMINAL, event

    async def until_closed(self) -> int:
        """Read until the server closes; the code."""
        while True:
            try:
                await self.receive()
            except Closed as closed:
                return closed.code

    async def reset(self) -> None:
        """Go away with a TCP reset."""
        linger_on_for_no_time = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        self.stream.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, linger_on_for_no_time)
        await trio.aclose_forcefully(self.stream)


@asynccontextmanager
async def connected(server: RealServer, *headers: str) -> AsyncIterator[Client]:
    """A client with an open socket; it goes without a word in the end."""
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    async with stream:
        yield await upgrade(stream, *headers)


async def upgrade(stream: trio.SocketStream, *headers: str) -> Client:
    """Open a WebSocket on a fresh stream. AssertionError if the server does not."""
    head = ["GET /v1/responses HTTP/1.1", "Host: localhost", *HANDSHAKE, *headers, "", ""]
    with trio.fail_after(DEADLINE):
        await stream.send_all("\r\n".join(head).encode("latin-1"))
        answer = b""
        while b"\r\n\r\n" not in answer:
            data = bytes(await stream.receive_some(1))
            assert data, answer
            answer += data
    assert answer.startswith(b"HTTP/1.1 101 "), answer
    return Client(stream, answer.decode("latin-1"))


def answered(done: Json, output: str = "a.py", which: int = 0) -> Json:
    """The result of one of the calls that a `response.done` lists."""
    required = done["required_input"][which]
    return {"type": required["type"], "call_id": required["call_id"], "output": output}


def texts(events: list[Json]) -> list[str]:
    """The text of every item that the events tell of: their deltas, joined."""
    joined: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    return list(joined.values())


def serve() -> int:
    """`fermata serve` with the options and with settings that it has no option for."""
    from scripts import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args(sys.argv[2:])
    vars(arguments).update(json.loads(sys.argv[1]))
    return serve.main(arguments)


if __name__ == "__main__":
    sys.exit(serve())
