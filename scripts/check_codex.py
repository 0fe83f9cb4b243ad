"""Have a real Codex CLI do a task on this server, and check what happened. Started by scripts/check_codex.

It knows how to get and configure Codex, and what its messages should be; it does not know how the server
works.

Strategy. The model is scripted (forced legs), everything else is real: Codex from npm, its tools, the server,
the engine, the socket. Between the two sits a relay that records every message, so what is judged is what was
said and what is on the disk afterwards, not what either program claims. The notes that Codex works on have a
random word in them: it can come back to the server only if Codex ran the command.

A new kind of client is one more entry of CLIENTS. Codex 0.110 and later makes every leg a Response of its own
and continues it with `previous_response_id`: it joins the table when the server can do that.
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

from scripts.local_server import ServerDied, local_server
from scripts.recording import Recording, recorded

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fermata" / "codex"
INSTALL_TIMEOUT = 600  # s; 100 MB from a registry
TASK_TIMEOUT = 600.0  # s; the first leg prefills about 19,000 tokens, on one core that may be busy
ENDS = ("response.done", "response.completed", "response.incomplete", "response.failed", "error")

TASK = "Sort my notes into sorted.txt, and change two into zwei in notes.txt."
COMMAND = "sort notes.txt | tee sorted.txt"
PATCH = "*** Begin Patch\n*** Update File: notes.txt\n@@\n one\n-two\n+zwei\n*** End Patch"
FAREWELL = "The notes are sorted, and two is zwei now."
LEGS: list[list[dict[str, str]]] = [
    [
        {"type": "message", "content": "First the notes in order."},
        {"type": "function_call", "name": "exec_command", "arguments": json.dumps({"cmd": COMMAND})},
    ],
    [
        {"type": "message", "content": "Now the change."},
        {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH},
    ],
    [{"type": "message", "content": FAREWELL}],
]
MODEL = "forced:codex"

# Nothing but this server: no updates, no analytics, no web search.
CONFIG = """\
model = "{model}"
model_provider = "fermata"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
suppress_unstable_features_warning = true

[analytics]
enabled = false

[model_providers.fermata]
name = "fermata"
base_url = "http://127.0.0.1:{port}/v1"
env_key = "FERMATA_KEY"
wire_api = "responses"
supports_websockets = true
requires_openai_auth = false
request_max_retries = 0
stream_max_retries = 0

[features]
{features}
"""


@dataclass(frozen=True, slots=True)
class Client:
    """What a version of Codex needs to be told, and how it and the server should talk during the task."""

    features: tuple[str, ...]  # to turn on
    beta: str  # what its handshake says in OpenAI-Beta
    asks: tuple[str, ...]  # the types of its messages, in order
    ends: tuple[str, ...]  # of the server's legs, in order
    lifecycle: str  # of its Responses
    legs: tuple[int, ...]  # of each of them


CLIENTS = {
    "0.107.0": Client(
        features=("responses_websockets", "apply_patch_freeform"),
        beta="responses_websockets=2026-02-04",
        asks=("response.create", "response.append", "response.append"),
        ends=("response.done", "response.done", "response.completed"),
        lifecycle="held",
        legs=(3,),
    ),
}


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
    parser.add_argument("--version", choices=CLIENTS, default="0.107.0", help="of Codex (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with workspace and log")
    arguments = parser.parse_args()
    client = CLIENTS[arguments.version]
    outcome: Outcome | None = None
    try:
        program = install(arguments.version)
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
    script.write_text("".join(json.dumps(leg) + "\n" for leg in LEGS))
    async with (
        local_server("--script", str(script), log=log) as server,
        recorded(urlsplit(server.url).port or 0, recording) as port,
    ):
        features = "\n".join(f"{feature} = true" for feature in client.features)
        (home / "config.toml").write_text(CONFIG.format(model=MODEL, port=port, features=features))
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

    yield Finding(
        "beta headers, one a connection", [beta_of(head) for head in outcome.recording.heads], [client.beta]
    )
    yield Finding("Codex's messages", [message.type for message in asked], [*client.asks])
    ends = [message for message in answered if message.type in ENDS]
    yield Finding("the legs' ends", [message.type for message in ends], [*client.ends])
    ids = {message.event.get("response", {}).get("id") for message in ends}
    yield Finding("Responses", len(ids), len(client.legs))
    called = [message.event["item"] for message in answered if message.type == "response.output_item.done"]
    calls = [(f"{item['type']}_output", item["call_id"]) for item in called if "call_id" in item]
    results = [item for message in asked for item in message.event["input"] if "call_id" in item]
    yield Finding("results, each for its call", [(item["type"], item["call_id"]) for item in results], calls)
    yield Finding("results that quote the notes", [word in item["output"] for item in results], [True, False])

    begun = [entry["lifecycle"] for entry in log if entry["event"] == "response_created"]
    yield Finding("lifecycles in the server's log", begun, [client.lifecycle] * len(client.legs))
    ended = [(entry["status"], entry["legs"]) for entry in log if entry["event"] == "response_ended"]
    yield Finding("Responses that ended", ended, [("completed", legs) for legs in client.legs])
    trouble = [entry for entry in log if entry["level"] != "info" or entry["event"] == "request_refused"]
    yield Finding("trouble in the server's log", trouble, [])


def beta_of(head: str) -> str | None:
    """What a request says in OpenAI-Beta."""
    for line in head.splitlines():
        name, _, value = line.partition(":")
        if name.lower() == "openai-beta":
            return value.strip()
    return None


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
