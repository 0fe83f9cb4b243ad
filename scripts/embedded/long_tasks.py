"""Tasks of up to 20 calls: a folder walked from file to file, and a trail of files that point to each other.

Knows how the files are laid out, what the user says, and how it is done, in world.py's words for calls and
results. Strategy: a small model forgets nothing because it remembers nothing. The page of a file names the
next one, and the calculator's last result is the running total.
"""

from itertools import pairwise

from scripts.embedded.maker import HELD_OUT_TRAILS, Maker
from scripts.embedded.world import (
    NO_NUMBER,
    Answer,
    Solver,
    Task,
    calculate,
    count,
    failed,
    list_files,
    listed,
    page,
    read_file,
    value,
    write_file,
)

WALKS = (
    (
        *("+", "total"),
        "Add up all numbers in {folder}",
        "Sum the numbers in the folder {folder}",
        "What is the total of all files in {folder}?",
        "Find the total of {folder}",
    ),
    ("+", "total", "Add all the numbers in {folder} together", "What do the files in {folder} add up to?"),
    (
        *("max", "largest number"),
        "What is the largest number in {folder}?",
        "Find the largest number in {folder}",
        "Which is the biggest number in the folder {folder}?",
    ),
    (
        *("min", "smallest number"),
        "What is the smallest number in {folder}?",
        "Find the smallest number in {folder}",
        "Which is the lowest number in the folder {folder}?",
    ),
)
"""How the numbers are joined, what the result is called, and how a user asks for it."""


def walk(maker: Maker) -> Task:
    """A whole folder, file by file, with a running total, largest or smallest number."""
    folder, files = maker.folder_of_numbers()
    target = maker.path() if maker.rng.random() < 0.4 else None
    counted = maker.rng.random() < 0.2
    operation, naming, *phrasings = maker.rng.choice(WALKS)
    request = maker.say(*phrasings).format(folder=folder)
    if counted:
        request = maker.say(f"Count the files in {folder}. ", f"How many files has {folder}? ") + request
    request = request if request.endswith("?") else request + "."
    if maker.rarely():
        files[maker.rng.choice(list(files))] = maker.note()
    if target:
        request += maker.say(
            f" Write it to {target}.", f" Save the result in {target}.", f" Put the result into {target}."
        )
    files = {} if maker.rarely() else files
    return Task("walk", files, request, lambda: walk_folder(folder, operation, naming, counted, target))


def walk_folder(folder: str, operation: str, naming: str, counted: bool, target: str | None) -> Solver:
    """Lists the folder (in the same turn counts its files), then reads and calculates file by file."""
    *counts, listing = yield (count(folder), list_files(folder)) if counted else (list_files(folder),)
    if failed(listing):
        return Answer(f"There is no folder {folder}.", (folder, "no folder"))
    path, so_far = f"{folder}/{listed(listing)[0]}", ""
    while path != "none":
        (result,) = yield (read_file(path),)
        number, path = page(result)
        if operation == "+":
            expression = f"{so_far or 0} + {number}"
        else:
            expression = f"{operation}({so_far or number}, {number})"
        (result,) = yield (calculate(expression),)
        if failed(result):
            return Answer(NO_NUMBER, (NO_NUMBER,))
        so_far = value(result)
    if target:
        yield (write_file(target, so_far),)
    where = (target,) if target else ()
    ending = f", and I wrote it to {target}" if target else ""
    if counts:
        number_of_files = counts[0].rpartition(": ")[2]
        text = f"{folder} has {number_of_files}. The {naming} is {so_far}{ending}."
        return Answer(text, (number_of_files, so_far, *where))
    return Answer(f"The {naming} in {folder} is {so_far}{ending}.", (folder, so_far, *where))


def trail(maker: Maker) -> Task:
    """Files that each point to another one, up to a number."""
    length = maker.size(maker.mix.longest_trail, HELD_OUT_TRAILS)
    folders = [maker.name() for _ in range(maker.rng.randint(1, 3))]
    paths = [f"{maker.rng.choice(folders)}/{maker.file_name()}" for _ in range(length)]
    files = {path: f"see {following}" for path, following in pairwise(paths)}
    files[paths[-1]] = str(maker.number())
    start = paths[0]
    request = maker.say(
        f"Follow the trail from {start}.",
        f"Follow the trail that starts in {start}. Which number is at the end?",
        f"Start with {start} and follow it to the number.",
        f"Read {start} and follow where it points. What is at the end?",
    )

    def solve() -> Solver:
        path = start
        while True:
            (result,) = yield (read_file(path),)
            content, _ = page(result)
            if not content.startswith("see "):
                return Answer(f"The trail ends in {path} with {content}.", (path, content))
            path = content.removeprefix("see ")

    return Task("trail", files, request, solve)
