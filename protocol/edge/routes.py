"""Where requests go: to what makes Responses, or to the small routes here: health, models, metrics.

It knows requests and replies, not sockets. Every path works with and without ``/v1`` in front: clients differ
in what they take for the base URL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST

from protocol.edge.backend import Backend
from protocol.edge.http import Reply, Request, error_reply, json_reply
from protocol.edge.metrics import Exposition
from protocol.errors import RequestError

RESPONSES_PATH = "/responses"
MODELS_PATH = "/models"

Handler: TypeAlias = Callable[[], Reply]


# Where clients look for what is not here, and what they are told.
ELSEWHERE = {
    "/chat/completions": "This server speaks the Responses API: POST /v1/responses.",
    "/completions": "This server speaks the Responses API: POST /v1/responses.",
    "/responses/compact": "Compaction is not supported by this server.",
}


def route_of(request: Request) -> str:
    """The path of a request without the optional ``/v1``."""
    return request.path.removeprefix("/v1")


def is_of_responses(request: Request) -> bool:
    """Whether this is about Responses, and may take its time."""
    route = route_of(request)
    return route == RESPONSES_PATH or route.startswith(RESPONSES_PATH + "/")


def answer(request: Request, backend: Backend, exposition: Exposition) -> Reply:
    """The reply to a request that is neither an upgrade nor about Responses."""
    route = route_of(request)
    handler = _handler_of(route, backend, exposition)
    if handler is None:
        return error_reply(nothing_at(request))
    if request.method not in ("GET", "HEAD"):
        return wrong_method(request, ["GET", "HEAD"])
    return handler()


def _handler_of(route: str, backend: Backend, exposition: Exposition) -> Handler | None:
    match route:
        case "/healthz":
            return lambda: _health(backend)
        case "/metrics":
            return lambda: Reply(200, exposition.text(), content_type=CONTENT_TYPE_LATEST)
        case "/models":
            return lambda: json_reply({"object": "list", "data": backend.models()})
    if route.startswith(MODELS_PATH + "/"):
        return lambda: _model(unquote(route.removeprefix(MODELS_PATH + "/")), backend)
    return None


def _health(backend: Backend) -> Reply:
    status, body = backend.health()
    return json_reply(body, status)


def _model(model_id: str, backend: Backend) -> Reply:
    for model in backend.models():
        if model["id"] == model_id:
            return json_reply(model)
    return error_reply(_not_found(f"The model '{model_id}' does not exist.", "model_not_found", "model"))


def nothing_at(request: Request) -> RequestError:
    """The answer to a path that leads nowhere."""
    instead = ELSEWHERE.get(route_of(request), "")
    return _not_found(f"There is nothing at {request.path}. {instead}".rstrip(), "not_found")


def wrong_method(request: Request, allowed: Iterable[str]) -> Reply:
    """The answer to a path that is there, for other methods."""
    error = RequestError(
        f"{request.method} is not possible at {request.path}.", status=405, code="method_not_allowed"
    )
    return error_reply(error, [("allow", ", ".join(allowed))])


def _not_found(message: str, code: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=404, code=code, param=param)
