"""The embedded model's world: its tasks, its judge, its text and its tokenizer."""

import random
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import engine
from scripts.embedded.kinds import LONG_KINDS, SHORT_KINDS, Kind, draw_conversation, draw_task, draw_task_of
from scripts.embedded.maker import (
    HELD_OUT_SIZES,
    HELD_OUT_WORDS,
    OTHER_WORDS,
    TRAINED_WORDS,
    Maker,
    Mix,
    is_held_out_number,
)
from scripts.embedded.sample import make_sample_workspace, sample_files, sample_task
from scripts.embedded.short_tasks import read_together
from scripts.embedded.transcript import (
    GENERATION_PROMPT,
    message_text,
    random_system_text,
    system_text,
    training_row,
)
from scripts.embedded.vocabulary import (
    ENGLISH_WORDS,
    FOLDER_AND_FILE_WORDS,
    SPECIAL_TOKENS,
    TOOL_WORDS,
    VOCABULARY_SIZE,
    build_tokenizer,
)
from scripts.embedded.world import Answer, Message, Swapped, Task, states
from scripts.tools import TOOLS, Workspace

MODEL_FOLDER = Path(engine.__file__).parent / "embedded"
KINDS = [*SHORT_KINDS, *LONG_KINDS]


@cache
def shared_tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture
def tokenizer() -> Tokenizer:
    return shared_tokenizer()


def tasks_of(kind: Kind, split: str = "train", count: int = 40) -> list[Task]:
    return [kind(Maker(random.Random(seed), split, Mix())) for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_right_conversation_passes_the_check(kind, split):
    for task in tasks_of(kind, split):
        workspace = task.workspace()
        messages, answer = task.conversation(workspace)
        assert task.check(messages[-1].text, workspace), (task, messages[-1].text)
        assert answer.text == messages[-1].text


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_answer_fails_the_check(kind):
    for task in tasks_of(kind):
        workspace = task.workspace()
        right = task.conversation(workspace)[1]
        assert not task.check("", workspace)
        assert not task.check(right.text + " And 123456.", workspace)
        for fact in right.facts:
            assert not task.check(right.text.replace(fact, "0", 1), workspace) or fact == "0"


def test_an_answer_without_the_written_file_fails_the_check():
    written = [
        task for kind in KINDS for task in tasks_of(kind) if "write_file" in str(task.conversation()[0])
    ]
    assert len(written) > 50
    for task in written:
        assert not task.check(task.conversation()[1].text, task.workspace())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The total is 42.", True),
        ("42", True),
        ("The total is 42, from 3 files.", True),
        ("The total is 142.", False),
        ("The total is 42.5.", False),
        ("The total is -42.", False),
        ("The total is 42 or 43.", False),
        ("The total is forty-two.", False),
    ],
)
def test_a_number_has_to_be_there_and_no_other(text, right):
    assert states(text, Answer("The total is 42.", ("42",)), "Add 3 files.") is right


def test_the_right_answer_follows_a_swapped_result():
    followed = 0
    for seed in range(100):
        task = draw_task_of(random.Random(seed), "held_out", 1, 21)
        honest = task.conversation()[0]
        workspace = Swapped(task.files, seed % task.calls, 6789)
        messages, answer = task.conversation(workspace)
        assert workspace.is_swapped == (messages != honest)
        if workspace.is_swapped and answer.text != honest[-1].text:
            assert not task.check(honest[-1].text, workspace, Swapped(task.files, seed % task.calls, 6789))
            assert task.check(answer.text, workspace, Swapped(task.files, seed % task.calls, 6789))
            assert not task.check(answer.text, workspace)
            followed += 1
    assert followed > 40


def words_in(text: str) -> set[str]:
    return set(re.split(r"[^A-Za-z]+", text))


@pytest.mark.parametrize("varied", [False, True])
def test_held_out_names_numbers_and_sizes_are_never_trained(varied):
    assert len(HELD_OUT_WORDS) >= 40
    assert not set(HELD_OUT_WORDS) & set(TRAINED_WORDS)
    for seed in range(300):
        task = draw_task(random.Random(seed), "train", Mix(varied=varied))
        assert not words_in(" ".join(task.files)) & set(HELD_OUT_WORDS), task
        if not varied:
            assert not words_in(task.request) & set(HELD_OUT_WORDS), task
        numbers = [int(text) for text in task.files.values() if text.isdigit() and text != "1"]
        assert not any(map(is_held_out_number, numbers))
        if task.kind == "walk":
            assert len(task.files) not in HELD_OUT_SIZES


def test_varied_names_are_of_many_kinds():
    rng = random.Random(0)
    names = [Maker(rng, "train", Mix(varied=True)).name() for _ in range(400)]
    assert 100 < sum(name in OTHER_WORDS for name in names) < 200
    assert len(set(names)) > 250


def test_one_number_in_eight_is_held_out():
    for digits in (2, 3, 4):
        numbers = range(10 ** (digits - 1), 10**digits)
        assert 0.1 < sum(map(is_held_out_number, numbers)) / len(numbers) < 0.15


def test_tasks_of_every_length_can_be_drawn():
    rng = random.Random(0)
    for fewest, most in ((1, 1), (2, 4), (5, 8), (9, 14), (15, 21)):
        assert fewest <= draw_task_of(rng, "held_out", fewest, most).calls <= most
    turns = [
        len(message.calls) for seed in range(100) for message in draw_conversation(random.Random(seed), Mix())
    ]
    assert max(turns) >= 3


def test_drawing_is_deterministic():
    def drawn() -> list[list[Message]]:
        rng = random.Random(7)
        return [draw_conversation(rng, Mix()) for _ in range(50)]

    assert drawn() == drawn()


def test_the_sample_task_is_long_and_has_a_parallel_turn(tmp_path):
    make_sample_workspace(tmp_path / "sample", seed=3)
    task = sample_task(seed=3)
    messages, answer = task.conversation(Workspace(tmp_path / "sample"))
    assert task.calls >= 8
    assert max(len(message.calls) for message in messages) == 2
    total = sum(int(text) for path, text in sample_files(3).items() if path.startswith("garden/"))
    assert str(total) in answer.text
    assert (tmp_path / "sample" / "harbor" / "total.txt").read_text() == str(total)


def test_the_model_folder_has_this_tokenizer():
    assert (MODEL_FOLDER / "tokenizer.json").read_text() == build_tokenizer().to_str(pretty=True)


def test_known_words_and_digits_are_one_token_wherever_they_stand(tokenizer):
    for word in (*FOLDER_AND_FILE_WORDS, *TOOL_WORDS, *ENGLISH_WORDS, *"0123456789", *SPECIAL_TOKENS):
        token = tokenizer.token_to_id(word)
        assert token is not None
        for text in (f"{word}", f" {word}", f"\n{word}\n", f"({word})", f"/{word}/"):
            assert tokenizer.encode(text, add_special_tokens=False).ids.count(token) == 1, text
    for word in FOLDER_AND_FILE_WORDS:
        path = tokenizer.encode(f'{{"path": "{word}/{word}.txt"}}', add_special_tokens=False).tokens
        assert path.count(word) == 2


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.text(),
            st.sampled_from(['{"', '": ', '"}}', "oak", ".txt", "7", " ", "\n", "é", "\r\n", "\u3000"]),
        )
    ).map("".join)
)
def test_every_text_round_trips(text):
    tokenizer = shared_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < VOCABULARY_SIZE for token in ids)


def as_chat(messages: list[Message], arguments_as_text: bool) -> list[dict]:
    chat = []
    for message in messages:
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": arguments}}
            for call in message.calls
            for arguments in [call.arguments_json if arguments_as_text else call.arguments]
        ]
        chat.append(
            {"role": message.role, "content": message.text} | ({"tool_calls": calls} if calls else {})
        )
    return chat


@pytest.fixture(scope="module")
def published() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.mark.parametrize("arguments_as_text", [True, False])
@pytest.mark.parametrize(
    ("instructions", "tools"), [("", TOOLS), ("Be short.", TOOLS), ("Be short.", ()), ("", ())]
)
def test_training_text_is_the_chat_templates_text(
    published, tokenizer, arguments_as_text, instructions, tools
):
    for seed in range(20):
        messages = draw_conversation(random.Random(seed), Mix(3, 3, 0.3))
        system = [{"role": "developer", "content": instructions}] if instructions else []
        rendered = published.apply_chat_template(
            system + as_chat(messages, arguments_as_text),
            tools=list(tools),
            tokenize=False,
            add_generation_prompt=True,
        )
        text = "".join(map(message_text, messages))
        assert rendered == system_text(instructions, tools) + text + GENERATION_PROMPT
        assert published(rendered)["input_ids"] == tokenizer.encode(rendered).ids
        assert training_row(tokenizer, messages)[0] == tokenizer.encode(text).ids


def test_the_chat_template_writes_all_other_kinds_of_message(published):
    def render(*messages: dict) -> str:
        return published.apply_chat_template(list(messages), tokenize=False)

    late = {
        "role": "developer",
        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}],
    }
    user = {"role": "user", "content": "Hi"}
    assert render(user, late) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nBe short.<|im_end|>\n"
    thought = {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}
    assert render(thought) == "<|im_start|>assistant\n<think>\nHm.\n</think>\nYes.<|im_end|>\n"
    custom = {"type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    call = {"type": "function", "function": {"name": "count", "arguments": "{}"}}
    assert render({"role": "assistant", "content": "So:", "tool_calls": [custom, call]}) == (
        "<|im_start|>assistant\nSo:\n<custom_call>patch\na\nb\n</custom_call>\n"
        '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call><|im_end|>\n'
    )
    with pytest.raises(Exception, match="role ghost is not known"):
        render({"role": "ghost", "content": ""})


def test_the_model_learns_assistant_turns_and_nothing_else(tokenizer):
    messages = tasks_of(read_together)[0].conversation()[0]
    ids, produced = training_row(tokenizer, messages)
    learned = tokenizer.decode(
        [i for i, own in zip(ids, produced, strict=True) if own], skip_special_tokens=False
    )
    turns = [message_text(message) for message in messages if message.role == "assistant"]
    assert learned == "".join(turn.removeprefix(GENERATION_PROMPT).removesuffix("\n") for turn in turns)


def test_the_tools_cost_few_tokens(tokenizer):
    assert len(tokenizer.encode(system_text("", TOOLS)).ids) <= 250


def test_a_training_prompt_keeps_the_tools_that_are_used():
    for seed in range(200):
        text = random_system_text(random.Random(seed), {"calculate", "count"})
        assert '"name": "calculate"' in text
        assert '"name": "count"' in text
