"""A relay between clients and a server that writes down every WebSocket message that passes.

It knows where an HTTP head ends and what a WebSocket message is, and nothing of what messages mean. It
changes no byte, so what it has is what both sides really said. It cannot read compressed messages: this
server declines every extension.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import trio
from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

CHUNK = 1 << 16  # bytes read at once
HEAD_END = b"\r\n\r\n"

Speaker = Literal["client", "server"]


@dataclass(frozen=True, slots=True)
class Message:
    """One text message. `size` is in bytes, without the frame around it."""

    by: Speaker
    size: int
    event: dict[str, Any]

    @property
    def type(self) -> str:
        """What kind of event it is."""
        return str(self.event.get("type"))


@dataclass(slots=True)
class Recording:
    """Everything that was said, over all connections, in the order in which it passed."""

    heads: list[str] = field(default_factory=list)  # of the clients' requests, one a connection
    messages: list[Message] = field(default_factory=list)

    def said_by(self, speaker: Speaker) -> list[Message]:
        """One side's messages."""
        return [message for message in self.messages if message.by == speaker]


class Listener:
    """Reads what one side of one connection says into the recording."""

    def __init__(self, speaker: Speaker, recording: Recording) -> None:
        self._speaker = speaker
        self._recording = recording
        self._head = b""
        self._text = ""
        # To read what a client says is a server's part, and the other way round.
        part = ConnectionType.SERVER if speaker == "client" else ConnectionType.CLIENT
        self._frames = Connection(part)
        self._is_websocket: bool | None = None  # not known before the head is over

    def hear(self, data: bytes) -> None:
        """The next bytes, cut anywhere. Raises RemoteProtocolError for what is no frame, ValueError for a
        message that is not JSON. What follows a head that opens no WebSocket is not looked at.
        """
        if self._is_websocket is None:
            self._head, end, data = (self._head + data).partition(HEAD_END)
            if not end:
                return
            self._hear_head(self._head.decode("latin-1"))
        if self._is_websocket:
            self._frames.receive_data(data)
            for frame in self._frames.events():
                if isinstance(frame, TextMessage):
                    self._hear_text(frame)

    def _hear_head(self, head: str) -> None:
        if self._speaker == "client":
            self._recording.heads.append(head)
            self._is_websocket = "upgrade: websocket" in head.lower()
        else:
            self._is_websocket = head.startswith("HTTP/1.1 101 ")

    def _hear_text(self, part: TextMessage) -> None:
        self._text += part.data
        if part.message_finished:
            text, self._text = self._text, ""
            self._recording.messages.append(Message(self._speaker, len(text.encode()), json.loads(text)))


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
