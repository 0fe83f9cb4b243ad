"""The input items of a Response as a list that is read in pages. It knows items and queries, no runs.

Items get ids of ours, whatever the client called them: a page begins after an id, so each has to be there
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec

from protocol import wire
from protocol.errors import RequestError

DEFAULT_PAGE = 20  # items, as at the public service; likewise the most there are in one
LARGEST_PAGE = 100
ID_PREFIXES = {
    wire.Message: "msg",
    wire.FunctionCall: "fc",
    wire.FunctionCallOutput: "fco",
    wire.CustomToolCall: "ctc",
    wire.CustomToolCallOutput: "ctco",
    wire.Reasoning: "rs",
}


def input_page(response_id: str, items: Sequence[wire.Item], query: str) -> dict[str, Any]:
    """One page of these items as the list object of the public API. `query` is that of the request: `limit`,
    `order` and `after`. Raises RequestError.
    """
    asked = {name: values[-1] for name, values in parse_qs(query).items()}
    listed = [_listed(item, response_id, index) for index, item in enumerate(items)]
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"Invalid value for 'order': {order[:100]!r} is not asc or desc.", param="order")
    if order == "desc":
        listed.reverse()
    begin = 0
    if (after := asked.get("after")) is not None:
        begin = 1 + next((index for index, item in enumerate(listed) if item["id"] == after), -1)
        if begin == 0:
            raise RequestError(f"There is no item {after[:100]!r} in this list.", param="after")
    page = listed[begin : begin + _limit(asked.get("limit"))]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(listed),
    }


def _limit(asked: str | None) -> int:
    if asked is None:
        return DEFAULT_PAGE
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:4]) <= LARGEST_PAGE):
        raise RequestError(
            f"Invalid value for 'limit': {asked[:100]!r} is not a number from 1 to {LARGEST_PAGE}.",
            param="limit",
        )
    return int(asked)


def _listed(item: wire.Item, response_id: str, index: int) -> dict[str, Any]:
    """An item as the API lists it: with an id, a status, and its content in parts."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    suffix = response_id.removeprefix("resp_")
    fields |= {"id": f"{ID_PREFIXES[type(item)]}_{suffix}_in{index}", "status": "completed"}
    if isinstance(item, wire.Message):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = (
            [{"type": kind, "text": item.content}] if isinstance(item.content, str) else fields["content"]
        )
        extra: dict[str, Any] = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
        fields["content"] = [{**extra, **part} for part in content]
    return {name: value for name, value in fields.items() if value is not None}
