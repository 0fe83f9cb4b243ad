"""The embedded model's recipe: what a batch asks of the model, and that the decoder it trains is one."""

import random
from dataclasses import replace

import pytest
import torch

from scripts.embedded.copying import IGNORED
from scripts.embedded.tiny_llama import Shape, TinyLlama, load
from scripts.embedded.train import STAGES, conversation_batches, copying_batches, learning_rate, save
from scripts.embedded.vocabulary import END_TOKEN, SPECIAL_TOKENS, build_tokenizer, token_id

TOKENIZER = build_tokenizer()
SMALL = replace(Shape(), hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture
def model() -> TinyLlama:
    torch.manual_seed(0)
    return TinyLlama(SMALL)


@pytest.mark.parametrize("path_rows", [0.0, 1.0])
def test_copying_asks_only_for_what_stood_there_before(path_rows):
    batch = next(copying_batches(random.Random(5), TOKENIZER, path_rows))
    asked = 0
    for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        for i, target in enumerate(targets):
            if target != IGNORED:
                seen = [row[j : j + 3] for j in range(i - 2)]
                assert [row[i - 1], row[i], target] in seen
                asked += 1
    assert asked > batch.tokens.numel() / 4
    assert int(batch.tokens.min()) >= len(SPECIAL_TOKENS)


def test_a_conversation_batch_asks_for_assistant_turns_up_to_their_end():
    stage = replace(STAGES[-1], horizon=10)
    batch = next(conversation_batches(random.Random(5), TOKENIZER, stage))
    end = token_id(TOKENIZER, END_TOKEN)
    for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        starts = [i for i, target in enumerate(targets) if target != IGNORED and targets[i - 1] == IGNORED]
        for start in starts:
            assert TOKENIZER.decode(row[start - 2 : start + 1], skip_special_tokens=False).endswith(
                "<|im_start|>assistant\n"
            )
        ends = [
            target
            for i, target in enumerate(targets)
            if target != IGNORED and targets[i + 1 : i + 2] in ([], [IGNORED])
        ]
        assert set(ends) == {end}
        assert all(target in (IGNORED, row[i + 1]) for i, target in enumerate(targets[:-1]))


def test_batches_are_deterministic():
    def first_batches() -> list[torch.Tensor]:
        batches = conversation_batches(random.Random(3), TOKENIZER, STAGES[-1])
        return [next(batches).tokens for _ in range(3)]

    assert all(map(torch.equal, first_batches(), first_batches()))


def test_rows_behind_a_shared_prefix_are_read_as_if_each_had_its_own(model):
    prefix, rows = torch.randint(27, 1024, (9,)), torch.randint(27, 1024, (3, 14))
    together = model.logits(model(prefix, rows))
    for row, logits in zip(rows, together, strict=True):
        alone, _ = model.read([*prefix.tolist(), *row.tolist()], None)
        torch.testing.assert_close(logits, alone[9:], atol=1e-5, rtol=1e-5)


def test_reading_in_pieces_is_reading_at_once(model):
    tokens = torch.randint(27, 1024, (20,)).tolist()
    at_once, _ = model.read(tokens, None)
    first, cache = model.read(tokens[:7], None)
    second, cache = model.read(tokens[7:8], cache)
    third, _ = model.read(tokens[8:], cache)
    torch.testing.assert_close(torch.cat([first, second, third]), at_once, atol=1e-5, rtol=1e-5)


def test_saved_weights_come_back(tmp_path):
    torch.manual_seed(1)
    model = TinyLlama(Shape())
    save(model, tmp_path)
    again = load(tmp_path).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_learning_rate_rises_and_falls():
    stage = replace(STAGES[-1], steps=1000, horizon=1000, learning_rate=1.0)
    rates = [learning_rate(stage, step) for step in range(1000)]
    assert rates[0] < 0.02
    assert 0.95 < max(rates) <= 1.0
    assert rates[-1] < 0.02
    assert learning_rate(replace(stage, horizon=0), 999) == 1.0
