"""Copying practice: the first thing the embedded model learns, and part of everything it learns after.

Knows token ids only. Strategy: a passage of random tokens, then again and again the passage or a
stretch of it; the loss counts from the second time on. Accuracy stays at chance for some hundred
steps and then jumps: after that the model can follow names and numbers from tool results into its
calls and answers.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

SHORTEST_PASSAGE, LONGEST_PASSAGE = 8, 40  # tokens: from a path to a small folder listing
IGNORED = -100  # the target value that torch's cross entropy leaves out


@dataclass(frozen=True)
class Alphabet:
    """Token ids that passages are made of."""

    tokens: list[int]  # any but control tokens
    digits: list[int]
    words: list[int]  # names, the held-out ones too
    slash: int
    extensions: list[int]
    separators: list[int]


def copying_batch(
    rng: random.Random, alphabet: Alphabet, rows: int, length: int, path_rows: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A batch of practice rows: tokens and their targets (next token, or IGNORED), both [rows, length].

    A share `path_rows` of the rows are lists of paths. The others are any tokens, and in some of them many
    are digits, because numbers repeat few symbols and are the harder thing to copy.
    """
    sequences, wanted = [], []
    for _ in range(rows):
        if path_rows and rng.random() < path_rows:
            passage, latest_start, sure_after = _paths(rng, alphabet), 0, 4
        else:
            passage, latest_start = _any_tokens(rng, alphabet)
            sure_after = 2
        sequence, counted = list(passage), [False] * len(passage)
        while len(sequence) <= length:
            filler = [rng.choice(alphabet.tokens) for _ in range(rng.randint(1, 4))]
            stretch = passage[rng.randrange(latest_start) if latest_start else 0 :]
            sequence += filler + stretch
            counted += [False] * (len(filler) + sure_after) + [True] * (len(stretch) - sure_after)
        sequences.append(sequence[: length + 1])
        wanted.append(counted[: length + 1])
    all_tokens, counts = torch.tensor(sequences), torch.tensor(wanted)
    return all_tokens[:, :-1], all_tokens[:, 1:].masked_fill(~counts[:, 1:], IGNORED)


def _any_tokens(rng: random.Random, alphabet: Alphabet) -> tuple[list[int], int]:
    """A passage, and where at the latest a repeated stretch of it may start."""
    share_of_digits = rng.choice((0.0, 0.0, 0.3, 0.6))
    size = rng.randint(SHORTEST_PASSAGE, LONGEST_PASSAGE)
    passage = [
        rng.choice(alphabet.digits if rng.random() < share_of_digits else alphabet.tokens)
        for _ in range(size)
    ]
    return passage, 0 if share_of_digits else size // 2


def _paths(rng: random.Random, alphabet: Alphabet) -> list[int]:
    """Two to seven paths, half of the time in one folder, some with a number behind."""
    folder = rng.choice(alphabet.words) if rng.random() < 0.5 else None
    separator, numbered = rng.choice(alphabet.separators), rng.random() < 0.4
    passage: list[int] = []
    for _ in range(rng.randint(2, 7)):
        top = folder if folder is not None else rng.choice(alphabet.words)
        name = rng.choice(alphabet.words if rng.random() < 0.8 else alphabet.tokens)
        number = rng.choices(alphabet.digits, k=rng.randint(1, 4)) if numbered else []
        passage += [top, alphabet.slash, name, rng.choice(alphabet.extensions), *number, separator]
    return passage
