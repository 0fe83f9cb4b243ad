"""The embedded model in plain torch: a small Llama for training, and a greedy reader for scoring it.

Knows shapes and weights, by the names Hugging Face gives them. Knows nothing of tokenizers, tasks
or the server's engine.

Strategy: conversations of one batch share their system prompt, which would be a third of all
tokens. So a batch is one prefix [P] and B continuations [B, T]; the linear layers see all of them
as one matrix of rows, attention sees each continuation behind the one prefix. Gradients reach the
prefix through all continuations.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, named as in a Hugging Face Llama config."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 131072

    @property
    def head_dim(self) -> int:
        """Numbers per attention head."""
        return self.hidden_size // self.num_attention_heads

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """The config.json of this shape."""
        sizes = asdict(self)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "head_dim": self.head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
            "initializer_range": 0.02,
            "dtype": "float32",
        }


Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, kv_heads, positions, head_dim]."""


class Norm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def project(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [N, hidden], cos and sin [N, 1, d] to rotated q, rotated k and plain v, each [N, heads, d]."""
        dim = self.shape.head_dim
        q = self.q_proj(rows).unflatten(-1, (-1, dim))
        k = self.k_proj(rows).unflatten(-1, (-1, dim))
        v = self.v_proj(rows).unflatten(-1, (-1, dim))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, heads, T, d], k and v [B, kv_heads, S, d], mask [T, S] (None sees all) to [B, T, hidden]."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """The gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def feed_forward(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] plus the feed-forward of their norm."""
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class Stack(nn.Module):
    """Embedding, layers, last norm: what Hugging Face calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def __iter__(self) -> Iterator[Layer]:
        """The layers in order."""
        return iter(cast(list[Layer], self.layers))


class TinyLlama(nn.Module):
    """The decoder; `state_dict()` has the names of LlamaForCausalLM."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight, std=0.02 if not residual else 0.02 / (2 * shape.num_hidden_layers) ** 0.5
                )

    def forward(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """prefix [P], shared by all rows of tokens [B, T], to hidden states [B, T, hidden], normed."""
        size, (batch, length) = prefix.shape[0], tokens.shape
        positions = torch.cat([torch.arange(size), torch.arange(size, size + length).repeat(batch)])
        cos, sin = rotary(positions, self.shape)
        causal = torch.ones(length, size + length, dtype=torch.bool).tril(size)
        causal_head = torch.ones(size, size, dtype=torch.bool).tril()
        rows = self.model.embed_tokens(torch.cat([prefix, tokens.flatten()]))
        for layer in self.model:
            attention = layer.self_attn
            parts = attention.project(layer.input_layernorm(rows), cos, sin)
            q_head, k_head, v_head = (x[:size].transpose(0, 1)[None] for x in parts)
            q, k, v = (x[size:].view(batch, length, *x.shape[1:]).transpose(1, 2) for x in parts)
            behind_k = torch.cat([k_head.expand(batch, -1, -1, -1), k], 2)
            behind_v = torch.cat([v_head.expand(batch, -1, -1, -1), v], 2)
            mixed = attention.attend(q, behind_k, behind_v, causal).flatten(0, 1)
            mixed_head = attention.attend(q_head, k_head, v_head, causal_head)[0]
            rows = layer.feed_forward(rows + attention.o_proj(torch.cat([mixed_head, mixed])))
        hidden: Tensor = self.model.norm(rows[size:].unflatten(0, (batch, length)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] to [..., vocabulary] by the tied embedding."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    @torch.no_grad()
    def read(self, tokens: list[int], cache: Cache | None) -> tuple[Tensor, Cache]:
        """Appends T tokens (at least one) to a cached sequence: logits [T, vocabulary], longer cache."""
        past = cache[0][0].shape[2] if cache else 0
        cos, sin = rotary(torch.arange(past, past + len(tokens)), self.shape)
        mask = (
            torch.ones(len(tokens), past + len(tokens), dtype=torch.bool).tril(past)
            if len(tokens) > 1
            else None
        )
        rows = self.model.embed_tokens(torch.tensor(tokens))
        longer: Cache = []
        for i, layer in enumerate(self.model):
            parts = layer.self_attn.project(layer.input_layernorm(rows), cos, sin)
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            if cache:
                k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
            longer.append((k, v))
            rows = layer.feed_forward(rows + layer.self_attn.o_proj(layer.self_attn.attend(q, k, v, mask)[0]))
        return self.logits(self.model.norm(rows)), longer


def rotary(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, 1, head_dim] of rotary positions [N], in Llama's half-split order."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = positions[:, None].float() * frequency
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, head_dim] turned by its position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def load(folder: Path) -> TinyLlama:
    """The model of a folder with model.safetensors, in the default shape."""
    model = TinyLlama(Shape())
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
