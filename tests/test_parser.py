"""The turn parser: what it reads out of sampled tokens, however they are cut, and whatever they are."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from protocol.dialects.base import (
    CallDelta,
    CallEnded,
    CallStarted,
    Malformed,
    Parsed,
    ReasoningDelta,
    TextDelta,
)
from protocol.dialects.load import load_dialect
from protocol.dialects.scanners import ObjectScanner, is_json_object
from protocol.dialects.tokens import Detokenizer, Tokens
from protocol.wire import (
    ContentPart,
    CustomTool,
    CustomToolCall,
    FunctionCall,
    FunctionTool,
    Item,
    Message,
    NamespaceTool,
    Reasoning,
    item_text,
)

MODEL = Path(__file__).parent.parent / "engine" / "embedded"
DIALECT = load_dialect(MODEL)
TOKENS = Tokens((MODEL / "tokenizer.json").read_text())
TOOLS = [
    FunctionTool("read_file"),
    CustomTool("patch"),
    NamespaceTool("fs", tools=[FunctionTool("list"), CustomTool("script")]),
]
READ = CallStarted("read_file")
PATCH = CallStarted("patch", custom=True)
BROKEN = Malformed("")


def ids_of(sampled: str) -> list[int]:
    """Token ids of a turn in which marks are spelled out."""
    return TOKENS.encode(TOKENS.split(sampled))


def parse(groups: Iterable[Sequence[int]], tools: Sequence[object] = TOOLS) -> list[Parsed]:
    """Everything a parser gives, neighbouring deltas joined."""
    parser = DIALECT.parser(tools)  # type: ignore[arg-type]
    parsed = [each for group in groups for each in parser.feed(group)]
    return joined(parsed + parser.finish())


def joined(parsed: Iterable[Parsed]) -> list[Parsed]:
    out: list[Parsed] = []
    for each in parsed:
        if isinstance(each, TextDelta | ReasoningDelta | CallDelta):
            assert each.text, "an empty delta says nothing"
            if out and type(out[-1]) is type(each):
                out[-1] = type(each)(out[-1].text + each.text)  # type: ignore[union-attr]
                continue
        out.append(each)
    return out


def one_by_one(ids: Sequence[int]) -> list[list[int]]:
    return [[token] for token in ids]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def read(arguments: str, *, complete: bool = True) -> list[Parsed]:
    return [READ, CallDelta(arguments), CallEnded(complete)]


TURNS: dict[str, tuple[str, list[Parsed]]] = {
    "text": ("Hello.<|im_end|>", [TextDelta("Hello.")]),
    "nothing": ("<|im_end|>", []),
    "only white space": (" \n\n<|im_end|>", []),
    "text keeps its own white space": ("\n a \n\n<|im_end|>", [TextDelta("\n a \n\n")]),
    "after the stop token nothing counts": (f"a<|im_end|>\n{call('read_file', '{}')}", [TextDelta("a")]),
    "call": (call("read_file", '{"path": "a.txt"}') + "<|im_end|>", read('{"path": "a.txt"}')),
    "arguments stay as sampled": (
        call("read_file", '{ "a":"}\\"{", "b" : [{},\n[1.50]] }'),
        read('{ "a":"}\\"{", "b" : [{},\n[1.50]] }'),
    ),
    "call in loose white space": (
        '<tool_call> {\n"name" :"read_file" ,  "arguments":{} } </tool_call>',
        read("{}"),
    ),
    "text, call, call, text": (
        f"Look:\n{call('read_file', '{}')}\n{call('fs.list', '{}')}\nSo.\n<|im_end|>",
        [
            TextDelta("Look:"),
            *read("{}"),
            CallStarted("list", "fs"),
            CallDelta("{}"),
            CallEnded(True),
            TextDelta("So.\n"),
        ],
    ),
    "marks without newlines": (
        f"a{call('read_file', '{}')}b<think>c</think>d",
        [TextDelta("a"), *read("{}"), TextDelta("b"), ReasoningDelta("c"), TextDelta("d")],
    ),
    "only the template's newline is taken": (
        f"a\n\n\n{call('read_file', '{}')}\n\n\nb",
        [TextDelta("a\n\n"), *read("{}"), TextDelta("\n\nb")],
    ),
    "reasoning": (
        "<think>\nFirst,\n\nread.\n</think>\nDone<|im_end|>",
        [ReasoningDelta("First,\n\nread."), TextDelta("Done")],
    ),
    "empty reasoning": ("<think>\n\n</think>\nDone", [TextDelta("Done")]),
    "reasoning between texts": (
        "a\n<think>\nb\n</think>\nc",
        [TextDelta("a"), ReasoningDelta("b"), TextDelta("c")],
    ),
    "reasoning that never ends": ("<think>\nhm\n", [ReasoningDelta("hm\n")]),
    "custom call": (
        "<custom_call>patch\n*** a\n\n b\n\n</custom_call><|im_end|>",
        [PATCH, CallDelta("*** a\n\n b\n"), CallEnded(True)],
    ),
    "custom call of a namespace, empty input": (
        "<custom_call>fs.script\n\n</custom_call>",
        [CallStarted("script", "fs", custom=True), CallEnded(True)],
    ),
    "custom input holds any mark but its own": (
        "<custom_call>patch\n</tool_call><think>\n</custom_call>",
        [PATCH, BROKEN, CallDelta("</tool_call>"), BROKEN, CallDelta("<think>"), CallEnded(True)],
    ),
    "arguments first": (
        '<tool_call>\n{"arguments": { "a": 1}, "name": "read_file"}\n</tool_call>',
        read('{ "a": 1}'),
    ),
    "other members": (
        '<tool_call>{"id": 7, "name": "read_file", "arguments": {}}</tool_call>',
        read("{}"),
    ),
    # ---- what is not quite a call
    "cut in the name": (
        '<tool_call>\n{"name": "read',
        [BROKEN, TextDelta('<tool_call>\n{"name": "read')],
    ),
    "cut in the arguments": (
        '<tool_call>\n{"name": "read_file", "arguments": {"a": "',
        read('{"a": "', complete=False),
    ),
    "cut after the arguments": (
        '<tool_call>\n{"name": "read_file", "arguments": {}}',
        read("{}", complete=False),
    ),
    "stopped after the arguments": (
        '<tool_call>\n{"name": "read_file", "arguments": {}}<|im_end|>',
        read("{}"),
    ),
    "stopped in the arguments": (
        '<tool_call>\n{"name": "read_file", "arguments": {"a": "<|im_end|>',
        read('{"a": "', complete=False),
    ),
    "closed in the arguments": (
        '<tool_call>\n{"name": "read_file", "arguments": {"a": "x</tool_call>\ny',
        [*read('{"a": "x', complete=False), TextDelta("y")],
    ),
    "arguments are not JSON": (
        call("read_file", '{"a": nil]'),
        read('{"a": nil]', complete=False),
    ),
    "arguments with half a surrogate pair": (
        call("read_file", '{"a": "\\ud800"}'),
        read('{"a": "\\ud800"}', complete=False),
    ),
    "cut in a custom call": (
        "<custom_call>patch\nx\n",
        [PATCH, CallDelta("x\n"), CallEnded(False)],
    ),
    "cut in a custom call's name": (
        "<custom_call>pat",
        [BROKEN, TextDelta("<custom_call>pat")],
    ),
    "unknown tool": (
        f"a\n{call('write', '{}')}\nb",
        [TextDelta("a"), BROKEN, TextDelta(f"\n{call('write', '{}')}\nb")],
    ),
    "unknown custom tool": (
        "<custom_call>read_file\nx\n</custom_call>",
        [BROKEN, TextDelta("<custom_call>read_file\nx\n</custom_call>")],
    ),
    "a custom tool called as a function": (
        call("patch", "{}"),
        [BROKEN, TextDelta(call("patch", "{}"))],
    ),
    "the bare name of a tool in a namespace": (
        call("list", "{}"),
        [BROKEN, TextDelta(call("list", "{}"))],
    ),
    "arguments are not an object": (
        call("read_file", '"{}"'),
        [BROKEN, TextDelta(call("read_file", '"{}"'))],
    ),
    "no JSON at all": (
        "<tool_call>\nread_file(a)\n</tool_call>\nb",
        [BROKEN, TextDelta("<tool_call>\nread_file(a)\n</tool_call>\nb")],
    ),
    "an empty call": ("<tool_call></tool_call>", [BROKEN, TextDelta("<tool_call></tool_call>")]),
    "a very long name": (call("x" * 500, "{}"), [BROKEN, TextDelta(call("x" * 500, "{}"))]),
    "two calls in one mark": (
        '<tool_call>{"name": "read_file", "arguments": {}} {"name": 1}</tool_call>',
        [*read("{}"), BROKEN, TextDelta('{"name": 1}</tool_call>')],
    ),
    "a call inside the head of a call": (
        f"<tool_call>\n{call('read_file', '{}')}",
        [BROKEN, TextDelta("<tool_call>"), *read("{}")],
    ),
    "a call inside arguments": (
        f'<tool_call>{{"name": "read_file", "arguments": {{"a": {call("read_file", "{}")}',
        [*read('{"a": ', complete=False), *read("{}")],
    ),
    "a call right after an unclosed one": (
        f'<tool_call>{{"name": "read_file", "arguments": {{}}}}\n{call("read_file", "{}")}',
        [*read("{}"), *read("{}")],
    ),
    "a mark inside a JSON string": (
        call("read_file", '{"a": "<tool_call><|im_start|>"}'),
        [
            READ,
            CallDelta('{"a": "'),
            BROKEN,
            CallDelta("<tool_call>"),
            BROKEN,
            CallDelta('<|im_start|>"}'),
            CallEnded(True),
        ],
    ),
    "a call inside reasoning": (
        "<think>\n<tool_call>x</tool_call>\n</think>\nb",
        [
            BROKEN,
            ReasoningDelta("<tool_call>x"),
            BROKEN,
            ReasoningDelta("</tool_call>"),
            TextDelta("b"),
        ],
    ),
    "stray marks": (
        "a</tool_call></think>b<|reserved_3|>\n",
        [
            TextDelta("a"),
            BROKEN,
            TextDelta("</tool_call>"),
            BROKEN,
            TextDelta("</think>b"),
            BROKEN,
            TextDelta("<|reserved_3|>\n"),
        ],
    ),
    "a stray mark after a call": (
        f"{call('read_file', '{}')}</tool_call>",
        [*read("{}"), BROKEN, TextDelta("</tool_call>")],
    ),
    "cut in a call that has too much white space to be streamed": (
        f'<tool_call>{" " * 300}{{"name": "read_file", "arguments": {{',
        [BROKEN, TextDelta(f'<tool_call>{" " * 300}{{"name": "read_file", "arguments": {{')],
    ),
    "another turn's start": (
        "a<|im_start|>user\nb",
        [TextDelta("a"), BROKEN, TextDelta("<|im_start|>user\nb")],
    ),
}


@pytest.mark.parametrize("cut", [lambda ids: [ids], one_by_one], ids=["whole", "one by one"])
@pytest.mark.parametrize(("sampled", "expected"), TURNS.values(), ids=TURNS.keys())
def test_turns(sampled, expected, cut):
    parsed = parse(cut(ids_of(sampled)))
    assert [BROKEN if isinstance(each, Malformed) else each for each in parsed] == expected


def test_arguments_are_given_while_they_are_sampled():
    parser = DIALECT.parser(TOOLS)
    assert parser.feed(ids_of('<tool_call>\n{"name": "read_file", "arguments"')) == []
    assert parser.feed(ids_of(': {"path": "oak')) == [READ, CallDelta('{"path": "oak')]
    assert parser.feed(ids_of("/elm")) == [CallDelta("/elm")]
    assert parser.feed(ids_of('"}}')) == [CallDelta('"}')]
    assert parser.feed(ids_of("\n")) == []
    assert parser.feed(ids_of("</tool_call>")) == [CallEnded(True)]


@pytest.mark.parametrize("sampled", ["<custom_call>" + "x" * 200, "<tool_call>x", call("unknown", "{")])
def test_what_cannot_become_a_call_is_text_at_once(sampled):
    assert any(isinstance(each, TextDelta) for each in DIALECT.parser(TOOLS).feed(ids_of(sampled)))


def test_half_a_character_waits():
    first, *rest = ids_of("🙂")
    parser = DIALECT.parser(TOOLS)
    assert parser.feed([first]) == []
    assert parser.feed(rest) == [TextDelta("🙂")]
    parser.feed([first])
    assert parser.feed(ids_of("<think>")) == [TextDelta("\ufffd")]
    parser.feed([first])
    assert parser.finish() == [ReasoningDelta("\ufffd")]


def test_deep_arguments_do_not_exhaust_the_stack():
    arguments = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"
    assert parse([ids_of(call("read_file", arguments))]) == read(arguments, complete=False)


# ---- any tokens

WORDS = (
    *TOKENS.control,
    *('{"name": "read_file", "arguments": ', '{"arguments": {}, "name": "read_file"}', "patch", "\n", " "),
    *("{", "}", "[", "]", '"', "\\", "{}", ": ", "a", "é", "🙂", '{"a": "', "read_file", '"name"'),
)
PIECES = st.sampled_from([ids_of(word) for word in WORDS])
GRAMMATICAL = st.lists(PIECES, max_size=30).map(lambda pieces: [token for piece in pieces for token in piece])
RANDOM = st.lists(st.integers(-2, 1030), max_size=60)  # a few ids beyond either end of the vocabulary


@given(GRAMMATICAL | RANDOM, st.data())
def test_any_cut_reads_the_same(ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    groups = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert parse(groups) == parse([ids]) == parse(one_by_one(ids))


@given(GRAMMATICAL | RANDOM)
def test_calls_are_well_formed(ids):
    """A start, deltas, an end; complete arguments are a JSON object."""
    arguments: str | None = None
    for each in parse([ids]):
        match each:
            case CallStarted(custom=custom):
                assert arguments is None
                arguments = ""
            case CallDelta(text):
                assert arguments is not None
                arguments += text
            case CallEnded(complete):
                assert arguments is not None
                assert custom or not complete or isinstance(json.loads(arguments), dict)
                arguments = None
            case TextDelta() | ReasoningDelta():
                assert arguments is None
    assert arguments is None


@given(GRAMMATICAL | RANDOM)
def test_without_tools_and_reasoning_every_token_is_text(ids):
    """Nothing is lost: what is not a call comes out as it was sampled."""
    kept_out = {TOKENS.control["<think>"], *DIALECT.stop_tokens}
    ids = [token for token in ids if token not in kept_out]
    text = "".join(each.text for each in parse([ids], tools=[]) if isinstance(each, TextDelta))
    sampled = TOKENS.decode(ids)
    # Half a character before a control token and the rest after it are no character; whole decoding agrees.
    assert text == ("" if sampled.isspace() else sampled)


# ---- there and back

TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from('\n\n \t{}"\\'), max_size=30) | st.sampled_from(
    ["<tool_call>", "a</tool_call>\n", "\n<think>\n", "<|im_end|>", "\n\nx\n\n"]
)
SPOKEN = TEXT.filter(lambda text: text.strip() != "")
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SPELLINGS = st.sampled_from(
    [
        lambda value: json.dumps(value),
        lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        lambda value: json.dumps(value, indent=3, sort_keys=True),
    ]
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3)
ARGUMENTS = st.builds(lambda spell, value: spell(value), SPELLINGS, OBJECTS)
SAID = st.one_of(
    st.builds(lambda text: Message("assistant", text), SPOKEN),
    st.builds(lambda text: Reasoning(content=[ContentPart("reasoning_text", text)]), SPOKEN),
    st.builds(lambda arguments: FunctionCall("", "read_file", arguments), ARGUMENTS),
    st.builds(lambda arguments: FunctionCall("", "list", arguments, namespace="fs"), ARGUMENTS),
    st.builds(lambda text: CustomToolCall("", "patch", text), TEXT),
)


def without_twin_texts(items: list[Item]) -> list[Item]:
    """Two messages, or two reasoning items, in a row cannot be one turn."""
    kept: list[Item] = []
    for item in items:
        if not (isinstance(item, Message | Reasoning) and kept and type(kept[-1]) is type(item)):
            kept.append(item)
    return kept


def described(items: Iterable[Item]) -> list[tuple[object, ...]]:
    return [
        (item.namespace, item.name, item.arguments)
        if isinstance(item, FunctionCall)
        else ("custom", item.namespace, item.name, item.input)
        if isinstance(item, CustomToolCall)
        else (type(item).__name__, item_text(item))  # type: ignore[arg-type]
        for item in items
    ]


def items_of(parsed: Iterable[Parsed]) -> list[Item]:
    items: list[Item] = []
    for each in parsed:
        match each:
            case TextDelta(text):
                items.append(Message("assistant", text))
            case ReasoningDelta(text):
                items.append(Reasoning(content=[ContentPart("reasoning_text", text)]))
            case CallStarted(name, namespace, custom):
                kind = CustomToolCall if custom else FunctionCall
                items.append(kind("", name, "", namespace=namespace))
            case CallDelta(text):
                if isinstance(items[-1], FunctionCall):
                    items[-1].arguments = text
                else:
                    items[-1].input = text
            case CallEnded(complete):
                assert complete
    return items


@given(st.lists(SAID, max_size=5).map(without_twin_texts), st.booleans())
def test_what_is_sampled_for_items_is_read_as_these_items(items, by_token):
    ids = DIALECT.tokenize(DIALECT.sampled(items))
    assert ids[-1] in DIALECT.stop_tokens
    parsed = parse(one_by_one(ids) if by_token else [ids])
    assert described(items_of(parsed)) == described(items)


# ---- the scanners


@given(ARGUMENTS, st.text(max_size=5), st.data())
def test_the_scanner_finds_the_end_of_an_object(text, rest, data):
    scanner = ObjectScanner()
    whole = text + rest
    cut = data.draw(st.integers(0, len(text)))
    first = scanner.feed(whole[:cut])
    end = first if first is not None else cut + (scanner.feed(whole[cut:]) or 0)
    assert end == len(text)


@given(ARGUMENTS, st.integers(0, 60), st.sampled_from('{}[]",:\\x1 '))
def test_an_object_is_what_json_says_it_is(text, place, character):
    damaged = text[:place] + character + text[place + 1 :]
    for each in (text, damaged, text[:place]):
        try:
            value = json.loads(each, parse_constant=lambda _: 1 / 0)
            expected = isinstance(value, dict)
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, ZeroDivisionError):
            expected = False
        assert is_json_object(each) == expected


@given(RANDOM)
def test_detokenizing_by_pieces_is_decoding_at_once(ids):
    plain = [token for token in ids if token in TOKENS.bytes_of]
    family = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    detokenizer = Detokenizer(TOKENS)
    pieces = [detokenizer.feed([token]) for token in plain]
    assert "".join(pieces) + detokenizer.flush() == family.decode(plain) == TOKENS.decode(plain)
