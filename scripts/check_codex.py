"""Have a real Codex CLI do a task on this server, and check what happened. Started by scripts/check_codex.

It knows how to get and start Codex, and what should be so after a task; it does not know how the server
works. What each way of talking needs and should be is in scripts.codex_clients.

Strategy. The model is scripted (forced legs), everything else is real: Codex from npm, its tools, the server,
the engine, the socket. Between the two sits a relay that records every message, so what is judged is what was
said and what is on the disk afterwards, not what either program claims. The notes that Codex works on have a
random word in them: it can come back to the server only if Codex ran the command.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio

from scripts.codex_clients import CLIENTS, FAREWELL, TASK, Client
from scripts.local_server import ServerDied, local_server
from scripts.recording import Recording, recorded

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fermata" / "codex"
INSTALL_TIMEOUT = 600  # s; 100 MB from a registry
TASK_TIMEOUT = 600.0  # s; the first leg prefills about 19,000 tokens, on one core that may be busy
ENDS = ("response.done", "response.completed", "response.incomplete", "response.failed", "error")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that can be known after the task."""

    word: str  # that was in the notes
    exit_code: int  # of Codex
    farewell: str | None  # what Codex took for the final message
    files: dict[str, str]  # in the workspace: contents by name
    recording: Recording
    log: list[dict[str, Any]]  # the server's


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked."""

    what: str
    seen: object
    expected: object

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be."""
        return self.seen == self.expected


def main() -> int:
    """Run the check. Returns 0 if everything is as it should be, else 1."""
    parser = argparse.ArgumentParser(prog="scripts/check_codex", description="See a real Codex CLI work.")
    parser.add_argument(
        "--lifecycle", choices=CLIENTS, default="held", help="of the Responses, which decides the version"
    )
    parser.add_argument("--keep", action="store_true", help="keep the folder with workspace and log")
    arguments = parser.parse_args()
    client = CLIENTS[arguments.lifecycle]
    outcome: Outcome | None = None
    try:
        program = install(client.version)
        with task_folder(keep=arguments.keep) as folder:
            outcome = trio.run(do_task, program, client, folder)
    except* trio.TooSlowError:
        _complain(f"not done within {TASK_TIMEOUT:g} s")
    except* (subprocess.SubprocessError, ServerDied) as errors:
        for error in errors.exceptions:
            _complain(str(error))
    if outcome is None:
        return 1
    return report(outcome.recording, list(judge(outcome, client)))


@contextmanager
def task_folder(*, keep: bool) -> Iterator[Path]:
    """A new folder for one task, removed afterwards unless it is to be kept."""
    # Not in /tmp: Codex makes no helpers in folders that others may write to.
    folder = Path(tempfile.mkdtemp(prefix="task-", dir=CACHE))
    try:
        yield folder
    finally:
        if keep:
            print(f"everything is in {folder}")
        else:
            shutil.rmtree(folder)


def install(version: str) -> Path:
    """The program of this version, from npm unless it is there already. Raises SubprocessError."""
    folder = CACHE / version
    if not folder.exists():
        print(f"getting Codex {version} from npm, about 100 MB")
        half = Path(f"{folder}.half")
        half.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(half), f"@openai/codex@{version}"]
        subprocess.run(npm, check=True, timeout=INSTALL_TIMEOUT, stdout=subprocess.DEVNULL)
        half.rename(folder)
    return folder / "node_modules" / ".bin" / "codex"


async def do_task(program: Path, client: Client, folder: Path) -> Outcome:
    """Serve, and have Codex do the task in a workspace in this folder. Raises ServerDied, TooSlowError."""
    word, recording = secrets.token_hex(8), Recording()
    home, workspace, script, log, farewell = (
        folder / name for name in ("home", "workspace", "codex.jsonl", "server.log", "farewell.txt")
    )
    home.mkdir()
    workspace.mkdir()
    (workspace / "notes.txt").write_text(f"{word}\none\ntwo\n")
    script.write_text("".join(json.dumps(leg) + "\n" for leg in client.script))
    async with (
        local_server("--script", str(script), log=log) as server,
        recorded(urlsplit(server.url).port or 0, recording) as port,
    ):
        (home / "config.toml").write_text(client.config(port))
        options = ["--skip-git-repo-check", "--color", "never", "--output-last-message", str(farewell)]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "CODEX_HOME": str(home),
            "FERMATA_KEY": "any",
        }
        with trio.fail_after(TASK_TIMEOUT):
            codex = await trio.run_process(
                [str(program), "exec", *options, TASK], cwd=workspace, env=environment, check=False
            )
    return Outcome(
        word=word,
        exit_code=codex.returncode,
        farewell=farewell.read_text() if farewell.exists() else None,
        files={file.name: file.read_text() for file in workspace.iterdir()},
        recording=recording,
        log=[json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")],
    )


def judge(outcome: Outcome, client: Client) -> Iterator[Finding]:
    """Everything that should be so after the task."""
    word, log = outcome.word, outcome.log
    asked, answered = outcome.recording.said_by("client"), outcome.recording.said_by("server")
    yield Finding("Codex's exit code", outcome.exit_code, 0)
    yield Finding("Codex's final message", outcome.farewell, FAREWELL)
    yield Finding(
        "the command's file",
        outcome.files.get("sorted.txt"),
        "".join(sorted([f"{word}\n", "one\n", "two\n"])),
    )
    yield Finding("the patched file", outcome.files.get("notes.txt"), f"{word}\none\nzwei\n")

    betas = [headers.get("openai-beta") for headers in outcome.recording.requests]
    yield Finding("beta headers, one a request", betas, [*client.betas])
    yield Finding("Codex's messages", [message.type for message in asked], [*client.asks])
    ends = [message for message in answered if message.type in ENDS]
    yield Finding("the legs' ends", [message.type for message in ends], [*client.ends])
    responses = [message.event.get("response", {}) for message in ends]
    numbers = {id: number for number, id in enumerate(dict.fromkeys(each.get("id") for each in responses))}
    yield Finding("Responses", len(numbers), len(client.legs))
    continued = [message.event.get("previous_response_id") for message in asked]
    yield Finding(
        "which Response each message continues",
        [numbers.get(id, id) for id in continued],
        [*client.continues],
    )
    called = [message.event["item"] for message in answered if message.type == "response.output_item.done"]
    calls = [(f"{item['type']}_output", item["call_id"]) for item in called if "call_id" in item]
    # Without the server's memory each request repeats the history.
    results = {
        (item["type"], item["call_id"]): item["output"]
        for message in asked
        for item in message.event["input"]
        if item.get("type", "").endswith("_output")
    }
    yield Finding("results, each for its call", [*results], calls)
    yield Finding("results that quote the notes", [word in each for each in results.values()], [True, False])

    begun = [entry["lifecycle"] for entry in log if entry["event"] == "response_created"]
    yield Finding("lifecycles in the server's log", begun, [client.lifecycle] * len(client.legs))
    ended = [entry for entry in log if entry["event"] == "response_ended"]
    yield Finding(
        "Responses that ended",
        [(entry["status"], entry["legs"]) for entry in ended],
        [("completed", legs) for legs in client.legs],
    )
    prefilled = sum(entry["tokens_prefilled"] for entry in ended)
    context = responses[-1]["usage"]["total_tokens"] if responses and responses[-1] else 0
    yield Finding("tokens prefilled more than once", max(0, prefilled - context), 0)
    trouble = [entry for entry in log if entry["level"] != "info" or entry["event"] == "request_refused"]
    yield Finding("trouble in the server's log", trouble, [])


def report(recording: Recording, findings: Sequence[Finding]) -> int:
    """Print what was said and found. Returns 0 if everything is good, else 1."""
    print("\nwhat was said, in bytes of JSON")
    for message in recording.said_by("client"):
        print(f"  Codex   {message.size:>8,}  {message.type}")
    said = recording.said_by("server")
    for type in dict.fromkeys(message.type for message in said):
        sizes = [message.size for message in said if message.type == type]
        print(f"  server  {sum(sizes):>8,}  {type}" + (f", {len(sizes)} times" if len(sizes) > 1 else ""))
    print("\nwhat was found")
    for finding in findings:
        print(f"  {'good ' if finding.is_good else 'WRONG'}  {finding.what}: {finding.seen!r}")
        if not finding.is_good:
            print(f"         expected: {finding.expected!r}")
    wrong = sum(not finding.is_good for finding in findings)
    print(f"\n{len(findings) - wrong} of {len(findings)} as it should be")
    return 1 if wrong else 0


def _complain(message: str) -> None:
    print(f"scripts/check_codex: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
