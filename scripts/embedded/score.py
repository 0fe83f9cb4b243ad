"""How good the embedded model is: whole held-out tasks, done freely with the real tools in memory.

Knows the model's tokens, the text of calls, and tasks. Knows nothing of the server; the same tasks
through the server are evaluate.py's. Strategy: the model reads what a server would send it, its
text is taken apart into calls, the calls are made, and the task's own check judges the answer. No
credit for parts.
"""

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from scripts.embedded.kinds import draw_task, draw_task_of
from scripts.embedded.tiny_llama import Cache, TinyLlama, load
from scripts.embedded.transcript import GENERATION_PROMPT, message_text, system_text, training_row
from scripts.embedded.vocabulary import END_TOKEN, build_tokenizer, token_id
from scripts.embedded.world import Message, Swapped, Task
from scripts.tools import TOOLS, Workspace

Bucket = tuple[int, int]
BUCKETS: tuple[Bucket, ...] = ((1, 1), (2, 4), (5, 8), (9, 14), (15, 21))
"""Fewest and most calls of the right conversation."""

MAX_TURN_TOKENS = 256  # the longest right turn, four calls or a list of nine names, has under 120
CALL = re.compile(r'<tool_call>\n\{"name": ("[^"]*"), "arguments": (.*)\}\n</tool_call>')


@dataclass(frozen=True)
class Outcome:
    """One task done freely."""

    task: Task
    text: str
    right: bool
    transcript: str


Scores = dict[Bucket, list[Outcome]]


def do_task(
    model: TinyLlama, tokenizer: Tokenizer, task: Task, make_workspace: Callable[[], Workspace] | None = None
) -> Outcome:
    """Lets the model do a task in a new workspace, greedily; it has twice the calls it needs."""
    make_workspace = make_workspace or task.workspace
    end = token_id(tokenizer, END_TOKEN)
    workspace = make_workspace()
    waiting = system_text("", TOOLS) + message_text(Message("user", task.request))
    transcript, cache, calls_made = "", None, 0
    unread: list[int] = []
    while True:
        waiting += GENERATION_PROMPT
        transcript += waiting
        unread += tokenizer.encode(waiting, add_special_tokens=False).ids
        turn, cache = _turn(model, unread, cache, end)
        unread = turn[-1:]
        text = tokenizer.decode(turn, skip_special_tokens=False).removesuffix(END_TOKEN)
        transcript += text + END_TOKEN
        calls = CALL.findall(text)
        if not calls or calls_made > 2 * task.calls:
            right = not calls and task.check(text, workspace, make_workspace())
            return Outcome(task, text, right, transcript)
        results = [_call(workspace, name, arguments) for name, arguments in calls]
        waiting = "\n" + "".join(message_text(Message("tool", result)) for result in results)
        calls_made += len(calls)


def _turn(model: TinyLlama, unread: list[int], cache: Cache | None, end: int) -> tuple[list[int], Cache]:
    """The tokens of one assistant turn, greedily; the last one is not in the cache yet."""
    turn: list[int] = []
    while True:
        logits, cache = model.read(unread, cache)
        token = int(logits[-1].argmax())
        turn.append(token)
        if token == end or len(turn) == MAX_TURN_TOKENS:
            return turn, cache
        unread = [token]


def _call(workspace: Workspace, name_json: str, arguments_json: str) -> str:
    try:
        return workspace.call(json.loads(name_json), arguments_json)
    except ValueError:
        return "error: no such tool"


def score_answers(model: TinyLlama, tokenizer: Tokenizer, seed: int, tasks: int) -> Scores:
    """`tasks` held-out tasks of each bucket, done freely."""
    rng = random.Random(seed)
    return {
        bucket: [do_task(model, tokenizer, draw_task_of(rng, "held_out", *bucket)) for _ in range(tasks)]
        for bucket in BUCKETS
    }


def score_swaps(model: TinyLlama, tokenizer: Tokenizer, seed: int, tasks: int) -> Scores:
    """The same with one result falsified on the way; right is the answer that follows from it."""
    rng = random.Random(seed)
    scores: Scores = {}
    for bucket in BUCKETS:
        outcomes = scores[bucket] = []
        while len(outcomes) < tasks:
            task = draw_task_of(rng, "held_out", *bucket)
            make_workspace = partial(Swapped, task.files, rng.randrange(task.calls), rng.randint(1, 999))
            if task.conversation(make_workspace())[1] != task.conversation()[1]:
                outcomes.append(do_task(model, tokenizer, task, make_workspace))
    return scores


def score_turns(model: TinyLlama, tokenizer: Tokenizer, tasks: list[Task]) -> dict[str, list[int]]:
    """For each kind of task, how many turns of right conversations the model writes exactly, of how many.

    The model is given the right conversation up to each turn, so one mistake counts once.
    """
    system = tokenizer.encode(system_text("", TOOLS), add_special_tokens=False).ids
    scores: dict[str, list[int]] = {}
    for task in tasks:
        ids, produced = training_row(tokenizer, task.conversation()[0])
        logits, _ = model.read(system + ids[:-1], None)
        chosen = logits[len(system) - 1 :].argmax(-1).tolist()
        score = scores.setdefault(task.kind, [0, 0])
        turn_right = True
        for i, own in enumerate(produced):
            if own:
                turn_right = turn_right and chosen[i] == ids[i]
            elif i and produced[i - 1]:
                score[0] += turn_right
                score[1] += 1
                turn_right = True
    return scores


def report_line(name: str, scores: Scores) -> str:
    """The scores by number of calls, in one line."""
    parts = []
    for (fewest, most), outcomes in scores.items():
        right = sum(outcome.right for outcome in outcomes)
        parts.append(f"{fewest}-{most} calls {right}/{len(outcomes)}")
    return f"{name}: " + ", ".join(parts)


def main() -> None:
    """Prints all scores of a model folder."""
    parser = argparse.ArgumentParser(description="Score the embedded model on held-out tasks, in memory.")
    parser.add_argument("folder", type=Path, help="model folder")
    parser.add_argument("--tasks", type=int, default=200, help="for each number of calls, and each score")
    parser.add_argument("--seed", type=int, default=10**6, help="of the tasks that are drawn")
    parser.add_argument("--failures", type=int, default=0, help="transcripts of failed tasks to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = load(options.folder)
    rng = random.Random(options.seed)
    turns = score_turns(model, tokenizer, [draw_task(rng, "held_out") for _ in range(5 * options.tasks)])
    print("turns exact: " + ", ".join(f"{kind} {right}/{of}" for kind, (right, of) in sorted(turns.items())))
    answers = score_answers(model, tokenizer, options.seed, options.tasks)
    print(report_line("tasks right", answers))
    print(
        report_line(
            "right after a swapped result", score_swaps(model, tokenizer, options.seed, options.tasks)
        )
    )
    failures = [outcome for outcomes in answers.values() for outcome in outcomes if not outcome.right]
    for outcome in failures[: options.failures]:
        print(f"\n{outcome.task}\n{outcome.transcript}")


if __name__ == "__main__":
    main()
