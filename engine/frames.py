"""Messages on the socketpair between server and engine: 4 bytes of length, little-endian, then msgpack.

It does no I/O and knows no message by name: bytes in, bytes out. Both ends are ours, so a frame is as long
as it is (a ledger of 128k tokens takes about 400 kB), and what cannot be decoded is a bug, not somebody's
bad input.
"""

from __future__ import annotations

import msgspec

LENGTH_BYTES = 4
READ_BYTES = 64 * 1024  # asked of the socket at once: a step of 1,000 sequences, and many smaller ones, fit

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One message as a frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FrameReader:
    """Cuts a byte stream into payloads. `feed` it whatever the socket gave, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytearray]:
        """Take `received` and return the payloads that are now complete, oldest first."""
        buffer = self._buffer
        buffer += received
        payloads: list[bytearray] = []
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            payload_start = start + LENGTH_BYTES
            end = payload_start + int.from_bytes(buffer[start:payload_start], "little")
            if len(buffer) < end:
                break
            payloads.append(buffer[payload_start:end])
            start = end
        del buffer[:start]
        return payloads
