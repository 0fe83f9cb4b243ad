"""What the network edge needs of whatever makes Responses; `protocol.service.Service` is the one there is."""

from __future__ import annotations

from typing import Any, Protocol

import trio

from protocol.edge.access import Caller
from protocol.edge.http import Exchange, Reply
from protocol.edge.metrics import Sections
from protocol.edge.socket import Socket


class Backend(Protocol):
    """The part behind the edge. All but `run` and `drain` answer at once: they are called for every probe."""

    def models(self) -> list[dict[str, Any]]:
        """The data of /v1/models; each has an `id`."""
        ...

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /healthz: 200, or 503 with a reason while there is no engine to work with."""
        ...

    def statistics(self) -> Sections:
        """The sections of /metrics."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Work until cancelled. Reports started before weights are loaded, so that health can be asked."""
        ...

    async def drain(self) -> None:
        """Take no new work; return when none is left. The caller has the deadline, and may cancel."""
        ...


class HttpHandler(Protocol):
    """What answers the requests that have to do with Responses: `protocol.edge.rest.Rest`."""

    async def __call__(self, exchange: Exchange, *, caller: Caller) -> Reply | None:
        """The whole reply; None if it was sent in parts. Raises RequestError, until a part is sent.

        It is cancelled when the peer goes away, and at shutdown, a moment after `Backend.drain`.
        """
        ...


class SocketHandler(Protocol):
    """What serves one WebSocket: `protocol.websocket.serve_connection`, with its service bound."""

    async def __call__(self, socket: Socket, *, caller: Caller, prototype: bool) -> None:
        """Serve until the socket is gone, and return or raise SocketClosed. It has to be in recv() to notice.

        A socket that is still open when this returns is closed with code 1000.

        It is cancelled at shutdown, a moment after `Backend.drain`; the socket is then closed with code 1001.
        """
        ...
