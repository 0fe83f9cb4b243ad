"""Client events in: what is taken, what is refused and how; items and tools. And the shape of errors out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import wire
from protocol.errors import RequestError

Json = dict[str, Any]


def decoded(frame: str) -> wire.ClientEvent:
    return wire.decode_client_event(wire.decode_head(frame), frame)


def raw(items: list[Any]) -> list[msgspec.Raw]:
    return [msgspec.Raw(json.dumps(item).encode()) for item in items]


def create(**fields: Any) -> str:
    return json.dumps({"type": "response.create", **fields})


REFUSED = [
    ("", "invalid_json", None),
    ("nope", "invalid_json", None),
    ("[]", "invalid_json", None),
    ("null", "invalid_json", None),
    ('"response.create"', "invalid_json", None),
    ('{"type":"response.create","x":NaN}', "invalid_json", None),
    ('{"type":"response.create"} {}', "invalid_json", None),
    ('{"type":"response.create","user":"\\ud800"}', "invalid_json", None),
    ("{}", "unknown_event_type", "type"),
    ('{"type":null}', "unknown_event_type", "type"),
    ('{"type":["response.create"]}', "unknown_event_type", "type"),
    ('{"type":"response.nothing"}', "unknown_event_type", "type"),
    (create(stream_id=""), "invalid_stream_id", "stream_id"),
    (create(stream_id=7), "invalid_stream_id", "stream_id"),
    (create(stream_id="a/b"), "invalid_stream_id", "stream_id"),
    (create(stream_id="a\n"), "invalid_stream_id", "stream_id"),
    (create(stream_id="x" * 257), "invalid_stream_id", "stream_id"),
    (create(temperature="hot"), "invalid_value", "temperature"),
    (create(temperature=2.1), "invalid_value", "temperature"),
    (create(top_p=0), "invalid_value", "top_p"),
    (create(max_output_tokens=0), "invalid_value", "max_output_tokens"),
    (create(max_output_tokens=10**30), "invalid_value", "max_output_tokens"),
    (create(seed=-1), "invalid_value", "seed"),
    (create(seed=2**63), "invalid_value", "seed"),
    (create(metadata={"a": 1}), "invalid_value", "metadata[...]"),
    (create(metadata={str(n): "" for n in range(17)}), "invalid_value", "metadata"),
    (create(input={"a": 1}), "invalid_value", "input"),
    (create(tools={}), "invalid_value", "tools"),
    (create(truncation="maybe"), "invalid_value", "truncation"),
    (create(parallel_tool_calls="no"), "invalid_value", "parallel_tool_calls"),
    (create(event_id=""), "invalid_value", "event_id"),
    ('{"type":"response.append"}', "missing_required_parameter", "input"),
    ('{"type":"response.append","input":"text"}', "invalid_value", "input"),
    ('{"type":"response.cancel"}', "missing_required_parameter", "response_id"),
    ('{"type":"response.steer","input":"x"}', "missing_required_parameter", "previous_response_id"),
    ('{"type":"response.inject","input":[]}', "missing_required_parameter", "response_id"),
]


@pytest.mark.parametrize(("frame", "code", "param"), REFUSED)
def test_a_frame_that_is_refused(frame: str, code: str, param: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        decoded(frame)
    error = refused.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert (error.code, error.param) == (code, param)
    if param is not None and code != "unknown_event_type":
        assert param.partition("[")[0] in error.message


def test_every_field_of_a_create_may_be_null() -> None:
    frame = create(**dict.fromkeys(wire.Create.__struct_fields__))
    assert decoded(frame) == wire.Create()


def test_a_create_has_defaults_and_keeps_what_it_is_given() -> None:
    assert decoded(create()) == wire.Create()
    event = decoded(create(model="m", input="hello", stream=True, temperature=1, stream_id="a.B-9_"))
    assert isinstance(event, wire.Create)
    assert (event.model, event.input, event.temperature, event.stream_id) == ("m", "hello", 1.0, "a.B-9_")


def test_unknown_fields_are_listed_and_harmless() -> None:
    frame = create(model="m", client_metadata={"a": "b"}, access_programs=[], zebra=1)
    ignored: list[str] = []
    assert decoded(frame) == wire.Create(model="m")
    wire.unknown_fields(frame, ignored)
    assert ignored == ["access_programs", "client_metadata", "zebra"]


@given(frame=st.text() | st.from_type(dict).map(str))
def test_no_text_does_anything_but_be_refused(frame: str) -> None:
    with pytest.raises(RequestError):
        decoded(frame)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    fields=st.dictionaries(st.sampled_from(wire.Create.__struct_fields__), json_values, max_size=4),
    items=st.lists(json_values, max_size=3),
)
def test_any_json_in_any_field_is_taken_or_refused_with_a_path(fields: Json, items: list[Any]) -> None:
    with suppress_refusals() as refused:
        event = decoded(create(**fields))
        assert isinstance(event, wire.Create)
        wire.parse_items(event.input, [])
        wire.parse_tools(event.tools, [])
    for error in refused:
        assert error.param is None or re.split(r"[.\[]", error.param)[0] in fields
    with suppress_refusals() as refused:
        wire.parse_items(raw(items), [])
    for error in refused:
        assert error.param is not None
        assert error.param.startswith("input[")


@contextmanager
def suppress_refusals() -> Iterator[list[RequestError]]:
    """The refusal that ended the block, if one did."""
    refused: list[RequestError] = []
    try:
        yield refused
    except RequestError as error:
        refused.append(error)


# ---- items


TEXT_PART = {"type": "input_text", "text": "a"}
TAKEN = [
    ({"role": "user", "content": "a"}, wire.Message("user", "a")),
    ({"type": "message", "role": "developer", "content": "a"}, wire.Message("developer", "a")),
    (
        {"role": "user", "content": [TEXT_PART], "id": "msg_1", "status": "completed", "phase": "x"},
        wire.Message("user", [wire.ContentPart("input_text", "a")], id="msg_1", status="completed"),
    ),
    (
        {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "id": None},
        wire.FunctionCall("c", "n", "{}"),
    ),
    (
        {"type": "function_call_output", "call_id": "c", "output": [TEXT_PART]},
        wire.FunctionCallOutput("c", [wire.ContentPart("input_text", "a")]),
    ),
    (
        {"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "x"},
        wire.CustomToolCall("c", "n", "x"),
    ),
    (
        {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
        wire.CustomToolCallOutput("c", "x"),
    ),
    (
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        wire.Reasoning(),
    ),
]


@pytest.mark.parametrize(("item", "parsed"), TAKEN)
def test_an_item_that_is_taken(item: Json, parsed: wire.Item) -> None:
    ignored: list[str] = []
    assert wire.parse_items(raw([item]), ignored) == [parsed]
    assert not ignored
    assert wire.item_type(parsed) == item.get("type", "message")


ITEMS_REFUSED = [
    (5, "invalid_value", "input[1]"),
    (None, "invalid_value", "input[1]"),
    ({"type": 5}, "invalid_value", "input[1].type"),
    ({"role": "user"}, "missing_required_parameter", "input[1].content"),
    ({"role": "user", "content": None}, "invalid_value", "input[1].content"),
    ({"role": "nobody", "content": "a"}, "invalid_value", "input[1].role"),
    ({"role": "user", "content": [{"text": "a"}]}, "missing_required_parameter", "input[1].content[0].type"),
    ({"role": "user", "content": [TEXT_PART, 5]}, "invalid_value", "input[1].content[1]"),
    (
        {"role": "user", "content": [{"type": "input_text"}]},
        "missing_required_parameter",
        "input[1].content[0].text",
    ),
    (
        {"role": "user", "content": [TEXT_PART, {"type": "input_image", "image_url": "x"}]},
        "unsupported_parameter",
        "input[1].content[1].type",
    ),
    ({"type": "function_call_output", "output": "x"}, "missing_required_parameter", "input[1].call_id"),
    (
        {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
        "invalid_value",
        "input[1].output",
    ),
    (
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
        "unsupported_parameter",
        "input[1].output[0].type",
    ),
    (
        {"type": "function_call", "call_id": "c", "name": "n"},
        "missing_required_parameter",
        "input[1].arguments",
    ),
]


@pytest.mark.parametrize(("item", "code", "param"), ITEMS_REFUSED)
def test_an_item_that_is_refused(item: Any, code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        wire.parse_items(raw([{"role": "user", "content": "a"}, item]), [])
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


def test_items_of_unknown_types_are_listed_where_they_stood() -> None:
    ignored: list[str] = []
    unknown = [{"type": "item_reference", "id": "x"}, {"content": "x"}, {"type": "web_search_call"}]
    items = wire.parse_items(raw([unknown[0], {"role": "user", "content": "a"}, *unknown[1:]]), ignored)
    assert items == [wire.Message("user", "a")]
    assert ignored == [
        "input[0]: item of type item_reference",
        "input[2]: item of type None",
        "input[3]: item of type web_search_call",
    ]


def test_a_string_is_a_message_of_the_user_and_nothing_is_nothing() -> None:
    assert wire.parse_items("hello", []) == [wire.Message("user", "hello")]
    assert wire.parse_items(None, []) == []
    assert wire.parse_items([], []) == []


def test_the_text_of_an_item_is_all_its_parts() -> None:
    parts = [
        wire.ContentPart("output_text", "a"),
        wire.ContentPart("refusal", refusal="b"),
        wire.ContentPart("text", "c"),
    ]
    assert wire.item_text(wire.Message("assistant", parts)) == "abc"
    assert wire.item_text(wire.FunctionCallOutput("c", parts)) == "abc"
    assert wire.item_text(wire.CustomToolCallOutput("c", "d")) == "d"
    assert wire.item_text(wire.Reasoning(content=parts)) == "abc"
    assert wire.item_text(wire.Reasoning()) == ""


# ---- tools


def test_tools_that_are_known_are_parsed_and_others_listed() -> None:
    ignored: list[str] = []
    tools = wire.parse_tools(
        raw(
            [
                {"type": "function", "name": "f", "strict": None, "parameters": None},
                {"type": "web_search", "external_web_access": True},
                {"type": "custom", "name": "c", "format": {"type": "grammar"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
            ]
        ),
        ignored,
    )
    assert tools == [
        wire.FunctionTool("f"),
        wire.CustomTool("c", format={"type": "grammar"}),
        wire.NamespaceTool("n", tools=[wire.FunctionTool("g")]),
    ]
    assert ignored == ["tools[1]: tool of type web_search"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({"name": "f"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": "f", "parameters": []}, "tools[0].parameters"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
    ],
)
def test_a_tool_that_is_refused(tool: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        wire.parse_tools(raw([tool]), [])
    assert refused.value.param == param


# ---- out


def test_an_error_frame_always_has_status_code_and_param() -> None:
    error = RequestError("no", status=429, type="rate_limit_error", code="rate_limit_exceeded")
    detail = {"type": "rate_limit_error", "code": "rate_limit_exceeded", "message": "no", "param": None}
    assert json.loads(wire.error_frame(error)) == {"type": "error", "status": 429, "error": detail}
    assert json.loads(wire.error_frame(error, "lane"))["stream_id"] == "lane"


def test_only_the_three_ends_are_terminal() -> None:
    def all_events(kind: type[wire.ServerEvent]) -> list[type[wire.ServerEvent]]:
        return [kind, *(each for child in kind.__subclasses__() for each in all_events(child))]

    terminal = {str(each.__struct_config__.tag) for each in all_events(wire.ServerEvent) if each.terminal}
    assert terminal == {"response.completed", "response.incomplete", "response.failed"}
