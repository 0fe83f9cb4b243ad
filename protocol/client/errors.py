"""What can go wrong between a client and its server, as exceptions, and how they are read off the wire.

It knows the shapes of errors and nothing of what was being done.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.client.views import Event, Reason


class ClientError(Exception):
    """What can go wrong between this client and its server."""


class ConnectionLost(ClientError):
    """There is no connection (any more), or nothing has come over it for too long."""


class ServerError(ClientError):
    """The server refused something: an `error` frame, or a refused handshake."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message, code, param)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def __str__(self) -> str:
        about = ", ".join(str(part) for part in (self.status, self.code, self.param) if part)
        return f"{self.message} ({about})"


def server_error(event: Event) -> ServerError:
    """An `error` frame."""
    why = event.error or Reason()
    return ServerError(event.status or 500, why.message or "The server gave no reason.", why.code, why.param)


class _Refusal(msgspec.Struct):
    error: Reason


def refusal(status: int, body: bytes | None, otherwise: str) -> ServerError:
    """An HTTP answer that is an error; its reason from the body, if that tells one."""
    try:
        why = msgspec.json.decode(body or b"", type=_Refusal).error
    except msgspec.DecodeError:
        why = Reason()
    return ServerError(status, why.message or otherwise, why.code, why.param)


def close_reason(closed: Any) -> str:
    """Why a connection was closed, from the library's ConnectionClosed."""
    reason = closed.reason
    if reason is None or reason.code == 1006:
        return "the connection broke"
    return f"closed with {reason.code} ({reason.reason or reason.name})"
