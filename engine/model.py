"""The decoder for Llama-architecture checkpoints: tokens and slots for keys and values in, logits out.

Knows weights and tensors; not sequences, schedules or sampling. A forward pass takes the new tokens of any
number of sequences as the rows of one batch: linear layers see all rows at once, attention sees each
sequence's rows apart.

Strategy. On small models the cost is calling operators (2 to 4 us each), so there are few of them, and
whatever can be folded into a weight once is not done per token:

- the norms' gains and the square root of the width go into the linear layers behind them, so that a norm is
  x / hypot(|x|, sqrt(width * epsilon)), three kernels instead of the seven inside ``F.rms_norm``;
- the scale of attention goes into the query rows;
- query and key rows are reordered so that a rotated pair is one complex number, and rotation one product;
- intermediate results go to buffers whose views are made once for each number of rows;
- query, key and value rows are one matrix, gate and up rows another; a product adds the residual itself.

Exactness. In float32 on a CPU, logits of the same ledger differ by up to 6e-5 (their spread is 4) between one
prefill, prefills in pieces, and decoding, alone or beside others: a product of one to three rows rounds
differently from one of four or more, and attention together from attention alone. Padding batches to four
rows and letting everybody attend alone would make a draw bitwise independent of its companions. It is left
out: a step of one sequence took 0.53 ms instead of 0.30, and the larger difference, that between decoding and
prefill, stayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.attention import ROOM_BYTES, Part, Together, attend_many, attend_one, group_by_length
from engine.checkpoint import DecoderConfig, Weights
from engine.kv import KvTensors

WORKSPACES_KEPT = 64  # row counts: those of steady decoding come again and again, those of prefill seldom


@dataclass(frozen=True, slots=True)
class Layer:
    """The folded weights of one layer, each [inputs, outputs]."""

    query_key_value: torch.Tensor
    attention_output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Workspace:
    """Buffers for the intermediate results of a batch of `rows` rows, and all views of them, made once."""

    def __init__(self, config: DecoderConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, head_size = config.heads, config.kv_heads, config.head_size
        group = heads // kv_heads

        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.rows = rows
        self.inputs = torch.empty((3, rows), dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.slots = self.inputs.unbind(0)
        self.hidden = buffer(rows, config.hidden)
        self.normed = buffer(rows, config.hidden)
        self.length = buffer(rows, 1)
        self.projected = buffer(rows, (heads + 2 * kv_heads) * head_size)
        by_head = self.projected.view(rows, heads + 2 * kv_heads, head_size)
        self.pairs = by_head[:, : heads + kv_heads].view(rows, heads + kv_heads, head_size // 2, 2)
        if dtype == torch.float32:
            self.rotated = torch.view_as_complex(self.pairs)
        self.queries = by_head[:, :heads].view(rows, kv_heads, group, head_size)
        self.keys = by_head[:, heads : heads + kv_heads].transpose(0, 1)  # [kv_heads, rows, head_size]
        self.values = by_head[:, heads + kv_heads :].transpose(0, 1)
        self.attended = buffer(rows, kv_heads, group, head_size)
        self.attended_flat = self.attended.view(rows, heads * head_size)
        self.row_queries = self.queries.unbind(0)
        self.row_attended = self.attended.unbind(0)
        self.head_queries = self.queries.transpose(0, 1)  # [kv_heads, rows, group, head_size]
        self.head_attended = self.attended.transpose(0, 1)
        self.gate_up = buffer(rows, 2 * config.intermediate)
        self.gate, self.up = self.gate_up.chunk(2, 1)


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
        self._embedding = weights.take("model.embed_tokens.weight", config.vocabulary, config.hidden).to(
            device, dtype
        )
        self._layers = [self._fold_layer(weights, f"model.layers.{n}.") for n in range(config.layers)]
        self._final_gain = (weights.take("model.norm.weight", config.hidden).float() * self._norm_gain).to(
            device, dtype
        )
        if config.tied_head:
            self._head = self._embedding.t()  # [hidden, vocabulary]
        else:
            self._head = (
                weights.take("lm_head.weight", config.vocabulary, config.hidden).to(device, dtype).t()
            )
        self._workspaces: dict[int, Workspace] = {}
        token_numbers = config.kv_heads * config.head_size
        self._room_tokens = ROOM_BYTES // (token_numbers * dtype.itemsize)
        self._room = torch.empty(self._room_tokens * token_numbers, dtype=dtype, device=device)
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
        work = self._workspace(len(tokens))
        work.inputs.copy_(torch.tensor((tokens, positions, slots)))
        rotations = self._rotations_for(max(positions) + 1).index_select(0, work.positions).unsqueeze_(1)
        torch.index_select(self._embedding, 0, work.token_ids, out=work.hidden)
        singles = [part for part in parts if part.rows == 1]
        longer = [part for part in parts if part.rows > 1]
        together = []
        if len(singles) > 1:
            groups = group_by_length(singles, self._room_tokens)
            singles = [group[0] for group in groups if len(group) == 1]
            together = [
                Together(group, work.head_queries, work.head_attended, self._room)
                for group in groups
                if len(group) > 1
            ]
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            torch.mm(self._norm(work.hidden, work), layer.query_key_value, out=work.projected)
            if self.dtype == torch.float32:
                work.rotated.mul_(rotations)
            else:
                pairs = torch.view_as_complex(work.pairs.float()) * rotations
                work.pairs.copy_(torch.view_as_real(pairs))
            keys.index_copy_(1, work.slots, work.keys)
            values.index_copy_(1, work.slots, work.values)
            transposed_keys = keys.transpose(1, 2)
            for part in singles:
                row = part.first_row
                attend_one(
                    work.row_queries[row], transposed_keys, values, part.runs, out=work.row_attended[row]
                )
            for group in together:
                group.attend(keys, values)
            for part in longer:
                rows = slice(part.first_row, part.first_row + part.rows)
                work.attended[rows] = attend_many(
                    work.queries[rows], work.keys[:, rows], work.values[:, rows], keys, values, part.runs
                )
            work.hidden.addmm_(work.attended_flat, layer.attention_output)
            torch.mm(self._norm(work.hidden, work), layer.gate_up, out=work.gate_up)
            torch.nn.functional.silu(work.gate, inplace=True).mul_(work.up)
            work.hidden.addmm_(work.gate, layer.down)
        hidden = work.hidden
        if logit_rows is not None:
            work = self._workspace(len(logit_rows))
            hidden = hidden[logit_rows]
        return torch.mm(self._norm(hidden, work) * self._final_gain, self._head)

    def _norm(self, hidden: torch.Tensor, work: Workspace) -> torch.Tensor:
        """x / rms(x), without a gain, written to `work.normed`."""
        if self.dtype == torch.float32:
            torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, out=work.length)
            return torch.div(hidden, work.length.hypot_(self._norm_floor), out=work.normed)
        return work.normed.copy_(
            torch.nn.functional.rms_norm(hidden, (self.config.hidden,), eps=self.config.norm_epsilon)
        )

    def _workspace(self, rows: int) -> Workspace:
        work = self._workspaces.get(rows)
        if work is None:
            if len(self._workspaces) == WORKSPACES_KEPT:
                del self._workspaces[next(iter(self._workspaces))]
            work = self._workspaces[rows] = Workspace(self.config, rows, self.dtype, self.device)
        return work

    def _rotations_for(self, positions: int) -> torch.Tensor:
        """e^(i * position * frequency), [`positions` or more, head_size / 2]; made when needed, doubling."""
        if positions > len(self._rotations):
            room = max(2048, 1 << (positions - 1).bit_length())
            angles = torch.outer(torch.arange(room).float(), self.config.rotary_frequencies())
            self._rotations = torch.polar(torch.ones_like(angles), angles).to(self.device)
        return self._rotations

    def _fold_layer(self, weights: Weights, prefix: str) -> Layer:
        config = self.config
        hidden, intermediate = config.hidden, config.intermediate
        heads_width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
        attention_gain = (
            weights.take(prefix + "input_layernorm.weight", config.hidden).float() * self._norm_gain
        )
        mlp_gain = (
            weights.take(prefix + "post_attention_layernorm.weight", config.hidden).float() * self._norm_gain
        )

        def matrix(name: str, outputs: int, inputs: int) -> torch.Tensor:
            return weights.take(f"{prefix}{name}.weight", outputs, inputs).float()

        def pairs_adjacent(rows: torch.Tensor) -> torch.Tensor:
            """From halves, first members of pairs and then second ones, to pairs side by side, per head."""
            halves = rows.view(-1, 2, config.head_size // 2, hidden)
            return halves.transpose(1, 2).reshape(rows.shape)

        query = pairs_adjacent(matrix("self_attn.q_proj", heads_width, hidden)) * config.head_size**-0.5
        key = pairs_adjacent(matrix("self_attn.k_proj", kv_width, hidden))
        value = matrix("self_attn.v_proj", kv_width, hidden)
        gate = matrix("mlp.gate_proj", intermediate, hidden)
        up = matrix("mlp.up_proj", intermediate, hidden)

        def finished(rows: torch.Tensor) -> torch.Tensor:
            return rows.t().to(self.device, self.dtype).contiguous()

        return Layer(
            query_key_value=finished(torch.cat([query, key, value]) * attention_gain),
            attention_output=finished(matrix("self_attn.o_proj", hidden, heads_width)),
            gate_up=finished(torch.cat([gate, up]) * mlp_gain),
            down=finished(matrix("mlp.down_proj", hidden, intermediate)),
        )
