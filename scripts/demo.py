"""See an agent work: a sample folder, a server of its own on a free port, the agent.

Started by scripts/demo, which sets the environment up. It knows which parts there are and in which order they
go.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import trio
from rich.console import Console

from scripts import agent
from scripts.embedded.sample import make_sample_workspace, sample_task
from scripts.local_server import ServerDied, local_server

SEED = 7  # of the sample folder
MOST_TOKENS = 4096  # several times what the sample task takes: a lost model comes to an end


def main() -> int:
    """Run the demo. Returns the agent's exit code, or 1 if there is no server."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description="See an agent work.")
    parser.add_argument("task", nargs="*", help="what the agent is to do in the sample folder")
    words = " ".join(parser.parse_args().task)
    folder = Path(tempfile.mkdtemp(prefix="fermata-demo-"))
    make_sample_workspace(folder / "workspace", SEED)
    task = words or sample_task(SEED).request
    try:
        return trio.run(agent.until_signal, demonstrate, folder, task)
    except ServerDied as error:
        print(f"scripts/demo: the server: {error}", file=sys.stderr)
        return 1


async def demonstrate(nursery: trio.Nursery, folder: Path, task: str) -> int:
    """Serves, runs the agent on `task` in the folder's workspace, stops serving. Returns the exit code."""
    console = Console(highlight=False)
    workspace, log = folder / "workspace", folder / "server.log"
    console.print(f"sample folder  {workspace}\nserver's log   {log}", soft_wrap=True)
    async with AsyncExitStack() as stack:
        with console.status("the server is starting"):
            server = await stack.enter_async_context(local_server(log=log))
        console.print(f"server         {server.url}\n")
        parser = argparse.ArgumentParser()
        agent.add_arguments(parser)
        options = [
            "--workspace",
            str(workspace),
            "--url",
            server.url,
            "--max-output-tokens",
            str(MOST_TOKENS),
        ]
        return await agent.run_task(nursery, parser.parse_args([*options, "--", task]))


if __name__ == "__main__":
    sys.exit(main())
