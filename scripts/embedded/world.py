"""The world of the embedded model: tasks over small files, how each is done, how an answer is judged.

Knows workspaces, user texts, calls and answers. Knows nothing of tokens or training (transcript.py,
train.py).

Strategy: a task carries its own solver, a generator that yields calls, is sent their results, and
returns the answer. It looks at nothing but the results, so the right answer is known for any
workspace, also for one whose results somebody has changed. State is carried by tools (a running
total, the next file), so that each step depends on the latest results only. What is held out of
training: some words as names, some numbers in files, some folder sizes and trail lengths.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from scripts.tools import MemoryFiles, Workspace

Split = Literal["train", "held_out"]

NO_NUMBER = "There is something that is no number."
"""The answer to a calculation that failed."""


@dataclass(frozen=True)
class Call:
    """One tool call: the tool's name and its arguments."""

    name: str
    arguments: dict[str, str]

    @property
    def arguments_json(self) -> str:
        """The arguments as the model writes them."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Answer:
    """A final answer, and the facts in it that make it right: numbers, names, whole phrases."""

    text: str
    facts: tuple[str, ...]


Solver = Generator[tuple[Call, ...], tuple[str, ...], Answer]
"""Yields the calls of one turn (all made in parallel), is sent their results, returns the answer."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation, in the words of a chat template."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Task:
    """What a user asks for, in which files, and how it is done right."""

    kind: str
    files: dict[str, str]
    request: str
    solve: Callable[[], Solver] = field(repr=False)

    def workspace(self) -> Workspace:
        """A fresh workspace in memory."""
        return Workspace.in_memory(self.files)

    def conversation(self, workspace: Workspace | None = None) -> tuple[list[Message], Answer]:
        """The right conversation, from the user's message on, in `workspace` (a fresh one if None)."""
        workspace = workspace or self.workspace()
        messages = [Message("user", self.request)]
        solver = self.solve()
        results: tuple[str, ...] | None = None
        while True:
            try:
                calls = next(solver) if results is None else solver.send(results)
            except StopIteration as stop:
                answer: Answer = stop.value
                return [*messages, Message("assistant", answer.text)], answer
            results = tuple(workspace.call(call.name, call.arguments_json) for call in calls)
            messages += [Message("assistant", "", calls), *(Message("tool", result) for result in results)]

    @property
    def calls(self) -> int:
        """Tool calls of the right conversation."""
        return sum(len(message.calls) for message in self.conversation()[0])

    def check(self, final_text: str, workspace: Workspace, right: Workspace | None = None) -> bool:
        """Whether `final_text` has every fact and no other number, and the files are as they should be now.

        What is right comes from the right conversation in `right`, a fresh workspace if None.
        """
        right = right or self.workspace()
        answer = self.conversation(right)[1]
        return states(final_text, answer, self.request) and all(
            _content(workspace, path) == _content(right, path) for path in _paths(right, "")
        )


class Swapped(Workspace):
    """A workspace in memory that falsifies one result: the first with a number from call `start` on."""

    def __init__(self, files: dict[str, str], start: int, number: int) -> None:
        """`start` counts from 0; `number` is what is put in the place of the right one."""
        super().__init__(MemoryFiles(files))
        self.calls_before = start
        self.number = number
        self.is_swapped = False

    def call(self, name: str, arguments_json: str) -> str:
        """The answer, falsified if it is this one's turn."""
        result = super().call(name, arguments_json)
        falsified = SWAPPABLE.sub(rf"\g<1>{self.number}", result)
        self.calls_before -= 1
        if self.is_swapped or self.calls_before >= 0 or falsified == result:
            return result
        self.is_swapped = True
        return falsified


SWAPPABLE = re.compile(r"^([\w/.-]+: |.* = )\d+$", re.MULTILINE)
"""The number that a page holds, or that a calculation comes to."""


def states(final_text: str, answer: Answer, request: str) -> bool:
    """Whether a text has every fact of `answer`, and no number from neither the facts nor the request."""
    allowed = set(_numbers(request)).union(*(_numbers(fact) for fact in answer.facts))
    return all(_has(final_text, fact) for fact in answer.facts) and set(_numbers(final_text)) <= allowed


def _numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)


def _has(text: str, fact: str) -> bool:
    return re.search(rf"(?<![\w/-]){re.escape(fact)}(?![\w/])(?!\.\w)", text) is not None


def _content(workspace: Workspace, path: str) -> bytes | None:
    return workspace.files.read(path, 1 << 20)[0] if workspace.files.is_file(path) else None


def _paths(workspace: Workspace, folder: str) -> list[str]:
    names = [f"{folder}{name}" for name in workspace.files.names(folder.rstrip("/"))]
    below = [path for name in names if name.endswith("/") for path in _paths(workspace, name)]
    return [*(name for name in names if not name.endswith("/")), *below]


# Results, read the way the model has to read them.


def page(result: str) -> tuple[str, str]:
    """What a read_file result holds, and the next file's path or "none"."""
    body, _, following = result.rpartition("\nnext: ")
    return body.partition(":")[2].strip(), following


def value(result: str) -> str:
    """What a calculate result comes to."""
    return result.rpartition("= ")[2]


def listed(result: str) -> list[str]:
    """The lines of a list_files or search result."""
    return result.split("\n")[1:-1]


def failed(result: str) -> bool:
    """Whether a result is an error."""
    return result.startswith("error: ")


def list_files(folder: str) -> Call:
    """The call."""
    return Call("list_files", {"folder": folder})


def read_file(path: str) -> Call:
    """The call."""
    return Call("read_file", {"path": path})


def search(text: str) -> Call:
    """The call."""
    return Call("search", {"text": text})


def count(path: str) -> Call:
    """The call."""
    return Call("count", {"path": path})


def write_file(path: str, text: str) -> Call:
    """The call."""
    return Call("write_file", {"path": path, "text": text})


def calculate(expression: str) -> Call:
    """The call."""
    return Call("calculate", {"expression": expression})


def in_words(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
