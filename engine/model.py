"""The decoder for Llama-architecture checkpoints: token ids and slots for their keys and values in, logits out.

Knows weights and tensors; not sequences, schedules or sampling. A forward pass takes the new tokens of any
number of sequences as the rows of one batch: linear layers see all rows at once, attention sees each
sequence's rows apart.

Strategy. On small models the cost is calling operators (2 to 4 us each), so there are few of them, and
whatever can be folded into a weight once is not done per token:

- the norms' gains and the square root of the width go into the linear layers behind them, so that a norm is
  x / hypot(|x|, sqrt(width * epsilon)), three kernels instead of the seven inside ``F.rms_norm``;
- the scale of attention goes into the query rows;
- query and key rows are reordered so that a rotated pair is one complex number, and rotation one product;
- query, key and value rows are one matrix, gate and up rows another; a product adds the residual itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.attention import SlotRuns, attend_many, attend_one
from engine.checkpoint import DecoderConfig, Weights
from engine.checkpoint import ModelError as ModelError
from engine.kv import KvTensors


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one sequence in a batch.

    `runs`: the slots that hold its tokens before these rows; with a single row, that row's own slot too.
    """

    first_row: int
    rows: int
    runs: SlotRuns


@dataclass(frozen=True, slots=True)
class Layer:
    """The folded weights of one layer, each [inputs, outputs]."""

    query_key_value: torch.Tensor
    attention_output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """A decoder with its weights on `device`, computing in `dtype`."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        # In half precisions the norm is F.rms_norm, which computes in float32.
        self._norm_gain = math.sqrt(config.hidden) if dtype == torch.float32 else 1.0
        self._norm_floor = torch.tensor(math.sqrt(config.hidden * config.norm_epsilon), device=device)
        self._embedding = weights.take("model.embed_tokens.weight").to(device, dtype)  # [vocabulary, hidden]
        self._layers = [self._fold_layer(weights, f"model.layers.{n}.") for n in range(config.layers)]
        self._final_gain = (weights.take("model.norm.weight").float() * self._norm_gain).to(device, dtype)
        if config.tied_head:
            self._head = self._embedding.t()  # [hidden, vocabulary]
        else:
            self._head = weights.take("lm_head.weight").to(device, dtype).t()
        self._rotations = torch.empty(0, config.head_size // 2, dtype=torch.complex64, device=device)

    @property
    def parameters(self) -> int:
        """Numbers in the checkpoint's tensors that are used, a tied head counted once."""
        matrices = [self._embedding, self._final_gain]
        if not self.config.tied_head:
            matrices.append(self._head)
        for layer in self._layers:
            matrices += [layer.query_key_value, layer.attention_output, layer.gate_up, layer.down]
        gains_folded_away = 2 * self.config.layers * self.config.hidden
        return sum(matrix.numel() for matrix in matrices) + gains_folded_away

    def kv_tensors(self, slots: int) -> KvTensors:
        """Room for the keys and values of `slots` tokens."""
        config = self.config
        return KvTensors(
            config.layers, config.kv_heads, config.head_size, slots, dtype=self.dtype, device=self.device
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        parts: list[Part],
        logit_rows: list[int] | None,
        kv: KvTensors,
    ) -> torch.Tensor:
        """Write keys and values of the rows at `slots`; the logits of `logit_rows` (None: of all rows).

        tokens, positions, slots: one a row; parts: all rows, in order. Returns [logit_rows, vocabulary].
        """
        config = self.config
        heads, kv_heads, head_size = config.heads, config.kv_heads, config.head_size
        rows, group = len(tokens), heads // kv_heads
        rows_now = torch.tensor((tokens, positions, slots), device=self.device)
        token_ids, row_positions, row_slots = rows_now.unbind(0)
        rotations = self._rotations_for(max(positions) + 1)[row_positions].unsqueeze(
            1
        )  # [rows, 1, head_size/2]
        hidden = self._embedding[token_ids]  # [rows, hidden]
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            projected = torch.mm(self._norm(hidden), layer.query_key_value)
            projected = projected.view(rows, heads + 2 * kv_heads, head_size)
            self._rotate(projected[:, : heads + kv_heads], rotations)
            new_keys = projected[:, heads : heads + kv_heads].transpose(0, 1)  # [kv_heads, rows, head_size]
            new_values = projected[:, heads + kv_heads :].transpose(0, 1)
            keys.index_copy_(1, row_slots, new_keys)
            values.index_copy_(1, row_slots, new_values)
            queries = projected[:, :heads].view(rows, kv_heads, group, head_size)
            if rows == 1:
                attended = attend_one(queries[0], keys, values, parts[0].runs)
            else:
                attended = torch.empty(
                    (rows, kv_heads, group, head_size), dtype=self.dtype, device=self.device
                )
                for part in parts:
                    first = part.first_row
                    if part.rows == 1:
                        attended[first] = attend_one(queries[first], keys, values, part.runs)
                        continue
                    end = first + part.rows
                    attended[first:end] = attend_many(
                        queries[first:end].permute(1, 2, 0, 3),
                        new_keys[:, first:end],
                        new_values[:, first:end],
                        keys,
                        values,
                        part.runs,
                    ).permute(2, 0, 1, 3)
            hidden.addmm_(attended.view(rows, heads * head_size), layer.attention_output)
            gate, up = torch.mm(self._norm(hidden), layer.gate_up).chunk(2, 1)
            hidden.addmm_(torch.nn.functional.silu(gate).mul_(up), layer.down)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        return torch.mm(self._norm(hidden) * self._final_gain, self._head)

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float32:
            length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            return hidden / torch.hypot(length, self._norm_floor)
        return torch.nn.functional.rms_norm(hidden, (self.config.hidden,), eps=self.config.norm_epsilon)

    def _rotate(self, heads: torch.Tensor, rotations: torch.Tensor) -> None:
        """Turn each pair of `heads` [rows, heads, head_size] by its position, in place."""
        pairs = heads.view(*heads.shape[:-1], -1, 2)
        if self.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotations)
        else:
            turned = torch.view_as_complex(pairs.float()) * rotations
            pairs.copy_(torch.view_as_real(turned))

    def _rotations_for(self, positions: int) -> torch.Tensor:
        """e^(i * position * frequency), [`positions` or more, head_size / 2]; made when needed, doubling."""
        if positions > len(self._rotations):
            room = max(2048, 1 << (positions - 1).bit_length())
            angles = torch.outer(torch.arange(room).float(), self.config.rotary_frequencies())
            self._rotations = torch.polar(torch.ones_like(angles), angles).to(self.device)
        return self._rotations

    def _fold_layer(self, weights: Weights, prefix: str) -> Layer:
        config = self.config
        attention_gain = weights.take(prefix + "input_layernorm.weight").float() * self._norm_gain
        mlp_gain = weights.take(prefix + "post_attention_layernorm.weight").float() * self._norm_gain

        def matrix(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}{name}.weight").float()  # [outputs, inputs]

        def pairs_adjacent(rows: torch.Tensor) -> torch.Tensor:
            """From halves, first members of pairs and then second ones, to pairs side by side, per head."""
            halves = rows.view(-1, 2, config.head_size // 2, config.hidden)
            return halves.transpose(1, 2).reshape(rows.shape)

        query = pairs_adjacent(matrix("self_attn.q_proj")) * config.head_size**-0.5
        key = pairs_adjacent(matrix("self_attn.k_proj"))
        value = matrix("self_attn.v_proj")
        gate, up = matrix("mlp.gate_proj"), matrix("mlp.up_proj")

        def finished(rows: torch.Tensor) -> torch.Tensor:
            return rows.to(self.device, self.dtype).t()

        return Layer(
            query_key_value=finished(torch.cat([query, key, value]) * attention_gain),
            attention_output=finished(matrix("self_attn.o_proj")),
            gate_up=finished(torch.cat([gate, up]) * mlp_gain),
            down=finished(matrix("mlp.down_proj")),
        )
