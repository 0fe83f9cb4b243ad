"""Their fault, as a value: what a client is told when its request cannot be done. Knows no sockets.

Our own bugs are ordinary exceptions: they are logged with their traceback and reach the client as a plain
`server_error`.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that cannot be done, with everything that the answer needs.

    `param` is the path of the offending field (``input[2].call_id``), None where no one field is at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str = "invalid_value",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param


def context_too_long(tokens: int, limit: int) -> RequestError:
    """The input, this long or longer, does not fit the model's context. Both in tokens; `limit` leaves room
    for sampling.
    """
    return RequestError(
        f"The input is at least {tokens} tokens long, and the context of this model takes {limit}.",
        code="context_length_exceeded",
        param="input",
    )


def nested_too_deeply() -> RequestError:
    """JSON whose nesting is deeper than the stack."""
    return RequestError("The JSON is nested too deeply.", code="invalid_json")


def overloaded(message: str) -> RequestError:
    """The server has no room for this now."""
    return RequestError(message, status=503, type="server_error", code="server_is_overloaded")


def server_error() -> RequestError:
    """Our bug, as the client sees it: no details, they are in the log."""
    return RequestError(
        "The server had an error while processing this request.",
        status=500,
        type="server_error",
        code="server_error",
    )
