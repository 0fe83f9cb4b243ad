"""Give an agent a task: a model of a running server, with tools that work in one folder.

This file knows options, signals and exit codes; the loop is protocol/client/agent.py, the tools tools.py, the
picture timeline.py. The exit code is 0 only for a completed run: 1 for any other end, 2 for wrong options,
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from protocol.client import ClientError, ConnectionLost, connect, list_models
from protocol.client.agent import AgentResult, run_agent
from scripts.timeline import Timeline
from scripts.tools import TOOLS, Workspace

URL = "ws://127.0.0.1:8765/v1/responses"
KEY_VARIABLE = "FERMATA_API_KEY"
TOOL_TIMEOUT = (
    30.0  # s; a folder that answers no sooner (a dead network share) must not hold the run for ever
)
PARALLEL_TOOLS = 8  # threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fermata agent`."""
    parser.add_argument("task", help="what the agent is to do, in plain words")
    parser.add_argument(
        "--workspace", type=Path, required=True, metavar="DIR", help="the folder that its tools work in"
    )
    parser.add_argument("--url", default=URL, help="the server (%(default)s)")
    parser.add_argument("--model", metavar="ID", help="one of the server's models (its first)")
    parser.add_argument(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE),
        metavar="KEY",
        help=f"the server's key, if it wants one. Also read: {KEY_VARIABLE}",
    )
    parser.add_argument("--instructions", metavar="TEXT", help="what the model is told before the task")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same run")
    parser.add_argument("--max-output-tokens", type=_positive, metavar="N", help="of the whole run")
    parser.add_argument(
        "--max-calls", type=_positive, default=100, metavar="N", help="%(default)s by default"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end and nothing else"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the agent. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return trio.run(until_signal, run_task, arguments)


async def until_signal(job: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Awaits `job(nursery, *arguments)` for its exit code, or cancels it at the first SIGINT or SIGTERM."""
    exit_code = 1

    async def watch_signals() -> None:
        nonlocal exit_code
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                exit_code = _complain("cancelled", 128 + number)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_signals)
        exit_code = await job(nursery, *arguments)
        nursery.cancel_scope.cancel()
    return exit_code


async def run_task(nursery: trio.Nursery, arguments: argparse.Namespace) -> int:
    """Runs the task of these arguments, drawing in `nursery`. Says what goes wrong; returns the exit code.

    Cancellation cancels the run on the server.
    """
    try:
        if arguments.workspace.exists() and not arguments.workspace.is_dir():
            return _complain(f"--workspace {arguments.workspace}: is no folder", 2)
        return await _run_task(nursery, arguments, Workspace(arguments.workspace))
    except OSError as error:
        return _complain(f"--workspace {arguments.workspace}: {error.strerror}", 2)
    except ConnectionLost as error:
        return _complain(f"{error} (is `fermata serve` running at {arguments.url}?)", 1)
    except (ClientError, ValueError) as error:
        return _complain(str(error), 1)


async def _run_task(nursery: trio.Nursery, arguments: argparse.Namespace, workspace: Workspace) -> int:
    limiter = trio.CapacityLimiter(PARALLEL_TOOLS)

    async def call_tool(name: str, tool_arguments: str) -> str:
        with trio.move_on_after(TOOL_TIMEOUT):
            return await trio.to_thread.run_sync(
                workspace.call, name, tool_arguments, abandon_on_cancel=True, limiter=limiter
            )
        return f"error: {name} did not answer within {TOOL_TIMEOUT:g} s"

    names = ("temperature", "seed", "max_output_tokens")
    sampling = {name: getattr(arguments, name) for name in names}
    started = trio.current_time()
    timeline = Timeline(Console(quiet=arguments.json, highlight=False, emoji=False, markup=False))
    model = arguments.model or await _first_model(arguments)
    async with connect(arguments.url, api_key=arguments.api_key) as connection, timeline:
        timeline.heading("fermata agent", f"{model} in {arguments.workspace}", arguments.task)
        nursery.start_soon(timeline.draw)
        result = await run_agent(
            connection,
            model=model,
            instructions=arguments.instructions,
            tools=TOOLS,
            task=arguments.task,
            call_tool=call_tool,
            max_calls=arguments.max_calls,
            watch=timeline.watch,
            **{name: value for name, value in sampling.items() if value is not None},
        )
    seconds = trio.current_time() - started
    if arguments.json:
        print(json.dumps(as_json(result, seconds)))
    timeline.conclusion(result, seconds)
    return 0 if result.status == "completed" else 1


async def _first_model(arguments: argparse.Namespace) -> str:
    models = await list_models(arguments.url, api_key=arguments.api_key)
    if not models:
        raise ConnectionLost("The server has no model.")
    return models[0]


def as_json(result: AgentResult, seconds: float) -> dict[str, Any]:
    """What `--json` prints. Times are in seconds, but those in `work` are the server's milliseconds."""
    return {
        "status": result.status,
        "reason": result.reason or None,
        "answer": result.answer,
        "response_id": result.response_id,
        "seconds": seconds,
        "legs": [
            {
                "number": leg.number,
                "tokens_kept": leg.tokens.kept if leg.tokens else None,
                "tokens_prefilled": leg.tokens.prefilled if leg.tokens else None,
                "tokens_sampled": leg.tokens.sampled if leg.tokens else None,
                "time_to_first_token": leg.time_to_first_token,
                "waiting": leg.waiting,
                "text": leg.text,
                "calls": [
                    {
                        "call_id": call.id,
                        "name": call.name,
                        "arguments": call.arguments,
                        "output": call.output,
                        "seconds": call.seconds,
                    }
                    for call in leg.calls
                ],
            }
            for leg in result.legs
        ],
        "work": result.work,
    }


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _complain(message: str, exit_code: int) -> int:
    print(f"fermata agent: {message}", file=sys.stderr)
    return exit_code
