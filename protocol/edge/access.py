"""Who may talk to this server: the name a request was sent to, the page it was sent from, and its key.

It knows heads, not sockets. Three checks, in this order, each with its own answer:

1. `Host`, where the port is on loopback: a web page can have its own name resolve to 127.0.0.1 (DNS
   rebinding), but it cannot make the browser send another name than its own.
2. `Origin`, where the request could change something: browsers ask no permission before they open a
   WebSocket, so every page could otherwise drive the model of whoever looks at it.
3. The key, compared in constant time, by digest, against every key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.edge.http import Request
from protocol.errors import RequestError
from protocol.settings import Settings

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN_PATHS = frozenset({"/healthz"})  # for those who watch the server and have no key


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request is from, as far as it matters here: requests of the same key have equal callers.

    `name` is safe to log: a short digest of the key, or "local" on a server without keys.
    """

    name: str


LOCAL = Caller("local")


class Access:
    """The checks of one server."""

    def __init__(self, settings: Settings) -> None:
        self._callers = {_digest(key): Caller(f"key-{_digest(key).hex()[:12]}") for key in settings.api_keys}
        self._origins = frozenset(origin.rstrip("/").lower() for origin in settings.allow_origins)
        allowed_names = {urlsplit(origin).hostname or "" for origin in self._origins}
        self._names = LOOPBACK_NAMES | {settings.host} | allowed_names if settings.is_loopback else None

    def admit(self, request: Request) -> Caller:
        """The caller of a request. Raises `RequestError`: 403 for a Host or an Origin, 401 for a key."""
        host = (request.header("host") or "").strip().lower()
        # HTTP/1.0 needs no Host, and no browser speaks it.
        if host and self._names is not None and _host_name(host) not in self._names:
            raise _forbidden(
                "host_not_allowed", "This server answers to the names of this machine's loopback only."
            )
        origin = request.header("origin")
        changes = request.wants_websocket or request.method not in ("GET", "HEAD", "OPTIONS")
        if origin is not None and changes and not self._is_allowed_origin(origin.strip().lower(), host):
            raise _forbidden(
                "origin_not_allowed", "Pages of this origin may not use this server (--allow-origin)."
            )
        if not self._callers or request.path in OPEN_PATHS:
            return LOCAL
        return self._caller_of(request.header("authorization") or "")

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and rest == host and bool(host)

    def _caller_of(self, authorization: str) -> Caller:
        scheme, _, key = authorization.partition(" ")
        presented = _digest(key.strip()) if scheme.lower() == "bearer" else b""
        found = None
        for digest, caller in self._callers.items():  # to the end: the time must not tell which key was near
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None:
            raise RequestError(
                "Incorrect API key provided: send it as 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
            )
        return found


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8"), digest_size=32, person=b"fermata-caller").digest()


def _host_name(host: str) -> str | None:
    """The name in a Host header, without port and brackets; None if it is no host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _forbidden(code: str, message: str) -> RequestError:
    return RequestError(message, status=403, code=code)
