"""Tiny checkpoints with random weights, written by transformers; its logits are the oracle of our decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(folder: Path, seed: int, shard: str | None = None, **changes: Any) -> LlamaForCausalLM:
    """Write a random model of SMALL with `changes` to `folder`, in shards of that size; the model itself."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes})).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(
            "norm.weight"
        ):  # all ones as initialised, which would hide a gain in the wrong place
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def reference_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits after every token, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits
