"""Draws names, numbers and sizes for the tasks of the embedded model's world.

Knows what is held out of training. Knows nothing of the tasks. Strategy: a task asks for one thing at a time,
and what it gets depends on the split; names are mostly words that are one token, and some are several.
"""

import random
from dataclasses import dataclass

from scripts.embedded.vocabulary import ENGLISH_WORDS, FOLDER_AND_FILE_WORDS, TOOL_WORDS
from scripts.embedded.world import Split

HELD_OUT_WORDS = tuple(FOLDER_AND_FILE_WORDS[3::7])
TRAINED_WORDS = tuple(word for word in FOLDER_AND_FILE_WORDS if word not in HELD_OUT_WORDS)
HELD_OUT_SIZES = (5, 8)  # files in a walked folder, which is then 11 or 17 calls and more
HELD_OUT_TRAILS = (4, 7, 12, 17)  # files in a trail of pointers
OTHER_WORDS = tuple(word for word in (*ENGLISH_WORDS, *TOOL_WORDS) if len(word) >= 4 and word.isalpha())
LONGEST_FOLDER, LONGEST_TRAIL = 9, 19  # about 20 calls either way

ODD_NAMES = 0.12  # share of names that are several tokens: two words, a word and a digit, random letters
OTHER_NAMES, RANDOM_NAMES = 0.35, 0.15  # shares of varied names; a name has to be a name by its place alone
RARELY = 0.05  # share of tasks over several files in which something is not there, or no number
EXTENSIONS = (".txt", ".txt", ".txt", ".txt", ".md", ".log")


def is_held_out_number(number: int) -> bool:
    """Whether a number never stands in a file of a training task: one in eight, spread evenly."""
    return number * 2654435761 % 2**32 >> 29 == 3


@dataclass(frozen=True)
class Mix:
    """What tasks are drawn from."""

    longest_folder: int = LONGEST_FOLDER  # files in a walked folder, at most
    longest_trail: int = LONGEST_TRAIL
    long_share: float = 0.5  # share of long tasks
    together: float = 0.0  # share of tasks, before all others, that read files together
    varied: bool = False  # half of the names are other words or random letters; notes have held-out words


class Maker:
    """Draws the names, numbers and sizes of one task."""

    def __init__(self, rng: random.Random, split: Split, mix: Mix) -> None:
        self.rng = rng
        self.split = split
        self.mix = mix
        words = TRAINED_WORDS if split == "train" else HELD_OUT_WORDS
        self._words = rng.sample(words, len(words))

    def word(self) -> str:
        """A word that this task has not used yet."""
        return self._words.pop()

    def name(self) -> str:
        """A name that this task has not used yet; mostly one word."""
        word = self.word()
        if self.mix.varied and self.rng.random() < OTHER_NAMES:
            return self.rng.choice(OTHER_WORDS)
        if self.mix.varied and self.rng.random() < RANDOM_NAMES:
            return self._random_letters()
        if self.rng.random() >= ODD_NAMES:
            return word
        match self.rng.randrange(4):
            case 0:
                return f"{word}-{self.rng.choice(TRAINED_WORDS)}"
            case 1:
                return f"{word}{self.rng.randrange(10)}"
            case 2:
                return f"{word}_{self.rng.choice(TRAINED_WORDS)}"
            case _:
                return self._random_letters()

    def _random_letters(self) -> str:
        return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.rng.randint(3, 6)))

    def file_name(self) -> str:
        """A new name with an extension."""
        return self.name() + self.rng.choice(EXTENSIONS)

    def path(self) -> str:
        """A new file in a new folder; one in ten at the top."""
        return self.file_name() if self.rng.random() < 0.1 else f"{self.name()}/{self.file_name()}"

    def number(self) -> int:
        """A number of this split, mostly of two or three digits."""
        while True:
            digits = self.rng.choice((1, 2, 2, 2, 3, 3, 4))
            number = self.rng.randint(10 ** (digits - 1), 10**digits - 1)
            if is_held_out_number(number) == (self.split == "held_out"):
                return number

    def note(self) -> str:
        """A few words that are no number."""
        words = FOLDER_AND_FILE_WORDS if self.mix.varied else TRAINED_WORDS
        return " ".join(self.rng.choice(words) for _ in range(self.rng.randint(2, 4)))

    def size(self, longest: int, held_out: tuple[int, ...], shortest: int = 1) -> int:
        """A number of files up to `longest`; held-out sizes in half of the held-out tasks only."""
        usual = [size for size in range(shortest, longest + 1) if size not in held_out] or [shortest]
        unusual = [size for size in held_out if shortest <= size <= longest]
        if self.split == "held_out" and unusual and self.rng.random() < 0.5:
            return self.rng.choice(unusual)
        return self.rng.choice(usual)

    def folder_of_numbers(self) -> tuple[str, dict[str, str]]:
        """A new folder with a number in each file, and its files."""
        folder = self.name() if self.rng.random() < 0.9 else f"{self.name()}/{self.name()}"
        size = self.size(self.mix.longest_folder, HELD_OUT_SIZES)
        return folder, {f"{folder}/{self.file_name()}": str(self.number()) for _ in range(size)}

    def rarely(self) -> bool:
        """Whether something is wrong with the files of this task."""
        return self.rng.random() < RARELY

    def say(self, *phrasings: str) -> str:
        """One of the phrasings."""
        return self.rng.choice(phrasings)
