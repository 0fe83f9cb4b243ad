"""What a client may append to a run: its items checked and sorted, before anything is done with them. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol import wire
from protocol.errors import RequestError


def drop_echoes(items: Sequence[wire.Item], said: Sequence[wire.OutputItem]) -> Sequence[wire.Item]:
    """The items without leading ones that only repeat what the run said: some clients send its output back
    first.
    """
    outputs = iter(said)
    for index, item in enumerate(items):
        if not any(is_echo(item, output) for output in outputs):
            return items[index:]
    return []


def is_echo(item: wire.Item, output: wire.OutputItem) -> bool:
    """Whether the item says what this output said; ids and status of an echo mean nothing."""
    match item, output:
        case wire.FunctionCall(call_id=call_id), wire.OutputFunctionCall():
            return call_id == output.call_id
        case wire.CustomToolCall(call_id=call_id), wire.OutputCustomCall():
            return call_id == output.call_id
        case wire.Message(role="assistant"), wire.OutputMessage():
            return wire.item_text(item) == "".join(part.text for part in output.content)
        case wire.Reasoning(), wire.OutputReasoning():
            return True
    return False


def sort_appended(
    items: Sequence[wire.Item], required: Sequence[wire.RequiredInput], first: int = 0
) -> tuple[list[wire.ToolOutput], list[wire.Message]]:
    """Results and messages of an append, each checked against what the run waits for. Raises RequestError.

    `first` is what the client counts the first of them as.
    """
    expected = {each.call_id: each.type for each in required}
    results: list[wire.ToolOutput] = []
    messages: list[wire.Message] = []
    for index, item in enumerate(items, first):
        at = f"input[{index}]"
        match item:
            case wire.FunctionCallOutput() | wire.CustomToolCallOutput():
                _check_result(item, expected.pop(item.call_id, None), at)
                results.append(item)
            case wire.Message(role="user" | "developer" | "system"):
                messages.append(item)
            case _:
                raise RequestError(
                    "A running Response takes tool outputs and messages of the user, developer or system; "
                    f"this is a {wire.item_type(item)} of the model.",
                    param=at,
                )
    return results, messages


def check_history(items: Sequence[wire.Item], history: Sequence[wire.Item]) -> None:
    """Every result among new items comes after its call, there or in the history. Raises RequestError."""
    calls = {item.call_id for item in history if isinstance(item, wire.ToolCall)}
    for index, item in enumerate(items):
        if isinstance(item, wire.ToolCall):
            calls.add(item.call_id)
        elif isinstance(item, wire.ToolOutput) and item.call_id not in calls:
            raise _no_such_call(item, f"input[{index}]")


def _no_such_call(item: wire.ToolOutput, at: str) -> RequestError:
    call_id = item.call_id[: wire.MAX_SHOWN]
    return RequestError(
        f"No tool call found for function call output with call_id {call_id}.", param=f"{at}.call_id"
    )


def _check_result(item: wire.ToolOutput, expected: str | None, at: str) -> None:
    if expected is None:
        raise _no_such_call(item, at)
    if wire.item_type(item) != expected:
        raise RequestError(f"Call {item.call_id} takes an item of type {expected}.", param=f"{at}.type")
    if item.status == "in_progress":
        raise RequestError(
            "Outputs in parts are not supported by this server: send the whole output, once.",
            code="unsupported_parameter",
            param=f"{at}.status",
        )


def count_turns(items: Sequence[wire.Item]) -> int:
    """Model turns in a history: groups of neighbouring items that the model made."""
    turns, in_turn = 0, False
    for item in items:
        by_model = isinstance(item, wire.FunctionCall | wire.CustomToolCall | wire.Reasoning) or (
            isinstance(item, wire.Message) and item.role == "assistant"
        )
        turns += by_model and not in_turn
        in_turn = by_model
    return turns
