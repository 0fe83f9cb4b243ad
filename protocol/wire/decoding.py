"""Decoding, with msgspec's error path turned into `param`; and noting what has no meaning here."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import RequestError

MAX_IGNORED = 32  # things without meaning here that a Response lists; and how much of each, in characters
MAX_SHOWN = 100

Short: TypeAlias = Annotated[str, Meta(max_length=512)]
"""A name, an id, or a label: short, because errors and Responses repeat it."""

_T = TypeVar("_T")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode(decoder: msgspec.json.Decoder[_T], data: str | bytes | msgspec.Raw, at: str) -> _T:
    """Decode, turning msgspec's error path into `param` below the path `at`."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        what, _, path = str(error).partition(" - at `$")
        param = (at + path.rstrip("`")).lstrip(".")
        if missing := _MISSING.match(what):
            param = f"{param}.{missing[1]}".lstrip(".")
            raise RequestError(
                f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param
            ) from error
        raise RequestError(
            f"Invalid value for '{param}': {what}.", code="invalid_value", param=param or None
        ) from error


def note(ignored: list[str], what: str) -> None:
    """List something that has no meaning here, within bounds."""
    if len(ignored) < MAX_IGNORED:
        ignored.append(what[:MAX_SHOWN])
