"""One WebSocket as four verbs: recv, send, ping, aclose. It knows text, not what it means.

Under it is trio-websocket, which this file keeps to itself. That library leaves much to its user, hence the
strategy:

- Its handshake can hang or raise on a bad head. So it is given a head that is written here and cannot fail;
  the client's own has been parsed and checked before, and only its key goes in. Bytes that came with the
  upgrade wait until the 101.
- A send that is cancelled leaves half a frame in the stream, in silence. So a send that does not finish
  ends the connection, whatever stopped it.
- It closes without a word on what it cannot parse, and keeps TCP open after 1009. So the close frame is
  sent here if none has been, and TCP is closed by whoever opened it, never by the library.
- Its reader stops for a full queue, pongs and all. So the caller's read loop must never wait for work.
- It counts messages, not the frames that make up none. So bytes without an end of message are bounded here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio_websocket
from wsproto.frame_protocol import CloseReason, FrameProtocol
from wsproto.utilities import LocalProtocolError

from protocol.settings import Settings

HANDSHAKE_TIMEOUT = 10.0  # s for the 101 to leave
CLOSE_TIMEOUT = 5.0  # s for the peer to answer a close frame
MESSAGE_QUEUE = (
    2  # messages read ahead of recv(); more would only hold more memory, the reader of them does not wait
)
READ_SIZE = 64 * 1024  # bytes; the library's own 4 KiB costs 2.5 times the CPU on large messages
UTF8_WIDTH = 4  # bytes of the widest character
CLOSE_FRAME = 0x88  # first byte: FIN and opcode 8


class SocketClosed(Exception):
    """The socket is closed, by whichever side, or lost (code 1006). Codes as in RFC 6455, 7.4."""

    def __init__(self, code: int, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"{code} {reason}".rstrip())


class BinaryFrame(Exception):
    """The peer sent a binary message, which this protocol has no use for. The socket is still open."""


class Socket:
    """The server's end of one WebSocket. Made by `open_socket`."""

    def __init__(self, connection: Any, wire: _Wire, send_timeout: float) -> None:
        self._connection = connection  # trio_websocket.WebSocketConnection
        self._wire = wire
        self._send_timeout = send_timeout

    @property
    def close_code(self) -> int | None:
        """The code the socket was closed with, None while it is open."""
        closed = self._connection.closed
        return None if closed is None else int(closed.code)

    async def recv(self) -> str:
        """The next text message, without a deadline: the heartbeat is what notices a peer that is gone.

        Raises `SocketClosed`, or `BinaryFrame`. Cancellation loses nothing.
        """
        try:
            message: str | bytes = await self._connection.get_message()
        except trio_websocket.ConnectionClosed:
            raise self._closed() from None
        self._wire.bytes_since_message = 0
        if isinstance(message, bytes):
            raise BinaryFrame
        return message

    async def send(self, text: str) -> None:
        """Send one text message. Only ever one task may be in here.

        A peer that does not take it in the send timeout is dropped. Raises `SocketClosed`. Cancellation
        drops the connection, for half a frame may have left.
        """
        with trio.move_on_after(self._send_timeout):
            return await self._finish(self._connection.send_message(text))
        raise SocketClosed(
            CloseReason.ABNORMAL_CLOSURE, f"a message was not taken in {self._send_timeout:g} s"
        )

    async def ping(self, timeout: float) -> None:
        """Ask the peer for a sign of life; one that gives none in `timeout` seconds is dropped.

        Raises `SocketClosed`. Cancellation drops the connection.
        """
        with trio.move_on_after(timeout):
            return await self._finish(self._connection.ping())
        raise SocketClosed(CloseReason.ABNORMAL_CLOSURE, f"no pong in {timeout:g} s")

    async def aclose(self, code: int, reason: str) -> None:
        """Send a close frame and wait for the peer's, CLOSE_TIMEOUT at most, cancelled or not.

        Does nothing to a socket that is closed. Never raises.
        """
        with trio.move_on_after(CLOSE_TIMEOUT, shield=True) as scope:
            try:
                if (closed := self._connection.closed) is None:
                    await self._connection.aclose(code, reason)
                elif not self._wire.close_frame_sent and closed.code != CloseReason.ABNORMAL_CLOSURE:
                    frame = FrameProtocol(client=False, extensions=[]).close(closed.code, closed.reason)
                    await self._wire.send_all(frame)
            except (
                trio.BrokenResourceError,
                trio.ClosedResourceError,
                trio.BusyResourceError,
                LocalProtocolError,
            ):
                await self._wire.drop()
        if scope.cancelled_caught:
            await self._wire.drop()

    async def _finish(self, sending: Any) -> None:
        is_done = False
        try:
            await sending
            is_done = True
        except trio_websocket.ConnectionClosed:
            raise self._closed() from None
        finally:
            if not is_done:
                await self._wire.drop()

    def _closed(self) -> SocketClosed:
        reason = self._connection.closed
        if reason is None:
            return SocketClosed(CloseReason.ABNORMAL_CLOSURE, "")
        return SocketClosed(int(reason.code), reason.reason or "")


@asynccontextmanager
async def open_socket(
    stream: trio.abc.Stream, *, key: str, early: bytes, settings: Settings
) -> AsyncIterator[Socket]:
    """Answer an upgrade with 101 and be the socket that follows, until the block ends.

    `key` is the client's checked Sec-WebSocket-Key, `early` what has been read behind its head. The stream
    is the caller's to close. Raises trio.BrokenResourceError if the peer does not take the 101. Leaving the
    block sends no close frame: `aclose` does.
    """
    wire = _Wire(stream, key, early, message_limit=settings.max_message)
    try:
        async with trio.open_nursery() as nursery:
            connection, reader_scope = await nursery.start(_read, wire, settings.max_message)
            try:
                yield Socket(connection, wire, settings.send_timeout)
            finally:
                reader_scope.cancel()
    except* LocalProtocolError:
        pass  # the reader answered a ping after our close frame: the socket is closed, as was wanted


async def _read(
    wire: _Wire, max_message: int, *, task_status: trio.TaskStatus[tuple[Any, trio.CancelScope]]
) -> None:
    """Shake hands, then be the library's reader, shielded until the scope that is reported is cancelled.

    So a socket whose handler is cancelled can still be closed properly: the peer's close frame is read here.
    """
    async with trio.open_nursery() as nursery:
        nursery.cancel_scope.shield = True
        with trio.move_on_after(HANDSHAKE_TIMEOUT) as scope:
            request = await trio_websocket.wrap_server_stream(
                nursery,
                wire,
                message_queue_size=MESSAGE_QUEUE,
                max_message_size=max_message,
                receive_buffer_size=READ_SIZE,
            )
            try:
                connection = await request.accept()
            except trio_websocket.ConnectionClosed:
                raise trio.BrokenResourceError("the peer left during the handshake") from None
        if scope.cancelled_caught:
            raise trio.BrokenResourceError(f"the peer did not take the handshake in {HANDSHAKE_TIMEOUT:g} s")
        wire.is_accepted.set()
        task_status.started((connection, nursery.cancel_scope))


class _Wire(trio.abc.Stream):
    """The stream as trio-websocket sees it: a head of ours, then, after the 101, the peer's bytes."""

    def __init__(self, stream: trio.abc.Stream, key: str, early: bytes, *, message_limit: int) -> None:
        self._stream = stream
        self._head = (
            "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
        ).encode("ascii")
        self._early = early
        self._silence_limit = UTF8_WIDTH * message_limit + READ_SIZE
        self._is_closed = False
        self.is_accepted = trio.Event()
        self.close_frame_sent = False
        self.bytes_since_message = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._head:
            await trio.lowlevel.checkpoint()
            head, self._head = self._head, b""
            return head
        await self.is_accepted.wait()
        if self._is_closed:
            raise trio.ClosedResourceError
        if self._early:
            await trio.lowlevel.checkpoint()
            data, self._early = self._early, b""
        else:
            data = bytes(await self._stream.receive_some(max_bytes))
        self.bytes_since_message += len(data)
        if self.bytes_since_message > self._silence_limit:
            raise trio.BrokenResourceError("the peer sends frames that make up no message")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.close_frame_sent = self.close_frame_sent or data[:1] == bytes([CLOSE_FRAME])
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """The library is done; the stream itself stays, for a close frame and a proper end."""
        self._is_closed = True
        await trio.lowlevel.checkpoint()

    async def drop(self) -> None:
        """Close the stream itself, now: all who wait on it wake. Does not wait, cannot be cancelled."""
        self._is_closed = True
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)
