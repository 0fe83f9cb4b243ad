"""Server events against the openai SDK's own types, strictly, with the one list of what it does not know.

The SDK itself takes anything (`construct`). Here a frame is validated: types are not converted, no field that
is required may be missing, and no field may be there that the SDK's model does not have, at any depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from openai import BaseModel
from openai.types.beta import BetaResponseInjectFailedEvent
from openai.types.responses import ResponsesServerEvent
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_error import ResponseError
from openai.types.responses.response_steer_required_input import ResponseSteerRequiredInput
from pydantic import TypeAdapter

Json = dict[str, Any]

# What we send and the SDK does not know. Everything else has to be the SDK's.
EXTRA_FIELDS = {
    ("Response", "lifecycle"),  # who keeps the conversation
    ("Response", "work"),  # what was done for it
    ("Response", "store"),  # the public service sends it too
    ("ResponseFunctionCallArgumentsWsDone", "name"),  # older SDKs require it
    ("ResponseCustomToolCall", "status"),  # the SDK has it where items are listed
    ("CustomToolCallOutput", "name"),  # in `required_input`; functions have theirs in the SDK too
}
DONE = "response.done"  # like response.in_progress, with `required_input` as in response.steer.pending
EXTRA_REASONS = {"hold_timeout", "cancelled", "superseded", "shutdown"}  # of response.incomplete
EXTRA_CODES = {"context_length_exceeded", "server_is_overloaded"}  # of response.failed


def _type_of(event: type[BaseModel]) -> str:
    return str(get_args(event.model_fields["type"].annotation)[0])


EVENTS: dict[str, type[BaseModel]] = {
    _type_of(event): event
    for event in (*get_args(get_args(ResponsesServerEvent)[0]), BetaResponseInjectFailedEvent)
}
_REQUIRED: TypeAdapter[Any] = TypeAdapter(list[ResponseSteerRequiredInput])
_KNOWN_REASON = get_args(get_args(IncompleteDetails.model_fields["reason"].annotation)[0])[0]
_KNOWN_CODE = get_args(ResponseError.model_fields["code"].annotation)[0]


def check_event(event: Json) -> BaseModel:
    """The event as the SDK's type. Raises ValidationError, or AssertionError for a field too many."""
    event = dict(event)
    required: list[BaseModel] = []
    if event["type"] == DONE:
        required = _REQUIRED.validate_python(event.pop("required_input"), strict=True)
        assert required
        event["type"] = "response.in_progress"
    if (response := event.get("response")) is not None:
        event["response"] = _as_known(response)
    model = EVENTS[event["type"]].model_validate(event, strict=True)
    extra = {
        (type(each).__name__, name) for each in _models([model, *required]) for name in each.model_extra or {}
    }
    assert extra <= EXTRA_FIELDS, extra - EXTRA_FIELDS
    return model


def _as_known(response: Json) -> Json:
    response = dict(response)
    if (response.get("incomplete_details") or {}).get("reason") in EXTRA_REASONS:
        response["incomplete_details"] = {"reason": _KNOWN_REASON}
    if (response.get("error") or {}).get("code") in EXTRA_CODES:
        response["error"] = {**response["error"], "code": _KNOWN_CODE}
    return response


def _models(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from _models(each)
