"""TLS on a connection: the server's certificate, and the handshake. It knows neither HTTP nor WebSocket."""

from __future__ import annotations

import ssl
from pathlib import Path

import trio

HANDSHAKE_TIMEOUT = 10.0  # s for the whole handshake, as for a head


class CertificateError(Exception):
    """The certificate and its key cannot be used; the message says which and why."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What connections with this certificate (a chain in PEM) and this key (PEM, not encrypted) begin with.

    Raises CertificateError.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")  # never ask for one on the terminal
    except OSError as error:  # of SSL too
        reason = error.strerror or str(error)
        raise CertificateError(f"{certificate} with {key} cannot be used for TLS: {reason}") from error
    return context


async def secured(stream: trio.abc.Stream, context: ssl.SSLContext) -> trio.SSLStream[trio.abc.Stream]:
    """The stream inside TLS, after the handshake. Raises trio.BrokenResourceError if that fails, or takes
    more than HANDSHAKE_TIMEOUT; the stream is then good for nothing but closing. So it is when cancelled.
    """
    inside = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
    with trio.move_on_after(HANDSHAKE_TIMEOUT) as scope:
        await inside.do_handshake()
    if scope.cancelled_caught:
        raise trio.BrokenResourceError(f"no TLS handshake in {HANDSHAKE_TIMEOUT:g} s")
    return inside
