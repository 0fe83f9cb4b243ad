"""Copying practice: the first thing the embedded model learns, and part of everything it learns after.

Knows token ids only. Strategy: a passage of random tokens, then again and again the passage or a
stretch of it; the loss counts from the second time on. Accuracy stays at chance for some hundred
steps and then jumps: after that the model can follow names and numbers from tool results into its
calls and answers.
"""

import random

import torch
from torch import Tensor

SHORTEST_PASSAGE, LONGEST_PASSAGE = 8, 40  # tokens: from a path to a small folder listing
IGNORED = -100  # the target value that torch's cross entropy leaves out


def copying_batch(
    rng: random.Random, tokens: list[int], digits: list[int], rows: int, length: int
) -> tuple[Tensor, Tensor]:
    """A batch of practice rows: tokens [rows, length] and targets [rows, length] (next token, or IGNORED).

    `tokens` are drawn from at random; in some rows many are digits, because numbers repeat few symbols
    and are the harder thing to copy.
    """
    sequences, wanted = [], []
    for _ in range(rows):
        share_of_digits = rng.choice((0.0, 0.0, 0.3, 0.6))
        size = rng.randint(SHORTEST_PASSAGE, LONGEST_PASSAGE)
        passage = [rng.choice(digits if rng.random() < share_of_digits else tokens) for _ in range(size)]
        sequence, counted = list(passage), [False] * size
        while len(sequence) <= length:
            filler = [rng.choice(tokens) for _ in range(rng.randint(1, 4))]
            start = 0 if share_of_digits else rng.randrange(size // 2)
            stretch = passage[start:]
            sequence += filler + stretch
            counted += [False] * (len(filler) + 2) + [True] * (len(stretch) - 2)
        sequences.append(sequence[: length + 1])
        wanted.append(counted[: length + 1])
    all_tokens, counts = torch.tensor(sequences), torch.tensor(wanted)
    return all_tokens[:, :-1], all_tokens[:, 1:].masked_fill(~counts[:, 1:], IGNORED)
