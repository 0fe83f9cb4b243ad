"""Output items and their events, kind by kind; and reading a leg a second time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import wire
from protocol.dialects.base import (
    CallDelta,
    CallEnded,
    CallStarted,
    Malformed,
    Parsed,
    ReasoningDelta,
    TextDelta,
)
from protocol.items import ItemWriter

Json = dict[str, Any]


class Heard:
    """Events as frames."""

    def __init__(self) -> None:
        self.events: list[Json] = []

    def __call__(self, event: wire.ServerEvent) -> None:
        self.events.append(json.loads(wire.encode(event)))

    @property
    def types(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]


def write(parsed: list[Parsed], *, first_index: int = 0) -> tuple[ItemWriter, Heard]:
    heard = Heard()
    writer = ItemWriter("resp_abc", first_index, heard)
    for each in parsed:
        writer.write(each)
    return writer, heard


MESSAGE: list[Parsed] = [TextDelta("Hel"), TextDelta("lo")]
REASONING: list[Parsed] = [ReasoningDelta("hm"), ReasoningDelta("m")]
CALL: list[Parsed] = [CallStarted("read_file"), CallDelta('{"a"'), CallDelta(":1}"), CallEnded(True)]
CUSTOM: list[Parsed] = [
    CallStarted("apply_patch", custom=True),
    CallDelta("*** "),
    CallDelta("End"),
    CallEnded(True),
]
NAMESPACED: list[Parsed] = [CallStarted("close", "browser"), CallDelta("{}"), CallEnded(True)]
BROKEN: list[Parsed] = [CallStarted("read_file"), CallDelta('{"a'), CallEnded(False)]

EVENTS_OF_A_KIND = [
    (
        MESSAGE,
        [
            *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
        ],
        {
            "id": "msg_abc_3",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        },
    ),
    (
        REASONING,
        [
            *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
        ],
        {
            "id": "rs_abc_3",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hmm"}],
        },
    ),
    (
        CALL,
        [
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done"),
        ],
        {
            "id": "fc_abc_3",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_abc_3",
            "name": "read_file",
            "arguments": '{"a":1}',
        },
    ),
    (
        CUSTOM,
        [
            *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.delta"),
            *("custom_tool_call_input.done", "output_item.done"),
        ],
        {
            "id": "ctc_abc_3",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_abc_3",
            "name": "apply_patch",
            "input": "*** End",
        },
    ),
    (
        NAMESPACED,
        [
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done"),
        ],
        {
            "id": "fc_abc_3",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_abc_3",
            "name": "close",
            "namespace": "browser",
            "arguments": "{}",
        },
    ),
]


@pytest.mark.parametrize(("parsed", "types", "item"), EVENTS_OF_A_KIND)
def test_events_of_one_item(parsed: list[Parsed], types: list[str], item: Json) -> None:
    writer, heard = write(parsed, first_index=3)
    writer.close()
    assert heard.types == types
    assert heard.events[-1]["item"] == item
    assert all(event["output_index"] == 3 for event in heard.events)
    assert {event["item_id"] for event in heard.events[1:-1]} == {item["id"]}
    begun = heard.events[0]["item"]
    assert begun["status"] == "in_progress"
    empty = (
        {"content": []} if "content" in item else {"arguments": ""} if "arguments" in item else {"input": ""}
    )
    assert begun == {**item, "status": "in_progress", **empty}


@pytest.mark.parametrize("field", ["name", "arguments"])
def test_the_whole_arguments_come_with_the_name(field: str) -> None:
    _, heard = write(CALL)
    done = heard.events[heard.types.index("function_call_arguments.done")]
    assert done[field] == {"name": "read_file", "arguments": '{"a":1}'}[field]


def test_items_follow_one_another_and_only_whole_calls_are_owed() -> None:
    writer, heard = write([*REASONING, *MESSAGE, *CALL, *BROKEN, *CUSTOM, Malformed("no call"), *MESSAGE])
    writer.close(complete=False)
    kinds = [type(item).__name__ for item in writer.items]
    assert kinds == [
        *("OutputReasoning", "OutputMessage", "OutputFunctionCall", "OutputFunctionCall"),
        *("OutputCustomCall", "OutputMessage"),
    ]
    assert [item.status for item in writer.items] == [
        *["completed"] * 3,
        "incomplete",
        "completed",
        "incomplete",
    ]
    assert [each.call_id for each in writer.calls] == ["call_abc_2", "call_abc_4"]
    added = [event["output_index"] for event in heard.events if event["type"].endswith("item.added")]
    assert added == list(range(6))
    assert len({item.id for item in writer.items}) == 6


def test_closing_without_an_open_item_says_nothing() -> None:
    writer, heard = write(CALL)
    count = len(heard.events)
    writer.close()
    assert len(heard.events) == count


parsed_turns = st.lists(st.sampled_from([MESSAGE, REASONING, CALL, CUSTOM, BROKEN]), max_size=5).map(
    lambda parts: [each for part in parts for each in part]
)


@given(turn=parsed_turns, cut=st.integers(0, 30))
def test_reading_a_part_again_in_silence_makes_the_same_items_and_the_rest_of_the_events(
    turn: list[Parsed], cut: int
) -> None:
    whole, all_heard = write(turn)
    whole.close()
    first, first_heard = write(turn[:cut])
    second_heard = Heard()
    second = ItemWriter("resp_abc", 0, second_heard)
    with second.silent():
        for each in turn[:cut]:
            second.write(each)
    assert not second_heard.events
    assert second.items == first.items
    for each in turn[cut:]:
        second.write(each)
    second.close()
    assert second.items == whole.items
    assert first_heard.events + second_heard.events == all_heard.events
