"""The kinds of task, how often each is drawn, and the generator that draws them.

Knows the tables; the tasks themselves are in short_tasks.py and long_tasks.py.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from scripts.embedded.long_tasks import trail, walk
from scripts.embedded.maker import Maker, Mix
from scripts.embedded.short_tasks import (
    arithmetic,
    change_one,
    copy_one,
    count_one,
    greeting,
    list_one,
    list_top,
    read_one,
    read_together,
    search_one,
    write_one,
)
from scripts.embedded.world import Message, Split, Task
from scripts.tools import Workspace

Kind = Callable[[Maker], Task]

ANY = Mix()

SHORT_KINDS: dict[Kind, int] = {
    greeting: 2,
    arithmetic: 5,
    read_one: 5,
    list_one: 3,
    list_top: 1,
    count_one: 3,
    search_one: 5,
    write_one: 3,
    copy_one: 4,
    change_one: 5,
    read_together: 10,
}
LONG_KINDS: dict[Kind, int] = {walk: 4, trail: 1}
"""Kinds and how often they are drawn among their like."""


def draw_task(rng: random.Random, split: Split, mix: Mix = ANY) -> Task:
    """A random task of a split, from a mix."""
    kinds = LONG_KINDS if rng.random() < mix.long_share else SHORT_KINDS
    (kind,) = rng.choices(list(kinds), weights=list(kinds.values()))
    return kind(Maker(rng, split, mix))


def draw_conversation(rng: random.Random, mix: Mix) -> list[Message]:
    """A right conversation to learn from: one task, or one in six times two or three of them."""
    if mix.together and rng.random() < mix.together:
        return read_together(Maker(rng, "train", mix)).conversation()[0]
    if rng.random() < 5 / 6:
        return draw_task(rng, "train", mix).conversation()[0]
    tasks: list[Task] = []
    taken: set[str] = set()
    for _ in range(rng.randint(2, 3)):
        task = draw_task(rng, "train", replace(mix, long_share=mix.long_share / 2))
        folders = {path.partition("/")[0] for path in task.files}
        if not folders & taken:
            tasks.append(task)
            taken |= folders
    workspace = Workspace.in_memory({path: text for task in tasks for path, text in task.files.items()})
    return [message for task in tasks for message in task.conversation(workspace)[0]]


def draw_task_of(rng: random.Random, split: Split, fewest_calls: int, most_calls: int) -> Task:
    """A random task of a split whose right conversation has so many calls."""
    mix = Mix(long_share=0.2 if most_calls <= 4 else 1.0)
    while True:
        task = draw_task(rng, split, mix)
        if fewest_calls <= task.calls <= most_calls:
            return task
