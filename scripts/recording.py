"""A relay between clients and a server that writes down every message that passes: over a WebSocket, as
the body of an HTTP request or reply, as a server-sent event.

It knows how HTTP and WebSocket cut bytes into messages, and nothing of what messages mean. It changes no
byte, so what it has is what both sides really said. It cannot read compressed messages: this server declines
every extension.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import h11
import trio
from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

EVENT_END = b"\n\n"  # of server-sent events, as this server writes them
DATA = b"data: "  # begins the line of such an event that has its JSON

Speaker = Literal["client", "server"]


@dataclass(frozen=True, slots=True)
class Message:
    """One JSON object. `size` is in bytes, without what is around it."""

    by: Speaker
    size: int
    event: dict[str, Any]

    @property
    def type(self) -> str:
        """What kind of event it is; an HTTP request is none, nor is a reply that is no stream: "body"."""
        return str(self.event.get("type", "body"))


@dataclass(slots=True)
class Recording:
    """Everything that was said, over all connections, in the order in which it passed."""

    requests: list[dict[str, str]] = field(default_factory=list)  # their headers, by name in lower case
    messages: list[Message] = field(default_factory=list)

    def said_by(self, speaker: Speaker) -> list[Message]:
        """One side's messages."""
        return [message for message in self.messages if message.by == speaker]


class Listener:
    """Reads what one side of one connection says into the recording."""

    def __init__(self, speaker: Speaker, recording: Recording) -> None:
        self._speaker = speaker
        self._recording = recording
        self._http = self._next_http()
        self._headers: dict[str, str] = {}  # of the HTTP message that is being read
        self._body = b""
        self._frames: Connection | None = None  # since this side asked, or agreed, to leave HTTP
        self._text = ""

    def hear(self, data: bytes) -> None:
        """The next bytes, cut anywhere. Raises RemoteProtocolError (h11's or wsproto's) for what is neither
        HTTP nor a frame, ValueError for what should be JSON and is not. Bodies of other types are not looked
        at.
        """
        while data and self._frames is None:
            data = self._hear_http(data)
        if self._frames is not None:
            self._frames.receive_data(data)
            for frame in self._frames.events():
                if isinstance(frame, TextMessage):
                    self._hear_text(frame)

    def _next_http(self) -> h11.Connection:
        """For one HTTP message of this side. What the other side says to it, another listener hears."""
        if self._speaker == "client":
            return h11.Connection(h11.SERVER)
        http = h11.Connection(h11.CLIENT)
        headers = [("host", "any"), ("connection", "upgrade"), ("upgrade", "websocket")]  # allows every reply
        http.send(h11.Request(method="POST", target="/", headers=headers))
        http.send(h11.EndOfMessage())
        return http

    def _hear_http(self, data: bytes) -> bytes:
        """Returns what follows the HTTP message, if it ended."""
        self._http.receive_data(data)
        while True:
            match self._http.next_event():
                case h11.Request(headers=headers) | h11.Response(headers=headers) as head:
                    self._headers = {
                        name.decode("latin-1"): value.decode("latin-1") for name, value in headers
                    }
                    self._body = b""
                    if isinstance(head, h11.Request):
                        self._recording.requests.append(self._headers)
                case h11.Data(data=part):
                    self._hear_body(bytes(part))
                case h11.InformationalResponse(status_code=101):
                    return self._end_http(upgrade=True)
                case h11.EndOfMessage():
                    if self._body_type == "application/json":
                        self._write_down(self._body)
                    asked = self._speaker == "client" and self._headers.get("upgrade") == "websocket"
                    return self._end_http(upgrade=asked)
                case h11.NEED_DATA:
                    return b""

    @property
    def _body_type(self) -> str:
        return self._headers.get("content-type", "").partition(";")[0]

    def _end_http(self, *, upgrade: bool) -> bytes:
        rest, _ = self._http.trailing_data
        if upgrade:
            # To read what a client says is a server's part, and the other way round.
            part = ConnectionType.SERVER if self._speaker == "client" else ConnectionType.CLIENT
            self._frames = Connection(part)
        else:
            self._http = self._next_http()
        return rest

    def _hear_body(self, part: bytes) -> None:
        self._body += part
        if self._body_type == "text/event-stream":
            *events, self._body = self._body.split(EVENT_END)
            for line in b"\n".join(events).splitlines():
                if line.startswith(DATA):
                    self._write_down(line.removeprefix(DATA))

    def _hear_text(self, part: TextMessage) -> None:
        self._text += part.data
        if part.message_finished:
            text, self._text = self._text, ""
            self._write_down(text.encode())

    def _write_down(self, message: bytes) -> None:
        self._recording.messages.append(Message(self._speaker, len(message), json.loads(message)))


@asynccontextmanager
async def recorded(port: int, recording: Recording) -> AsyncIterator[int]:
    """Relay to this port of loopback, from the free one that is returned, until the block is left: then every
    connection is cut. Raises what a Listener raises, in a group.
    """
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        serve = partial(_relay, port=port, recording=recording)
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield int(listener.socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def _relay(client: trio.SocketStream, *, port: int, recording: Recording) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", port) as server, trio.open_nursery() as nursery:
        nursery.start_soon(_pass_on, client, server, Listener("client", recording))
        nursery.start_soon(_pass_on, server, client, Listener("server", recording))


async def _pass_on(source: trio.SocketStream, sink: trio.SocketStream, listener: Listener) -> None:
    """One direction, until its end, which is passed on too. Waits as long as the two sides do."""
    try:
        async for data in source:
            listener.hear(bytes(data))
            await sink.send_all(data)
        await sink.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        await trio.aclose_forcefully(sink)
