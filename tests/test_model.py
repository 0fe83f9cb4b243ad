"""Our decoder against transformers' on random checkpoints, and what is said of those that it cannot run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import reference_logits, write_checkpoint

from engine.attention import Part
from engine.checkpoint import random_checkpoint, read_config, read_weights
from engine.model import Decoder
from engine.outline import ModelError, resolve

CPU = torch.device("cpu")
TOLERANCE = 2e-4  # of logits that spread over about 10: a hundred roundings of float32

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key head": {"num_key_value_heads": 1},
    "a key head each": {"num_key_value_heads": 4},
    "tied head": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "another theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "stretched positions": {"rope_parameters": LLAMA3},
    "large epsilon": {"rms_norm_eps": 0.1},
    "one layer": {"num_hidden_layers": 1},
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config, weights = read_config(folder), read_weights(folder)
    decoder = Decoder(config, weights, dtype=dtype, device=CPU)
    weights.check_all_taken(config)
    return decoder


def random_tokens(seed: int, count: int, vocabulary: int = 97) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocabulary) for _ in range(count)]


def logits_in_pieces(
    decoder: Decoder, tokens: list[int], lengths: list[int], slots: list[int]
) -> torch.Tensor:
    """Logits after every token, the tokens given in pieces of `lengths` and kept at `slots`."""
    kv = decoder.kv_tensors(max(slots) + 1)
    logits, start = [], 0
    for length in lengths:
        stop = start + length
        known = slots[: stop if length == 1 else start]
        runs: list[tuple[int, int]] = []
        for slot in known:
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + 1)
            else:
                runs.append((slot, slot + 1))
        part = Part(0, length, runs)
        logits.append(
            decoder.forward(tokens[start:stop], list(range(start, stop)), slots[start:stop], [part], None, kv)
        )
        start = stop
    return torch.cat(logits)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_those_of_transformers(shape: dict[str, Any], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, 1, **shape)
    tokens = random_tokens(2, 150)
    decoder = load(tmp_path)
    assert decoder.parameters == model.num_parameters()
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.5, "logits that are all alike would prove nothing"
    for lengths in ([150], [1] * 150, [100, 1, 1, 40, 1, 7]):
        logits = logits_in_pieces(decoder, tokens, lengths, list(range(150)))
        assert (logits - expected).abs().max() < TOLERANCE


def test_logits_do_not_depend_on_where_keys_and_values_lie(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, 3)
    tokens = random_tokens(4, 60)
    scattered = [*range(100, 120), *range(0, 13), *range(60, 87)]
    logits = logits_in_pieces(load(tmp_path), tokens, [25, 1, 10, 1, 1, 22], scattered)
    assert (logits - reference_logits(model, tokens)).abs().max() < TOLERANCE


def test_sequences_of_one_batch_do_not_see_each_other(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, 5)
    decoder = load(tmp_path)
    kv = decoder.kv_tensors(300)
    prompts = [random_tokens(seed, length) for seed, length in ((1, 20), (2, 1), (3, 33))]
    first_slots = [200, 0, 100]
    parts, tokens, positions, slots = [], [], [], []
    for prompt, first_slot in zip(prompts, first_slots, strict=True):
        runs = [(first_slot, first_slot + 1)] if len(prompt) == 1 else []
        parts.append(Part(len(tokens), len(prompt), runs))
        tokens += prompt
        positions += range(len(prompt))
        slots += range(first_slot, first_slot + len(prompt))
    logits = decoder.forward(tokens, positions, slots, parts, [19, 20, 53], kv)
    for row, prompt in zip(logits, prompts, strict=True):
        assert (row - reference_logits(model, prompt)[-1]).abs().max() < TOLERANCE


def test_half_precision_is_close_to_single(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, 6)
    tokens = random_tokens(7, 40)
    expected = reference_logits(model, tokens)
    logits = logits_in_pieces(load(tmp_path, torch.bfloat16), tokens, [30, 1, 9], list(range(40)))
    error = (logits.float() - expected).abs().mean()
    assert error < 0.1 * expected.std()


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, 8, shard="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    tokens = random_tokens(9, 12)
    logits = logits_in_pieces(load(tmp_path), tokens, [12], list(range(12)))
    assert (logits - reference_logits(model, tokens)).abs().max() < TOLERANCE


def test_older_configurations_are_understood(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"], raw["head_dim"]
    path.write_text(json.dumps({**raw, "rope_theta": 777.0, "rope_scaling": None}))
    config = read_config(tmp_path)
    assert config.rotary == {"rope_type": "default", "rope_theta": 777.0}
    assert config.head_size == 12


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"intermediate_size": 81}, "mlp"),
        ({"head_dim": 13}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_cannot_be_run_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 11)
    path = tmp_path / "config.json"
    raw = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    with pytest.raises(ModelError, match=says):
        load(tmp_path)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        resolve(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        read_weights(tmp_path)


def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="somebody/something is neither a folder nor"):
        resolve("somebody/something")
    cached = tmp_path / "models--somebody--something"
    snapshot = cached / "snapshots" / "0123"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123")
    snapshot.mkdir(parents=True)
    write_checkpoint(snapshot, 12)
    assert resolve("somebody/something") == snapshot
    assert read_config(resolve("somebody/something")).vocabulary == 97


def test_a_random_model_is_the_same_for_the_same_seed() -> None:
    def logits(seed: int) -> torch.Tensor:
        config, weights = random_checkpoint(seed)
        decoder = Decoder(config, weights, dtype=torch.float32, device=CPU)
        weights.check_all_taken(config)
        return logits_in_pieces(decoder, [3, 1, 4], [3], [0, 1, 2])

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    assert 0.5 < logits(1).std() < 2 * math.e
