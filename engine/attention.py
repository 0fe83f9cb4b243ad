"""Attention over keys and values in a few runs of slots: softmax(q k^T) v, the queries scaled beforehand.

Knows slots and one layer's tensors; not blocks, sequences or weights.

Strategy. A single token (decoding) reads each run as a view, writes its scores against all runs side by side
and takes one softmax over them. On a small model and a short context that is calls and hardly any work, so
decoding sequences that are short and of similar length attend together: keys, and then values, are gathered,
padded to the longest, and multiplied at once. A longer part (prefill) attends to every earlier run and,
causally, to itself, each with its log-sum-exp, and the partial results are merged by it. Query heads that
share a key head are rows of one product: with grouped heads nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

SlotRuns = list[tuple[int, int]]

MOST_TOGETHER = 256  # tokens of a sequence: to copy the keys and values of more costs more than calls do
MOST_PADDING = 128  # tokens: to gather and multiply these costs less than the calls of a sequence alone
ROOM_BYTES = 1 << 19  # to gather keys in, then values: a core's cache holds it beside what is gathered


class Part(NamedTuple):
    """The rows of one sequence in a batch.

    `runs`: the slots that hold its tokens before these rows; with a single row, that row's own slot too.
    """

    first_row: int
    rows: int
    runs: SlotRuns

    @property
    def length(self) -> int:
        """Tokens in `runs`."""
        return sum([stop - start for start, stop in self.runs])


def group_by_length(parts: Sequence[Part], room: int) -> list[list[Part]]:
    """Those that had better attend together: neighbours, short and of similar length, each with a single row.

    There is room to gather `room` tokens, padding included.
    """
    groups: list[list[Part]] = []
    shortest = longest = next_row = 0
    for part in parts:
        length = part.length
        shortest, longest = min(shortest, length), max(longest, length)
        alike = longest <= MOST_TOGETHER and longest - shortest <= MOST_PADDING
        follows = groups and part.first_row == next_row
        if alike and follows and (len(groups[-1]) + 1) * longest <= room:
            groups[-1].append(part)
        else:
            groups.append([part])
            shortest = longest = length
        next_row = part.first_row + 1
    return groups


class Together:
    """A group of single rows that follow each other, for all layers of one forward pass.

    queries, out [kv_heads, rows, group, head_size], the rows of all the batch; `room` [tokens * kv_heads *
    head_size] is to gather keys and values in, and nobody else uses it meanwhile.
    """

    def __init__(
        self, parts: Sequence[Part], queries: torch.Tensor, out: torch.Tensor, room: torch.Tensor
    ) -> None:
        rows = slice(parts[0].first_row, parts[0].first_row + len(parts))
        self._queries, self._out = queries[:, rows], out[:, rows]
        longest = max(part.length for part in parts)
        slots = np.empty((len(parts), longest), np.int64)
        mask = np.zeros((len(parts), 1, longest), np.float32)
        for row, part in enumerate(parts):
            end = 0
            for start, stop in part.runs:
                slots[row, end : end + stop - start] = np.arange(start, stop)
                end += stop - start
            slots[row, end:] = part.runs[-1][1] - 1  # any of its own
            mask[row, :, end:] = -np.inf
        self._slots = torch.from_numpy(slots.reshape(-1)).to(room.device)
        self._mask = torch.from_numpy(mask).to(room.device)
        kv_heads, _, self._group, head_size = queries.shape
        room = room[: kv_heads * slots.size * head_size]
        self._gathered = room.view(kv_heads, slots.size, head_size)
        self._each = room.view(kv_heads * len(parts), longest, head_size)

    def attend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One new token each, whose own keys and values are already in their last runs.

        keys, values [kv_heads, slots, head_size].
        """
        queries = self._queries.reshape(len(self._each), self._group, -1)
        torch.index_select(keys, 1, self._slots, out=self._gathered)
        scores = torch.bmm(queries, self._each.transpose(1, 2))  # [kv_heads * parts, group, longest]
        scores.view(-1, len(self._mask), self._group, scores.shape[-1]).add_(self._mask)
        torch.index_select(values, 1, self._slots, out=self._gathered)
        self._out.copy_(torch.bmm(torch.softmax(scores, -1), self._each).view(self._out.shape))


def attend_one(
    queries: torch.Tensor,
    transposed_keys: torch.Tensor,
    values: torch.Tensor,
    runs: SlotRuns,
    *,
    out: torch.Tensor,
) -> None:
    """One new token, whose own key and value are already in the last run.

    queries, out [kv_heads, group, head_size]; transposed_keys [kv_heads, head_size, slots]; values [kv_heads,
    slots, head_size].
    """
    if len(runs) == 1:
        start, stop = runs[0]
        scores = torch.bmm(
            queries, transposed_keys.narrow(2, start, stop - start)
        )  # [kv_heads, group, tokens]
        torch.bmm(torch.softmax(scores, -1), values.narrow(1, start, stop - start), out=out)
        return
    scores = torch.cat([torch.bmm(queries, transposed_keys[:, :, start:stop]) for start, stop in runs], -1)
    shares = torch.split_with_sizes(torch.softmax(scores, -1), [stop - start for start, stop in runs], -1)
    out.zero_()
    for share, (start, stop) in zip(shares, runs, strict=True):
        out.baddbmm_(share, values[:, start:stop])


def attend_many(
    queries: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: SlotRuns,
) -> torch.Tensor:
    """Several new tokens, each seeing all of `runs`, itself, and the new ones before it.

    queries [new, kv_heads, group, head_size]; new_keys, new_values [kv_heads, new, head_size]; keys, values
    [kv_heads, slots, head_size]; the result is shaped like queries.
    """
    new, kv_heads, group, head_size = queries.shape
    queries = queries.permute(1, 2, 0, 3)
    result, weight = _partial_attention(
        queries.reshape(1, kv_heads * group, new, head_size),
        new_keys.repeat_interleave(group, 0)[None],
        new_values.repeat_interleave(group, 0)[None],
        causal=True,
    )
    result = result.reshape(kv_heads, group * new, head_size)
    weight = weight.reshape(kv_heads, group * new, 1)
    grouped = queries.reshape(1, kv_heads, group * new, head_size)
    for start, stop in runs:
        part, part_weight = _partial_attention(
            grouped, keys[None, :, start:stop], values[None, :, start:stop], causal=False
        )
        part_weight = part_weight[0, ..., None]
        # result = (result e^weight + part e^part_weight) / (e^weight + e^part_weight)
        result = torch.lerp(result, part[0], torch.sigmoid(part_weight - weight).to(result.dtype))
        weight = torch.logaddexp(weight, part_weight)
    return result.reshape(kv_heads, group, new, head_size).permute(2, 0, 1, 3)


def _partial_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to these keys alone, and the log of the sum of its exponentials.

    queries [1, heads, new, head_size]; keys, values [1, heads, tokens, head_size]; returns the result, shaped
    like queries, and float32 [1, heads, new].
    """
    if queries.device.type == "cpu":
        result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, is_causal=causal, scale=1.0
        )
        return result, weight
    scores = (queries @ keys.transpose(-1, -2)).float()
    if causal:
        new = queries.shape[-2]
        future = torch.ones(new, new, dtype=torch.bool, device=queries.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    weight = scores.logsumexp(-1)
    return (scores - weight[..., None]).exp().to(values.dtype) @ values, weight
