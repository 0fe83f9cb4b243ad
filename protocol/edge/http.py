"""HTTP/1.1 on one stream: requests in, replies out. It knows no routes, no keys and no WebSocket frames.

Strategy: h11 holds the state and does all the framing (keep-alive, pipelining, chunks, HEAD); this file
adds the I/O and what h11 leaves to its user: deadlines, size limits, 100-continue, the Date. A request that
cannot be read raises `RequestError` with the status to answer; the stream is then good for that answer and
nothing more. An answer that takes time is made while somebody reads on (`watched`): the peer that leaves is
noticed, and what it pipelines is kept, up to a limit.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from math import ceil
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from protocol.errors import RequestError

HEAD_LIMIT = 32 * 1024  # bytes; node.js takes 80 KiB, tomcat 8 KiB. A head may exceed it by one read.
HEAD_TIMEOUT = 10.0  # s, from the first byte of a head to its last
IDLE_TIMEOUT = 75.0  # s between two requests; nginx's keepalive_timeout
BODY_TIMEOUT = 60.0  # s for a whole body
LINGER_TIMEOUT = 2.0  # s that a peer gets to read our last words before the connection is torn down
READ_SIZE = 16 * 1024  # bytes a read; small beside HEAD_LIMIT, which it blurs
PIPELINED_LIMIT = 64 * 1024  # bytes kept behind a request that is being answered; then the peer has to wait

_TRY_AGAIN = re.compile(r"try again in (\d+(?:\.\d+)?)s")


@dataclass(frozen=True, slots=True)
class Request:
    """The head of one request. `path` is as sent (percent-encoded), without the query."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    query: str = ""  # as sent

    def header(self, name: str) -> str | None:
        """The first value of a header, None if it was not sent."""
        wanted = name.encode("ascii")
        return next((value.decode("latin-1") for key, value in self.headers if key == wanted), None)

    def tokens(self, name: str) -> frozenset[str]:
        """All the comma-separated values of a header, in lower case."""
        wanted = name.encode("ascii")
        lists = (value.decode("latin-1") for key, value in self.headers if key == wanted)
        return frozenset(token.strip().lower() for values in lists for token in values.split(","))

    @property
    def wants_websocket(self) -> bool:
        """Whether this asks to leave HTTP for WebSocket."""
        return "websocket" in self.tokens("upgrade") and "upgrade" in self.tokens("connection")


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole answer. Length, date and connection headers are added when it is sent."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply whose body is `value` as JSON."""
    return Reply(status, msgspec.json.encode(value))


def error_reply(error: RequestError, headers: Iterable[tuple[str, str]] = ()) -> Reply:
    """An error in the envelope of the public API: ``{"error": {message, type, param, code}}``. Where its
    message says when to try again, Retry-After says it too, in whole seconds.
    """
    detail = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    all_headers = list(headers)
    if error.status in (429, 503) and (soon := _TRY_AGAIN.search(error.message)):
        all_headers.append(("retry-after", str(ceil(float(soon[1])))))
    return Reply(error.status, msgspec.json.encode({"error": detail}), headers=tuple(all_headers))


class HttpConnection:
    """The server's side of one HTTP/1.1 connection. It does not own the stream: whoever made it closes it.

    Any method may be cancelled; the connection is then good for nothing but closing.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
        self._is_head_request = False

    async def read_head(self, *, idle_timeout: float) -> Request | None:
        """The next request; None when the peer closed, or sent nothing in `idle_timeout` seconds.

        Raises `RequestError`: not HTTP, a head that is too large, or one that takes more than HEAD_TIMEOUT.
        """
        has_begun = bool(self._h11.trailing_data[0])
        deadline = trio.current_time() + (HEAD_TIMEOUT if has_begun else idle_timeout)
        while (event := self._next_event()) is h11.NEED_DATA:
            with trio.move_on_at(deadline) as scope:
                data = await self._stream.receive_some(READ_SIZE)
            if scope.cancelled_caught:
                if has_begun:
                    raise _too_slow("The head", HEAD_TIMEOUT)
                return None
            if not has_begun:
                has_begun = True
                deadline = trio.current_time() + HEAD_TIMEOUT
            self._h11.receive_data(bytes(data))
        if isinstance(event, h11.ConnectionClosed):
            return None
        assert isinstance(event, h11.Request)
        method, target = event.method.decode("ascii"), event.target.decode("ascii")
        self._is_head_request = method == "HEAD"
        return Request(method, _path_of(target), tuple(event.headers), target.partition("?")[2])

    async def read_body(self, request: Request, *, limit: int) -> bytes:
        """The whole body of the request just read, invited with 100 Continue where the client waits for that.

        Raises `RequestError`: larger than `limit` bytes (413; told from Content-Length before any of it is
        read), not complete in BODY_TIMEOUT, or badly framed.
        """
        if int(request.header("content-length") or 0) > limit:
            raise _too_large(limit)
        body = bytearray()
        with trio.move_on_after(BODY_TIMEOUT):
            while not isinstance(event := self._next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > limit:
                        raise _too_large(limit)
                    continue
                if self._h11.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    await self._stream.send_all(self._h11.send(go_on))
                self._h11.receive_data(bytes(await self._stream.receive_some(READ_SIZE)))
            return bytes(body)
        raise _too_slow("The body", BODY_TIMEOUT)

    async def send(self, reply: Reply, *, timeout: float, close: bool) -> bool:
        """Answer the request just read, or the bytes that were none. True if another request may follow.

        Raises trio.BrokenResourceError if the peer is gone, or does not take the reply in `timeout` seconds.
        """
        headers = [("content-length", str(len(reply.body))), *reply.headers]
        data = self._head(reply.status, reply.content_type, headers, close)
        if reply.body and not self._is_head_request:
            data += self._h11.send(h11.Data(data=reply.body))
        data += self._h11.send(h11.EndOfMessage())
        await self._send_all(data, timeout)
        return self._next_cycle()

    async def send_part(
        self,
        part: bytes,
        *,
        content_type: str,
        headers: Iterable[tuple[str, str]],
        timeout: float,
        close: bool,
    ) -> None:
        """Send a part of an answer whose length nobody knows; before the first part goes the head, with
        status 200 and these headers. `end_parts` has to follow.

        Raises trio.BrokenResourceError if the peer is gone, or does not take the part in `timeout` seconds.
        """
        data = self._head(200, content_type, headers, close) if self.can_reply else b""
        await self._send_all(data + self._h11.send(h11.Data(data=part)), timeout)

    async def end_parts(self, *, timeout: float) -> bool:
        """The answer is whole. True if another request may follow. Raises as `send_part`."""
        await self._send_all(self._h11.send(h11.EndOfMessage()), timeout)
        return self._next_cycle()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Cancels its block when the peer goes away, or only half closes (nobody does that and waits for an
        answer), and raises trio.BrokenResourceError then. Whatever the block raises comes in a group.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            yield
            nursery.cancel_scope.cancel()

    async def _watch(self) -> None:
        while len(self.unread) < PIPELINED_LIMIT:
            data = await self._stream.receive_some(READ_SIZE)
            if not data:
                raise trio.BrokenResourceError("the peer left before it had its answer")
            self._h11.receive_data(bytes(data))

    def _head(self, status: int, content_type: str, headers: Iterable[tuple[str, str]], close: bool) -> bytes:
        all_headers = [("date", formatdate(usegmt=True)), ("content-type", content_type), *headers]
        if close:
            all_headers.append(("connection", "close"))
        reason = HTTPStatus(status).phrase.encode("ascii")
        return self._h11.send(h11.Response(status_code=status, headers=all_headers, reason=reason))

    async def _send_all(self, data: bytes, timeout: float) -> None:
        with trio.move_on_after(timeout) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise trio.BrokenResourceError(f"the peer did not take a reply in {timeout} s")

    def _next_cycle(self) -> bool:
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        self._is_head_request = False
        return True

    @property
    def can_reply(self) -> bool:
        """Whether no reply has begun since the last request."""
        return self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def unread(self) -> bytes:
        """What came behind the last request in the same reads: the first bytes of whatever follows HTTP."""
        return self._h11.trailing_data[0]

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise RequestError(
                f"This is not an HTTP/1.1 request: {error}.", status=error.error_status_hint, code="bad_http"
            ) from None


class Exchange:
    """One request, and a way to answer it in parts; for handlers that take their time."""

    def __init__(
        self, connection: HttpConnection, request: Request, body: bytes, *, send_timeout: float, close: bool
    ) -> None:
        self.request = request
        self.body = body
        self.received = monotonic()
        self._connection = connection
        self._send_timeout = send_timeout
        self._close = close

    async def send_events(self, events: bytes) -> None:
        """Send server-sent events, one or more, as they are on the wire. The first make it a stream of them,
        with status 200.

        Raises trio.BrokenResourceError if the peer is gone, or does not take them in the send timeout.
        """
        await self._connection.send_part(
            events,
            content_type="text/event-stream; charset=utf-8",
            headers=[("cache-control", "no-cache")],
            timeout=self._send_timeout,
            close=self._close,
        )


async def linger(stream: trio.abc.Stream) -> None:
    """Let the peer read what was sent last: half-close, then discard until it closes, LINGER_TIMEOUT at most.

    Closing at once with bytes unread makes the kernel send a reset, which can overtake the reply.
    Cancellation only cuts the wait short. Raises trio.BrokenResourceError if the peer is gone.
    """
    with trio.move_on_after(LINGER_TIMEOUT):
        transport = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        assert isinstance(transport, trio.abc.HalfCloseableStream)
        await transport.send_eof()
        while await stream.receive_some(READ_SIZE):
            pass


def _path_of(target: str) -> str:
    """The path of a request target, which is ``/path?query`` or, sent to proxies, a whole URL."""
    if target.startswith("/"):
        return target.partition("?")[0]
    try:
        return urlsplit(target).path
    except ValueError:  # such as http://[
        return target


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The body is larger than {limit} bytes.", status=413, code="payload_too_large")


def _too_slow(what: str, seconds: float) -> RequestError:
    return RequestError(
        f"{what} of the request took more than {seconds:g} s.", status=408, code="request_timeout"
    )
