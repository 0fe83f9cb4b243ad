"""Attention in each of its ways, against the formula over all tokens at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import (
    MOST_PADDING,
    MOST_TOGETHER,
    Part,
    SlotRuns,
    Together,
    attend_many,
    attend_one,
    group_by_length,
)

KV_HEADS, GROUP, HEAD_SIZE = 2, 3, 8
SLOTS = 400


@pytest.mark.parametrize("runs", [[(0, 30)], [(5, 10), (40, 41), (20, 44)]], ids=["one run", "three runs"])
def test_attention_is_softmax_over_all_runs(runs: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 50, 8, generator=generator)  # each [kv_heads, slots, head_size]
    known = torch.cat([torch.arange(start, stop) for start, stop in runs])

    def expected(query: torch.Tensor, seen_keys: torch.Tensor, seen_values: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query @ seen_keys.transpose(1, 2), -1) @ seen_values

    query = torch.randn(2, 3, 8, generator=generator)  # [kv_heads, group, head_size]
    out = torch.empty_like(query)
    attend_one(query, keys.transpose(1, 2), values, runs, out=out)
    assert torch.allclose(out, expected(query, keys[:, known], values[:, known]), atol=1e-5)

    queries = torch.randn(4, 2, 3, 8, generator=generator)
    new_keys, new_values = torch.randn(2, 2, 4, 8, generator=generator)
    attended = attend_many(queries, new_keys, new_values, keys, values, runs)
    for new in range(4):
        seen_keys = torch.cat([keys[:, known], new_keys[:, : new + 1]], 1)
        seen_values = torch.cat([values[:, known], new_values[:, : new + 1]], 1)
        assert torch.allclose(attended[new], expected(queries[new], seen_keys, seen_values), atol=1e-5)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 200), st.integers(1, 600)), max_size=40),
    gaps=st.sets(st.integers(0, 40), max_size=4),
    room=st.sampled_from([0, 1000, 2048]),
)
def test_neighbours_are_grouped_as_far_as_they_are_alike(
    lengths: list[int], gaps: set[int], room: int
) -> None:
    rows = [row for row in range(len(lengths) + len(gaps)) if row not in gaps]
    parts = [Part(row, 1, [(0, length)]) for row, length in zip(rows, lengths, strict=False)]
    groups = group_by_length(parts, room)
    assert [part for group in groups for part in group] == parts
    for group in groups:
        found = [part.length for part in group]
        assert [part.first_row for part in group] == [group[0].first_row + row for row in range(len(group))]
        assert max(found) - min(found) <= MOST_PADDING
        assert len(group) == 1 or max(found) <= min(MOST_TOGETHER, room // len(group))
    for group, following in pairwise(groups):
        found = [part.length for part in (*group, following[0])]
        far = following[0].first_row > group[-1].first_row + 1
        unlike = max(found) - min(found) > MOST_PADDING or max(found) > MOST_TOGETHER
        assert far or unlike or len(found) * max(found) > room, "a group ends where the next does not fit"


runs_of_one = st.lists(st.integers(1, 30), min_size=1, max_size=3)  # lengths of runs


@given(
    runs_of_each=st.lists(runs_of_one, min_size=1, max_size=5), seed=st.integers(0, 99), half=st.booleans()
)
def test_together_everybody_attends_as_alone(runs_of_each: list[list[int]], seed: int, half: bool) -> None:
    """Slots of nobody are not numbers: none may be looked at."""
    dtype = torch.bfloat16 if half else torch.float32
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.full((2, KV_HEADS, SLOTS + 100, HEAD_SIZE), torch.nan, dtype=dtype)
    parts, end = [], 0
    for row, lengths in enumerate(runs_of_each, start=2):
        runs: SlotRuns = []
        for length in lengths:
            runs.append((end, end + length))
            for tensor in (keys, values):
                tensor[:, end : end + length] = torch.randn(KV_HEADS, length, HEAD_SIZE, generator=generator)
            end += length + 1
        parts.append(Part(row, 1, runs))
    rows = len(parts) + 5  # those of others before and behind
    queries = torch.randn(rows, KV_HEADS, GROUP, HEAD_SIZE, generator=generator).to(dtype).transpose(0, 1)
    out = torch.zeros_like(queries)
    room = torch.empty(4096 * KV_HEADS * HEAD_SIZE, dtype=dtype)
    Together(parts, queries, out, room).attend(keys, values)
    for part in parts:
        alone = torch.empty(KV_HEADS, GROUP, HEAD_SIZE, dtype=dtype)
        row = part.first_row
        attend_one(queries[:, row].contiguous(), keys.transpose(1, 2), values, part.runs, out=alone)
        assert torch.allclose(out[:, row].float(), alone.float(), atol=0.05 if half else 1e-5)
    assert not out[:, :2].any(), "rows of others are left as they were"
    assert not out[:, 2 + len(parts) :].any()
