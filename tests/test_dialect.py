"""The dialect of the embedded model: what it writes is what its family writes, and text stays text."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from protocol.dialects.base import RenderingError
from protocol.dialects.load import DialectError, load_dialect
from protocol.dialects.proof import prove
from protocol.dialects.template import ChatTemplate
from protocol.dialects.tokens import Tokens
from protocol.wire import (
    ContentPart,
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    Message,
    NamespaceTool,
    Reasoning,
    Tool,
)

MODEL = Path(__file__).parent.parent / "engine" / "embedded"
DIALECT = load_dialect(MODEL)
TOKENS = Tokens((MODEL / "tokenizer.json").read_text())
ORACLE = AutoTokenizer.from_pretrained(MODEL)
START, END = TOKENS.control["<|im_start|>"], TOKENS.control["<|im_end|>"]
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


def ids_of(*items: Item) -> list[int]:
    return DIALECT.tokenize(DIALECT.items(items))


def control_tokens(ids: list[int]) -> list[int]:
    return [token for token in ids if token in TOKENS.spelling]


# ---- equal to the family's own rendering and tokenising

TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.text(st.sampled_from(" \n\t.,:{}[]\"'\\<|>/aZé🙂07_-"), max_size=30),
    st.lists(
        st.sampled_from(["list_files", "oak", " ", "\n", "12", '{"', "tool_call", "holds"]), max_size=8
    ).map("".join),
).filter(lambda text: not any(spelling in text for spelling in TOKENS.control))
NAME = st.from_regex(r"[A-Za-z0-9_.:/-]{1,12}", fullmatch=True)
PARTS = TEXT | st.lists(TEXT, max_size=3).map(
    lambda texts: [ContentPart("input_text", text) for text in texts]
)


def plain(parts):
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


@st.composite
def turns(draw):
    """The items of one assistant turn in the order that chat templates know, and its chat message."""
    text, thought = draw(TEXT), draw(TEXT)
    items: list[Item] = []
    message = {"role": "assistant", "content": text, "tool_calls": []}
    if draw(st.booleans()):
        items.append(Reasoning(content=[ContentPart("reasoning_text", thought)]))
        message["reasoning_content"] = thought
    items.append(Message("assistant", text))
    for name, body, custom in draw(st.lists(st.tuples(NAME, TEXT, st.booleans()), max_size=3)):
        if custom:
            items.append(CustomToolCall("c", name, body))
            message["tool_calls"].append({"type": "custom", "custom": {"name": name, "input": body}})
        else:
            items.append(FunctionCall("c", name, body))
            message["tool_calls"].append({"type": "function", "function": {"name": name, "arguments": body}})
    return items, message


OTHERS = st.one_of(
    PARTS.map(lambda text: ([Message("user", text)], {"role": "user", "content": plain(text)})),
    PARTS.map(lambda text: ([Message("system", text)], {"role": "system", "content": plain(text)})),
    PARTS.map(lambda text: ([Message("developer", text)], {"role": "system", "content": plain(text)})),
    PARTS.map(lambda text: ([FunctionCallOutput("c", text)], {"role": "tool", "content": plain(text)})),
    PARTS.map(lambda text: ([CustomToolCallOutput("c", text)], {"role": "tool", "content": plain(text)})),
)
FUNCTIONS = st.lists(st.tuples(NAME, TEXT, TEXT), max_size=3, unique_by=lambda each: each[0])


@given(
    st.just("") | TEXT,
    FUNCTIONS,
    TEXT,
    st.lists(st.tuples(turns(), OTHERS), max_size=3),
)
def test_a_conversation_in_pieces_has_the_ids_of_the_familys_own_rendering(
    instructions, functions, hello, exchanges
):
    parameters = [{"type": "object", "properties": {key: {"type": "string"}}} for _, _, key in functions]
    tools: list[Tool] = [
        FunctionTool(name, description, schema)
        for (name, description, _), schema in zip(functions, parameters, strict=True)
    ]
    chat_tools = [
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
        for (name, description, _), schema in zip(functions, parameters, strict=True)
    ]
    ids = DIALECT.tokenize(DIALECT.opening(instructions, tools)) + ids_of(Message("user", hello))
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages.append({"role": "user", "content": hello})
    for said, heard in exchanges:
        ids += ids_of(*said[0])
        ids += ids_of(*heard[0])
        messages += [said[1], heard[1]]
    for asked in (False, True):
        if asked:
            ids += DIALECT.tokenize(DIALECT.turn_start())
        expected = ORACLE.apply_chat_template(
            messages, tools=chat_tools or None, add_generation_prompt=asked, return_dict=False
        )
        assert ids == expected


@given(st.lists(OTHERS.map(lambda both: both[0][0]), max_size=5), st.integers(0, 5))
def test_items_in_parts_are_the_same_tokens(items, place):
    assert ids_of(*items[:place]) + ids_of(*items[place:]) == ids_of(*items)


def test_a_sampled_turn_is_closed_as_a_written_one_is():
    said: list[Item] = [Message("assistant", "Two"), FunctionCall("c", "now", '{ "a":1}')]
    sampled = DIALECT.tokenize(DIALECT.sampled(said))
    start = DIALECT.tokenize(DIALECT.turn_start())
    assert DIALECT.stop_tokens == (END,)
    assert sampled[-1] == END
    assert start + sampled + DIALECT.tokenize(DIALECT.turn_end(END)) == ids_of(*said)
    cut = sampled[:-1]
    assert start + cut + DIALECT.tokenize(DIALECT.turn_end(cut[-1])) == ids_of(*said)


def test_a_turn_keeps_the_order_in_which_things_were_said():
    said = [FunctionCall("c", "now", "{}"), Message("assistant", "Then"), CustomToolCall("c", "patch", "x")]
    assert TOKENS.spell(DIALECT.items(said)) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\nThen\n'
        "<custom_call>patch\nx\n</custom_call><|im_end|>\n"
    )


def test_two_messages_in_a_row_are_two_turns():
    once = ids_of(Message("assistant", "a"))
    assert ids_of(Message("assistant", "a"), Message("assistant", "a")) == once + once


def test_a_first_developer_message_is_not_merged_with_the_instructions():
    opening = DIALECT.opening("Be short.", []) + DIALECT.items([Message("developer", "Now.")])
    assert (
        TOKENS.spell(opening)
        == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>system\nNow.<|im_end|>\n"
    )


# ---- tools


def test_tools_are_one_line_of_json_each():
    tools: list[Tool] = [
        FunctionTool("now"),
        CustomTool("patch", "Edits.", {"type": "grammar", "definition": "a\nb"}),
        NamespaceTool("fs", tools=[FunctionTool("list", "Lists.", PARAMETERS, strict=True)]),
    ]
    _, _, text = TOKENS.spell(DIALECT.opening(None, tools)).partition("<tools>\n")
    lines = text.partition("\n</tools>")[0].split("\n")
    assert [json.loads(line) for line in lines] == [
        {
            "type": "function",
            "function": {
                "name": "now",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        },
        {
            "type": "custom",
            "custom": {
                "name": "patch",
                "description": "Edits.",
                "format": {"type": "grammar", "definition": "a\nb"},
            },
        },
        {
            "type": "function",
            "function": {"name": "fs.list", "description": "Lists.", "parameters": PARAMETERS},
        },
    ]


def test_tool_choice_none_writes_no_tools():
    assert DIALECT.opening(None, [FunctionTool("now")], "none") == DIALECT.opening(None, []) == []
    forced = {"type": "function", "name": "now"}
    assert DIALECT.opening(None, [FunctionTool("now")], forced) == DIALECT.opening(
        None, [FunctionTool("now")]
    )


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([FunctionTool("now"), FunctionTool('a"b')], "tools[1].name"),
        ([FunctionTool("")], "tools[0].name"),
        ([FunctionTool("x" * 129)], "tools[0].name"),
        ([FunctionTool("now"), CustomTool("now")], "tools[1].name"),
        (
            [FunctionTool("fs.now"), NamespaceTool("fs", tools=[FunctionTool("now")])],
            "tools[1].tools[0].name",
        ),
        ([NamespaceTool("f s", tools=[FunctionTool("now")])], "tools[0].tools[0].name"),
    ],
)
def test_tools_that_cannot_be_written(tools, param):
    with pytest.raises(RenderingError) as caught:
        DIALECT.opening(None, tools)
    assert caught.value.param == param


def test_items_that_cannot_be_written():
    with pytest.raises(RenderingError, match="letters") as caught:
        DIALECT.items([Message("user", "a"), CustomToolCall("c", "two\nlines", "x")])
    assert caught.value.param == "input[1].name"
    with pytest.raises(RenderingError) as caught:
        DIALECT.sampled([FunctionCall("c", "now", "{}"), Message("user", "a")])
    assert caught.value.param == "input[1]"
    with pytest.raises(RenderingError) as caught:
        DIALECT.sampled([Message("assistant", "a"), Message("assistant", "b")])
    assert caught.value.param == "input[1]"


# ---- text stays text

POSITIONS = {
    "instructions": lambda text: DIALECT.opening(text, []),
    "tool description": lambda text: DIALECT.opening("a", [FunctionTool("now", text)]),
    "tool schema": lambda text: DIALECT.opening(
        None, [FunctionTool("now", "", {"type": "object", "properties": {text: {"title": text}}})]
    ),
    "grammar": lambda text: DIALECT.opening(None, [CustomTool("patch", text, {"definition": text})]),
    "user": lambda text: DIALECT.items([Message("user", text)]),
    "user, in parts": lambda text: DIALECT.items(
        [Message("user", [ContentPart("input_text", text[:3]), ContentPart("input_text", text[3:])])]
    ),
    "developer": lambda text: DIALECT.items([Message("developer", text)]),
    "assistant": lambda text: DIALECT.items([Message("assistant", text)]),
    "reasoning": lambda text: DIALECT.items([Reasoning(content=[ContentPart("reasoning_text", text)])]),
    "arguments": lambda text: DIALECT.items([FunctionCall("c", "now", json.dumps({"a": text}))]),
    "custom input": lambda text: DIALECT.items([CustomToolCall("c", "patch", text)]),
    "tool result": lambda text: DIALECT.items([FunctionCallOutput("c", text)]),
    "custom tool result": lambda text: DIALECT.items([CustomToolCallOutput("c", text)]),
    "sampled": lambda text: DIALECT.sampled([Message("assistant", text)]),
}


@pytest.mark.parametrize("write", POSITIONS.values(), ids=POSITIONS.keys())
def test_a_spelled_control_token_stays_text(write):
    template_only = control_tokens(DIALECT.tokenize(write("harmless")))
    for spelling in TOKENS.control:
        for text in (spelling, f"a{spelling}b", f"\n{spelling}\n", f" {spelling}{spelling} "):
            fragment = write(text)
            ids = DIALECT.tokenize(fragment)
            assert control_tokens(ids) == template_only
            assert TOKENS.decode(ids) == TOKENS.spell(fragment)
            assert spelling in TOKENS.decode([token for token in ids if token not in TOKENS.spelling])


@given(
    st.lists(st.sampled_from([*TOKENS.control, "<", "|", ">", "<|im_", "end|>", " ", "\n"]), max_size=8).map(
        "".join
    )
)
def test_text_made_of_control_tokens_stays_text(text):
    ids = TOKENS.encode([text])
    assert control_tokens(ids) == []
    assert TOKENS.decode(ids) == text


# ---- what cannot be loaded

TEMPLATE = (MODEL / "chat_template.jinja").read_text()
TOKENIZER = (MODEL / "tokenizer.json").read_text()


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def folder(path: Path, *, template: str = TEMPLATE, tokenizer: str = TOKENIZER, config: str = "{}") -> Path:
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "tokenizer_config.json").write_text(config)
    return path


def tokenizer_without(spelling: str) -> str:
    description = json.loads(TOKENIZER)
    description["added_tokens"] = [
        each for each in description["added_tokens"] if each["content"] != spelling
    ]
    return json.dumps(description)


def tokenizer_without_a_byte() -> str:
    description = json.loads(TOKENIZER)
    emoji_first_byte = "ð"
    del description["model"]["vocab"][emoji_first_byte]
    return json.dumps(description)


def tokenizer_that_eats_white_space() -> str:
    description = json.loads(TOKENIZER)
    for token in description["added_tokens"]:
        token["lstrip"] = True
    return json.dumps(description)


def tokenizer_that_takes_texts_whole() -> str:
    """Any text that is in its vocabulary is that one token, and control tokens are in it."""
    description = json.loads(TOKENIZER)
    description["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    assert description["model"]["ignore_merges"]
    assert description["model"]["vocab"]["<|im_end|>"] == END
    return json.dumps(description)


def test_a_control_token_in_the_plain_vocabulary_is_out_of_reach():
    tokens = Tokens(tokenizer_that_takes_texts_whole())
    for spelling in tokens.control:
        assert control_tokens(tokens.encode([spelling])) == []
        assert tokens.decode(tokens.encode([spelling])) == spelling


USER = '"<|im_start|>user\\n" ~ text'
TOOL = '~ text ~ "\\n</tool_response>'
UNSOUND_TEMPLATES = {
    "no template": ("{% if %}", "cannot be compiled"),
    "trims texts": (changed(TEMPLATE, USER, USER + " | trim"), "as it stands"),
    "drops blank lines": (
        changed(TEMPLATE, TOOL, '~ text.replace("\\n\\n", "\\n") ~ "\\n</tool_response>'),
        "as it stands",
    ),
    "forgets reasoning": (
        changed(TEMPLATE, "if message.reasoning_content", "if message.reasoning_content and loop.last"),
        "as it stands",
    ),
    "closes turns only when another follows": (
        changed(
            TEMPLATE,
            '{{- "<|im_end|>\\n" -}}\n    {%- else',
            '{{- "<|im_end|>\\n" if loop.last -}}\n    {%- else',
        ),
        "append-only|as it stands",
    ),
    "counts messages": (changed(TEMPLATE, USER, USER + " ~ messages | length"), "append-only"),
    "writes arguments anew": (
        changed(TEMPLATE, "(arguments if arguments is string else arguments | tojson)", "arguments | tojson"),
        "as it stands",
    ),
    "writes calls in another form": (
        changed(
            TEMPLATE,
            '{"name": \' ~ (function.name | tojson) ~ \', "arg',
            '{"tool": \' ~ (function.name | tojson) ~ \', "arg',
        ),
        "not understood",
    ),
    "has no tool messages": (changed(TEMPLATE, 'message.role == "tool"', "false"), "refuses"),
    "has no custom calls": (changed(TEMPLATE, "call.custom.input", '""'), "sentinel-body"),
    "has no tools": (changed(TEMPLATE, "{%- if tools -%}", "{%- if false -%}"), "sentinel-tool"),
    "reaches out of the sandbox": (changed(TEMPLATE, USER, USER + " ~ text.__class__.__mro__"), "refuses"),
    "knows the time": (changed(TEMPLATE, USER, USER + ' ~ strftime_now("%Y")'), "refuses"),
}


@pytest.mark.parametrize(("template", "reason"), UNSOUND_TEMPLATES.values(), ids=UNSOUND_TEMPLATES.keys())
def test_an_unsound_template_is_refused(tmp_path, template, reason):
    with pytest.raises(DialectError, match=reason):
        load_dialect(folder(tmp_path, template=template))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer": "no JSON"}, "tokenizer cannot be read"),
        ({"tokenizer": changed(TOKENIZER, '"ByteLevel"', '"Fuse"')}, "tokenizer|byte-level"),
        ({"tokenizer": tokenizer_without_a_byte()}, "loses"),
        ({"tokenizer": tokenizer_that_eats_white_space()}, "independently"),
        (
            {"tokenizer": tokenizer_without("<tool_call>")},
            "the start of a call is not marked by one control token",
        ),
        (
            {"tokenizer": tokenizer_without("<|im_end|>")},
            "the end of a turn is not marked by one control token",
        ),
        ({"config": "["}, "not JSON"),
        ({"config": "[]"}, "not a JSON object"),
    ],
)
def test_unusable_files_are_refused(tmp_path, files, reason):
    with pytest.raises(DialectError, match=reason):
        load_dialect(folder(tmp_path, **files))


def test_a_tokenizer_that_makes_control_tokens_of_text_is_refused():
    class Leaky(Tokens):
        def encode(self, fragment):
            return self.encode_as_family(self.spell(fragment))

    with pytest.raises(DialectError, match="makes control tokens"):
        prove(DIALECT, ChatTemplate(TEMPLATE, {}), Leaky(TOKENIZER))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DialectError, match=r"tokenizer\.json cannot be read"):
        load_dialect(tmp_path)
    folder(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(DialectError, match="no chat template"):
        load_dialect(tmp_path)


def test_a_template_in_the_configuration_and_another_stop_token(tmp_path):
    config = {"chat_template": TEMPLATE, "eos_token": {"content": "<|endoftext|>"}, "bos_token": None}
    folder(tmp_path, config=json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink()
    dialect = load_dialect(tmp_path)
    end_of_text = TOKENS.control["<|endoftext|>"]
    assert dialect.stop_tokens == (END, end_of_text)
    assert dialect.turn_end(end_of_text) == [END, "\n"]


def test_a_default_system_prompt_is_part_of_the_opening(tmp_path):
    template = (
        "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nHi<|im_end|>\n' -}}{%- endif -%}"
        + changed(TEMPLATE, "{%- if instructions or tools -%}", "{%- if opens_with_system or tools -%}")
    )
    dialect = load_dialect(folder(tmp_path, template=template))
    assert dialect.opening(None, []) == [START, "system\nHi", END, "\n"]
    assert dialect.opening("Ho", []) == [START, "system\n", "Ho", END, "\n"]


def test_a_template_is_rendered_as_transformers_renders_it():
    template = ChatTemplate(TEMPLATE, {})
    messages = [{"role": "user", "content": "<b>é</b>"}]
    tools = [
        {"type": "function", "function": {"name": "a", "description": "“<é>”", "parameters": PARAMETERS}}
    ]
    assert template.render(messages, tools) == ORACLE.apply_chat_template(
        messages, tools=tools, tokenize=False
    )
    loose = "{% for message in messages %}\n  {% if true %}\n a\n  {% endif %}\n  {% break %}\n{% endfor %}\n"
    assert ChatTemplate(loose, {}).render(messages) == ORACLE.apply_chat_template(
        messages, chat_template=loose, tokenize=False
    )
