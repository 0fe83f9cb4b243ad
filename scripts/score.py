"""How good the embedded model is: whole held-out tasks, done freely with the real tools in memory.

Knows the model's tokens, the text of calls, and tasks. Knows nothing of the server; the same tasks
through the server are evaluate.py's. Strategy: the model reads what a server would send it, its
text is taken apart into calls, the calls are made, and the task's own check judges the answer. No
credit for parts.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from scripts.kinds import draw_task_of
from scripts.tiny_llama import Cache, TinyLlama
from scripts.tools import TOOLS, Workspace
from scripts.transcript import GENERATION_PROMPT, message_text, system_text, training_row
from scripts.vocabulary import END_TOKEN, token_id
from scripts.world import Message, Task

BUCKETS = ((1, 1), (2, 4), (5, 8), (9, 14), (15, 21))
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


Tamper = Callable[[int, str], str]
"""Changes the n-th result of a conversation, or gives it back as it is."""


def do_task(
    model: TinyLlama, tokenizer: Tokenizer, task: Task, tamper: Tamper = lambda _, result: result
) -> Outcome:
    """Lets the model do a task in a fresh workspace in memory, greedily; it has twice the calls it needs."""
    end = token_id(tokenizer, END_TOKEN)
    workspace = task.workspace()
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
            return Outcome(task, text, not calls and task.check(text, workspace), transcript)
        waiting = "\n"
        for name, arguments in calls:
            result = tamper(calls_made, _call(workspace, name, arguments))
            waiting += message_text(Message("tool", result))
            calls_made += 1


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


def score_answers(
    model: TinyLlama, tokenizer: Tokenizer, seed: int, tasks: int
) -> dict[tuple[int, int], list[Outcome]]:
    """`tasks` held-out tasks of each bucket, done freely."""
    rng = random.Random(seed)
    return {
        bucket: [do_task(model, tokenizer, draw_task_of(rng, "held_out", *bucket)) for _ in range(tasks)]
        for bucket in BUCKETS
    }


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


def report_line(scores: dict[tuple[int, int], list[Outcome]]) -> str:
    """The scores by number of calls, in one line."""
    parts = []
    for (fewest, most), outcomes in scores.items():
        right = sum(outcome.right for outcome in outcomes)
        parts.append(f"{fewest}-{most} calls {right}/{len(outcomes)}")
    return "held-out tasks right: " + ", ".join(parts)
