"""The embedded model as shipped: it calls tools, uses their results, and transformers reads it alike."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import engine
from scripts.embedded.kinds import draw_task_of
from scripts.embedded.sample import sample_task
from scripts.embedded.score import do_task
from scripts.embedded.tiny_llama import Shape, TinyLlama, load
from scripts.embedded.vocabulary import END_TOKEN, PAD_TOKEN, build_tokenizer, token_id
from scripts.embedded.world import Swapped

MODEL_FOLDER = Path(engine.__file__).parent / "embedded"
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def model() -> TinyLlama:
    return load(MODEL_FOLDER)


@pytest.mark.parametrize(("fewest_calls", "most_calls"), [(1, 1), (2, 4), (5, 8)])
def test_held_out_tasks_are_done_right(model, fewest_calls, most_calls):
    rng = random.Random(11)
    tasks = [draw_task_of(rng, "held_out", fewest_calls, most_calls) for _ in range(15)]
    assert sum(do_task(model, TOKENIZER, task).right for task in tasks) >= 12


def test_the_answer_follows_a_swapped_result(model):
    rng, outcomes = random.Random(12), []
    while len(outcomes) < 6:
        task = draw_task_of(rng, "held_out", 2, 8)
        make_workspace = partial(Swapped, task.files, rng.randrange(task.calls), rng.randint(1, 999))
        if task.conversation(make_workspace())[1] != task.conversation()[1]:
            outcomes.append(do_task(model, TOKENIZER, task, make_workspace))
    assert sum(outcome.right for outcome in outcomes) >= 5


def test_the_sample_task_is_done_right(model):
    outcome = do_task(model, TOKENIZER, sample_task(seed=0))
    assert outcome.right, outcome.transcript


def test_transformers_reads_the_same_logits(model):
    tokens = TOKENIZER.encode("Read oak/elm.txt and tell me 42 things.", add_special_tokens=False).ids
    published = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER)
    with torch.no_grad():
        wanted = published(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(model.read(tokens, None)[0], wanted, atol=1e-4, rtol=1e-4)


def test_the_settings_are_those_of_the_recipe():
    end, pad = token_id(TOKENIZER, END_TOKEN), token_id(TOKENIZER, PAD_TOKEN)
    assert json.loads((MODEL_FOLDER / "config.json").read_text()) == Shape().config(end, pad)
    assert json.loads((MODEL_FOLDER / "generation_config.json").read_text())["eos_token_id"] == end
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 5_000_000
