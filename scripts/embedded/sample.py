"""A sample workspace on disk, and a task in it: what a first visitor sees the agent do.

Knows the look of the folder. Strategy: a fixed layout with numbers that depend on a seed; the task counts a
folder's files and lists them in one parallel turn, walks them with a running total, and writes the total.
"""

import random
from functools import partial
from pathlib import Path

from scripts.embedded.long_tasks import walk_folder
from scripts.embedded.world import Task

FOLDERS = {
    "garden": ("acorn.txt", "basil.txt", "fern.txt", "honey.txt", "juniper.txt", "thyme.txt"),
    "harbor": ("anchor.txt", "ferry.txt", "sail.txt"),
    "kitchen": ("apple.txt", "bread.txt", "ginger.txt", "kettle.txt"),
    "library": ("atlas.txt", "fable.txt", "lantern.txt"),
}
TARGET = "harbor/total.txt"


def sample_files(seed: int) -> dict[str, str]:
    """Path and text of each file: a number; in the library, a trail of pointers that ends in the garden."""
    rng = random.Random(seed)
    files = {
        f"{folder}/{name}": str(rng.randint(2, 99)) for folder, names in FOLDERS.items() for name in names
    }
    trail = [f"library/{name}" for name in FOLDERS["library"]]
    files |= dict(zip(trail, (f"see {path}" for path in [*trail[1:], "garden/fern.txt"]), strict=True))
    return files


def make_sample_workspace(root: Path, seed: int) -> None:
    """Writes the sample files below `root`, which is made if it is not there."""
    for path, text in sample_files(seed).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")


def sample_task(seed: int) -> Task:
    """The task: 15 calls in 14 turns, of which the first two are made in parallel."""
    request = f"Count the files in garden. Add up all numbers in garden. Write it to {TARGET}."
    solve = partial(walk_folder, "garden", "+", "total", counted=True, target=TARGET)
    return Task("sample", sample_files(seed), request, solve)
