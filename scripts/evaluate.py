"""How good a model is at the embedded model's tasks, through the real server and the real tools.

    python -m scripts.evaluate [--url URL] [--model ID] [--tasks N] [--seed N]

Draws held-out tasks, makes each one's files in a folder of its own, lets an agent do it as a held run, and
judges the final text and the files. Without --url it starts a server with the embedded model. It knows tasks
and agents, and nothing of tokens or weights.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import trio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from protocol.client import Connection, connect, list_models
from protocol.client.agent import AgentResult, run_agent
from scripts.embedded.kinds import draw_task_of
from scripts.embedded.world import Task
from scripts.local_server import local_server
from scripts.tools import TOOLS, Workspace

BUCKETS = ((0, 4), (5, 8), (9, 14), (15, 20))  # calls of the right conversation, both ends included
PARALLEL_AGENTS = 4  # so that the engine batches and one core is busy
MOST_CALLS = 30  # an agent that makes more is lost
TASK_TIMEOUT = 120.0  # s; a 20-call task takes about one


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one task went."""

    task: Task
    right: bool
    calls: int  # that the right conversation has
    right_calls: int  # of those, made as they should be, before any that was not
    answer: str


def main() -> int:
    """Evaluate and print a table; exit code 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server, ws://…/v1/responses (starts its own)")
    parser.add_argument("--model", help="a model id (the server's first)")
    parser.add_argument("--checkpoint", help="the folder to start a server with (the embedded model)")
    parser.add_argument("--tasks", type=int, default=200, help="for each number of calls (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks that are drawn (0)")
    parser.add_argument("--show-failures", type=int, default=5, metavar="N", help="failed tasks to print (5)")
    return trio.run(_main, parser.parse_args())


async def _main(options: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        url = options.url
        if url is None:
            checkpoint = ["--model", options.checkpoint] if options.checkpoint else []
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = await stack.enter_async_context(local_server(*checkpoint, log=folder / "server.log"))
            url = server.url
        model = options.model or (await list_models(url))[0]
        connection = await stack.enter_async_context(connect(url))
        outcomes = await evaluate(connection, model, options.tasks, options.seed)
    console = Console()
    console.print(report(outcomes, model))
    failed = [outcome for outcome in outcomes if not outcome.right]
    for outcome in failed[: options.show_failures]:
        console.print(f"{outcome.task.kind}: {outcome.task.request!r} -> {outcome.answer!r}", markup=False)
    return 0


async def evaluate(connection: Connection, model: str, tasks: int, seed: int) -> list[Outcome]:
    """Do so many held-out tasks of every bucket. The same seed draws the same tasks."""
    chance = random.Random(seed)
    drawn = [draw_task_of(chance, "held_out", fewest, most) for fewest, most in BUCKETS for _ in range(tasks)]
    outcomes: list[Outcome] = []
    waiting = iter(drawn)
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task("tasks", total=len(drawn))

        async def work() -> None:
            for task in waiting:
                outcomes.append(await attempt(connection, model, task))
                progress.advance(bar)

        async with trio.open_nursery() as nursery:
            for _ in range(PARALLEL_AGENTS):
                nursery.start_soon(work)
    return outcomes


async def attempt(connection: Connection, model: str, task: Task) -> Outcome:
    """One task, on files of its own."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = lay_out(task, Path(folder))

        async def call_tool(name: str, arguments: str) -> str:
            await trio.lowlevel.checkpoint()
            return workspace.call(name, arguments)

        result = AgentResult()
        with trio.move_on_after(TASK_TIMEOUT):
            result = await run_agent(
                connection,
                model=model,
                instructions=None,
                tools=TOOLS,
                task=task.request,
                call_tool=call_tool,
                max_calls=MOST_CALLS,
            )
        right = result.status == "completed" and task.check(result.answer, workspace)
    wanted = [call for message in task.conversation()[0] for call in message.calls]
    made = [(call.name, call.arguments) for call in result.calls]
    right_calls = 0
    for one, other in zip(made, wanted, strict=False):
        if one != (other.name, other.arguments_json):
            break
        right_calls += 1
    return Outcome(task, right, len(wanted), right_calls, result.answer)


def lay_out(task: Task, folder: Path) -> Workspace:
    """The task's files, in a real folder."""
    for path, text in task.files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Workspace(folder)


def report(outcomes: list[Outcome], model: str) -> Table:
    """Tasks right by number of calls, and calls exact up to the first that was not."""
    table = Table(title=f"{model}: held-out tasks through the server", title_justify="left")
    for column in ("calls", "tasks", "right", "calls exact", "kinds that failed"):
        table.add_column(column, justify="right" if column != "kinds that failed" else "left")
    for fewest, most in BUCKETS:
        some = [outcome for outcome in outcomes if fewest <= outcome.calls <= most]
        right = sum(outcome.right for outcome in some)
        # A call that came after a wrong one had another history, so it is neither exact nor wrong.
        tried = sum(min(outcome.calls, outcome.right_calls + 1) for outcome in some)
        exact = sum(outcome.right_calls for outcome in some)
        kinds = Counter(outcome.task.kind for outcome in some if not outcome.right)
        table.add_row(
            f"{fewest} to {most}",
            str(len(some)),
            f"{right / len(some):.1%}",
            f"{exact}/{tried} = {exact / tried:.2%}" if tried else "",
            ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
