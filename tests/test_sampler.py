"""The sampler: the distribution it draws from, and that a draw depends on nothing but its own row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Sampling
from engine.sampler import Draw, History, gumbel_noise, has_penalties, noisy_scores, sample

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 0.25, 1.25, -3.0, 0.75])


def draw_many(logits: torch.Tensor, sampling: Sampling, count: int, first_position: int = 0) -> torch.Tensor:
    """How often each token is drawn at `count` consecutive positions."""
    draws = [Draw(sampling, first_position + position) for position in range(count)]
    return torch.bincount(torch.tensor(sample(logits.repeat(count, 1), draws)), minlength=len(logits))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_with_their_probabilities(temperature: float) -> None:
    counts = draw_many(LOGITS, Sampling(temperature=temperature, seed=7), 40000)
    # 11 degrees of freedom: a true sampler is above 31.3 once in a thousand seeds, and this seed is fixed
    assert chi_square(counts, (LOGITS / temperature).softmax(-1)) < 31.3


def test_noise_is_independent_of_the_seed_and_across_positions() -> None:
    logits = torch.zeros(4)
    tokens = sample(logits.repeat(20000, 1), [Draw(Sampling(temperature=1.0), p) for p in range(20000)])
    pairs = torch.bincount(torch.tensor(tokens[:-1]) * 4 + torch.tensor(tokens[1:]), minlength=16)
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < 37.7  # 15 degrees of freedom, one in a thousand
    by_seed = sample(
        logits.repeat(20000, 1), [Draw(Sampling(temperature=1.0, seed=seed), 5) for seed in range(20000)]
    )
    assert chi_square(torch.bincount(torch.tensor(by_seed)), torch.full((4,), 0.25)) < 16.3  # 3 degrees


def test_noise_is_gumbel_also_in_its_tail() -> None:
    noise = gumbel_noise([(3, position) for position in range(200)], torch.empty(200, 5000)).flatten()
    assert torch.isfinite(noise).all()
    for quantile in (-2.0, 0.0, 2.0, 6.0, 10.0):
        beyond = 1 - math.exp(-math.exp(-quantile))
        expected = beyond * noise.numel()
        assert abs(float((noise > quantile).sum()) - expected) < 4 * math.sqrt(expected) + 1
    assert noise.unique().numel() > 0.9 * noise.numel(), "float32 is fine-grained enough"


def test_a_large_vocabulary_has_no_favourites() -> None:
    # Every token's noise must be fresh: sums over positions of a token's noise are all near the mean.
    noise = gumbel_noise([(11, position) for position in range(400)], torch.empty(400, 2000))
    means = noise.mean(0)
    assert abs(float(means.mean()) - 0.5772) < 0.01
    assert float((means - 0.5772).abs().max()) < 5 * 1.2825 / 20  # deviation pi/sqrt(6) over sqrt(400) draws


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "seed": 5, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3, "seed": 2**63},
    {"temperature": 1.0, "min_p": 0.1, "seed": -1},
    {"repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.9},
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(SETTINGS), st.integers(0, 200000)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_a_draw_is_the_same_alone_in_any_batch_and_in_any_order(
    rows: list[tuple[dict[str, Any], int]], chance: Any
) -> None:
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    logits = torch.randn(len(rows), 50, generator=generator) * 3

    def draw(row: int) -> Draw:
        sampling = Sampling(**rows[row][0])
        history = History.of([1, 2, 3, 3], [3, 3], 50, CPU) if has_penalties(sampling) else None
        return Draw(sampling, rows[row][1], history)

    alone = [sample(logits[row : row + 1].clone(), [draw(row)])[0] for row in range(len(rows))]
    order = list(range(len(rows)))
    chance.shuffle(order)
    together = sample(logits[order], [draw(row) for row in order])
    assert together == [alone[row] for row in order]


def test_another_seed_or_position_is_another_draw() -> None:
    noise = gumbel_noise([(1, 1), (1, 2), (2, 1), (1 + 2**32, 1), (1, 1)], torch.empty(5, 1000))
    for one in range(4):
        for other in range(one):
            correlation = torch.corrcoef(noise[[one, other]])[0, 1]
            assert abs(float(correlation)) < 0.12
    assert torch.equal(noise[0], noise[4])


def test_noise_is_the_same_for_a_token_whatever_the_vocabulary() -> None:
    assert torch.equal(
        gumbel_noise([(1, 9)], torch.empty(1, 64)), gumbel_noise([(1, 9)], torch.empty(1, 640))[:, :64]
    )


def test_known_draws_stay_as_they_are() -> None:
    """Ledgers written by one release must be continued alike by the next."""
    sampling = Sampling(temperature=1.0, seed=42)
    assert sample(LOGITS.repeat(12, 1), [Draw(sampling, position) for position in range(12)]) == KNOWN_DRAWS


KNOWN_DRAWS = [9, 1, 0, 1, 4, 0, 9, 1, 1, 9, 2, 1]


def allowed(logits: torch.Tensor, **sampling: Any) -> list[int]:
    scores = noisy_scores(logits[None], [Draw(Sampling(temperature=1.0, **sampling), 0)])[0]
    return torch.isfinite(scores).nonzero().flatten().tolist()


PROBABILITIES = torch.tensor([0.1, 0.5, 0.1, 0.05, 0.25])


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 1, 2, 4]),  # two tokens are level in third place
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.51}, [1, 4]),
        ({"top_p": 0.74}, [1, 4]),
        ({"top_p": 0.80}, [0, 1, 2, 4]),
        ({"top_p": 0.99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.45}, [1, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1]),  # 0.5 is two thirds of what top-k leaves
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.4}, [1, 4]),
    ],
)
def test_which_tokens_are_allowed(sampling: dict[str, Any], expected: list[int]) -> None:
    assert allowed(PROBABILITIES.log(), **sampling) == expected


def test_top_p_among_many_tokens_is_that_of_a_full_sort() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    descending = logits.softmax(-1).sort(descending=True)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        before = descending.values.cumsum(-1) - descending.values
        expected = descending.indices[before < top_p].sort().values.tolist()
        assert len(expected) > 1024 or top_p < 0.9, "the shortcut must have been too short once"
        assert allowed(logits, top_p=top_p) == expected


def test_the_last_token_left_is_drawn_whatever_its_noise() -> None:
    sampling = Sampling(temperature=1.0, top_k=1)
    counts = draw_many(LOGITS, sampling, 3000)
    assert counts[0] == 3000


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0, 0.0]])
    history = History.of([0, 1, 2, 2], [2, 2], 5, CPU)
    history.add(3)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    sample(logits, [Draw(sampling, 5, history)])
    assert logits[0].tolist() == [1.0, -4.0, 0.5 - 0.5 - 2 * 0.25, 0.5 - 0.5 - 0.25, 0.0]


def test_greedy_takes_the_likeliest_and_ignores_seed_and_limits() -> None:
    draws = [Draw(Sampling(seed=seed, top_p=0.5, top_k=3, min_p=0.2), 0) for seed in range(3)]
    assert sample(LOGITS.repeat(3, 1), draws) == [0, 0, 0]


def test_half_precision_logits_are_drawn_in_single() -> None:
    counts = draw_many(LOGITS.bfloat16(), Sampling(temperature=1.0, seed=1), 20000)
    assert chi_square(counts, LOGITS.bfloat16().float().softmax(-1)) < 31.3
