"""Checkpoints of Llama architecture: their configuration read and checked, their tensors by name.

Knows files and names of weights; does nothing with them. Tensors are mapped from safetensors, so that a large
checkpoint is read once, while its weights are folded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.outline import ConfigFile, ModelError, Outline, read_outline

EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
RANDOM_VOCABULARY = 512  # tokens of a random model when there is no tokeniser to fit


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Outline):
    """The shape of a Llama-architecture decoder."""

    hidden: int
    intermediate: int
    norm_epsilon: float
    rotary: dict[str, Any]  # rope_theta, rope_type and what belongs to that type
    tied_head: bool

    def rotary_frequencies(self) -> torch.Tensor:
        """Radians a token for each pair of a head, float32 [head_size / 2].

        The formulas are those of the RoPE paper (arXiv 2104.09864) and, for "llama3", of Llama 3.1's release:
        long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        """
        exponents = torch.arange(0, self.head_size, 2).float() / self.head_size
        frequencies: torch.Tensor = 1.0 / self.rotary["rope_theta"] ** exponents
        if self.rotary["rope_type"] == "default":
            return frequencies
        trained = self.rotary["original_max_position_embeddings"]
        low, high = self.rotary["low_freq_factor"], self.rotary["high_freq_factor"]
        turns = trained * frequencies / (2 * math.pi)  # within the context that it was trained on
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        stretched: torch.Tensor = frequencies * (kept + (1 - kept) / self.rotary["factor"])
        return stretched


class Weights:
    """A checkpoint's tensors by name, each to be taken once."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Remove and return a tensor; ModelError if there is none, or none of this shape."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name}")
        if tensor.shape != shape:
            raise ModelError(f"the tensor {name} has the shape {tuple(tensor.shape)}, not {shape}")
        return tensor

    def check_all_taken(self, config: DecoderConfig) -> None:
        """ModelError if tensors are left that this decoder does not know."""
        ignored = {"lm_head.weight"} if config.tied_head else set()
        left = [name for name in self._tensors if name not in ignored and "rotary_emb" not in name]
        if left:
            raise ModelError(
                f"the checkpoint has tensors that this decoder does not use: {', '.join(left[:4])}"
                + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            )


def read_config(folder: Path) -> DecoderConfig:
    """The configuration in `folder`; ModelError if it is missing, broken, or of another architecture."""
    says = ConfigFile(folder)
    outline = read_outline(says)
    path = says.path
    if outline.architecture != "LlamaForCausalLM":
        raise ModelError(
            f"{folder} has the architecture {outline.architecture}; this decoder runs LlamaForCausalLM"
        )
    for name in ("attention_bias", "mlp_bias"):
        if says.get(name):
            raise ModelError(f"{path}: {name} is not supported")
    if says.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path}: the activation {says['hidden_act']} is not supported")
    if outline.heads % outline.kv_heads:
        raise ModelError(f"{path}: {outline.heads} heads cannot share {outline.kv_heads} num_key_value_heads")
    if outline.head_size % 2:
        raise ModelError(f"{path}: a head_dim of {outline.head_size} cannot be rotated in pairs")
    return DecoderConfig(
        **vars(outline),
        hidden=says["hidden_size"],
        intermediate=says["intermediate_size"],
        norm_epsilon=says.get("rms_norm_eps", 1e-6),
        rotary=_rotary(says),
        tied_head=says.get("tie_word_embeddings", False),
    )


def _rotary(says: ConfigFile) -> dict[str, Any]:
    """rope_theta, rope_type and its parameters, from wherever releases of transformers have written them."""
    rotary = dict(says.get("rope_parameters") or says.get("rope_scaling") or {})
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    rotary.setdefault("rope_theta", says.get("rope_theta", 10000.0))
    if rotary["rope_type"] not in ("default", "llama3"):
        raise ModelError(f"{says.path}: rotary positions of the type {rotary['rope_type']} are not supported")
    return rotary


def read_weights(folder: Path) -> Weights:
    """All tensors of model.safetensors or of the shards in its index. ModelError if they cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            tensors.update(load_file(folder / shard))
        except FileNotFoundError:
            raise ModelError(f"{folder} has no {shard}") from None
        except SafetensorError as error:
            raise ModelError(f"{folder / shard} cannot be read: {error}") from error
    return Weights(tensors)


def random_checkpoint(seed: int) -> tuple[DecoderConfig, Weights]:
    """A tiny model with random weights, scaled so that its logits spread by about 2."""
    tokenizer = EMBEDDED_FOLDER / "tokenizer.json"
    vocabulary = RANDOM_VOCABULARY
    if tokenizer.exists():
        from tokenizers import Tokenizer

        vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocabulary=vocabulary,
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        norm_epsilon=1e-5,
        rotary={"rope_type": "default", "rope_theta": 10000.0},
        max_context=131072,
        tied_head=False,
    )
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, spread: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).mul_(spread * inputs**-0.5)

    hidden, heads_width, kv_width = config.hidden, 4 * 16, 2 * 16
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(vocabulary, hidden, 2.0),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": matrix(heads_width, hidden, 2.0),
            prefix + "self_attn.k_proj.weight": matrix(kv_width, hidden, 2.0),
            prefix + "self_attn.v_proj.weight": matrix(kv_width, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, heads_width),
            prefix + "mlp.gate_proj.weight": matrix(config.intermediate, hidden),
            prefix + "mlp.up_proj.weight": matrix(config.intermediate, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, config.intermediate),
        }
    return config, Weights(tensors)
