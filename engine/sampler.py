"""Choosing the next token: penalties, temperature, the tokens that are allowed, and counter-based noise.

Knows logits, token ids and positions; not sequences or schedules.

Strategy. The token at ledger position i is the argmax of logits / temperature + Gumbel noise over the allowed
tokens, and the noise is a hash of (seed, i, token). So there is no sampler state: a draw does not depend on
what was drawn before or on who else is in the batch, and it hardly depends on rounding, since small
differences of the logits matter only where two sums are nearly equal (drawing by the inverse of a cumulative
sum shifts every boundary instead).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.messages import Sampling

MASK_64 = (1 << 64) - 1
TOP_P_CANDIDATES = 1024  # tokens among which top-p mostly ends: to sort 49,152 takes 4 ms, to find these 0.3


@dataclass(slots=True, eq=False)
class History:
    """What penalties need to know of a ledger."""

    seen: torch.Tensor  # bool [vocabulary]: tokens anywhere in the ledger
    sampled: torch.Tensor  # float32 [vocabulary]: how often each was sampled

    @classmethod
    def of(
        cls, tokens: Sequence[int], sampled: Iterable[int], vocabulary: int, device: torch.device
    ) -> History:
        """The history of a ledger `tokens` of which `sampled` were sampled."""
        counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocabulary)
        sampled_counts = torch.bincount(torch.tensor(list(sampled), dtype=torch.int64), minlength=vocabulary)
        return cls((counts > 0).to(device), sampled_counts.float().to(device))

    def add(self, token: int) -> None:
        """Count one more sampled token."""
        self.seen[token] = True
        self.sampled[token] += 1


@dataclass(slots=True, eq=False)
class Draw:
    """One row of a batch: how to choose the token at ledger position `position`.

    `history` is needed if the sampling has penalties.
    """

    sampling: Sampling
    position: int
    history: History | None = None


def has_penalties(sampling: Sampling) -> bool:
    """Whether a `Draw` of it needs a history."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The next token of each row; waits for the device once. Changes `logits` [rows, vocabulary]."""
    for row, draw in enumerate(draws):
        if draw.history is not None:
            _penalise(logits[row], draw.sampling, draw.history)
    noisy = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if len(noisy) == len(draws):
        logits = noisy_scores(logits, draws)
    elif noisy:
        logits = logits.float()
        logits[noisy] = noisy_scores(logits[noisy], [draws[row] for row in noisy])
    chosen: list[int] = logits.argmax(-1).tolist()
    return chosen


def noisy_scores(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """What the argmax is taken of, float32 [rows, vocabulary]; -inf where a token is not allowed."""
    temperatures = torch.tensor([[draw.sampling.temperature] for draw in draws], device=logits.device)
    scaled = logits.float() / temperatures
    for row, draw in enumerate(draws):
        _restrict(scaled[row], draw.sampling)
    return scaled.add_(gumbel_noise([(draw.sampling.seed, draw.position) for draw in draws], scaled))


def gumbel_noise(counters: Sequence[tuple[int, int]], like: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise hashed from each row's (seed, position) and the token; float32, shaped as `like`.

    Noise is -log(-log(1 - v)), v uniform. As |h + 1/2| / 2^31 of a signed hash h, v is fine-grained near 0,
    where noise is large; near 1 it is kept off 1, where noise would be -inf.
    """
    words = [_mix_64(_mix_64(seed & MASK_64) + position) for seed, position in counters]
    low = torch.tensor([[_signed_32(word)] for word in words], dtype=torch.int32, device=like.device)
    high = torch.tensor([[_signed_32(word >> 32)] for word in words], dtype=torch.int32, device=like.device)
    tokens = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    hashed = _mix_32_(_mix_32_(tokens * -1640531527 + low).bitwise_xor_(high))
    uniform = hashed.float().add_(0.5).abs_().mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _penalise(logits: torch.Tensor, sampling: Sampling, history: History) -> None:
    """Change one row in place.

    Repetition as in CTRL (arXiv 1909.05858): tokens of the ledger have positive logits divided and negative
    ones multiplied. Presence and frequency as OpenAI documents them: subtracted once, and per time sampled.
    """
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits.copy_(torch.where(history.seen, repeated, logits))
    if sampling.presence_penalty or sampling.frequency_penalty:
        once = (history.sampled > 0) * sampling.presence_penalty
        logits -= once + history.sampled * sampling.frequency_penalty


def _restrict(scaled: torch.Tensor, sampling: Sampling) -> None:
    """Set the tokens of one row that top-k, then top-p, then min-p leave out to -inf, in place.

    Tokens that are level with the last one allowed are allowed. The likeliest token always is.
    """
    if 0 < sampling.top_k < scaled.numel():
        last_allowed = scaled.topk(sampling.top_k).values[-1]
        scaled.masked_fill_(scaled < last_allowed, float("-inf"))
    if sampling.top_p < 1.0:
        scaled.masked_fill_(scaled < _last_within(scaled, sampling.top_p), float("-inf"))
    if sampling.min_p > 0.0:
        # p >= min_p * p_max, in logs
        scaled.masked_fill_(scaled < scaled.max() + math.log(sampling.min_p), float("-inf"))


def _last_within(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """The logit of the last token that top-p allows: those before it together are less likely than that."""
    total = scaled.logsumexp(-1)
    for count in (TOP_P_CANDIDATES, scaled.numel()):
        descending = scaled.topk(min(count, scaled.numel())).values
        up_to_each = (descending - total).exp_().cumsum(-1)
        within = 1 + int((up_to_each[:-1] < top_p).sum())  # the first is always allowed
        if within < len(descending):
            break
    return descending[within - 1]


def _mix_64(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on word + its increment."""
    word = (word + 0x9E3779B97F4A7C15) & MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK_64
    return word ^ (word >> 31)


def _signed_32(word: int) -> int:
    """The low 32 bits as a signed number, as torch.int32 holds them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mix_32_(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of MurmurHash3 (Appleby), in place on int32: products wrap, masks make shifts logical."""
    words ^= (words >> 16) & 0xFFFF
    words *= _signed_32(0x85EBCA6B)
    words ^= (words >> 13) & 0x7FFFF
    words *= _signed_32(0xC2B2AE35)
    words ^= (words >> 16) & 0xFFFF
    return words
