"""A real server in a process of its own, for benchmarks and evaluation: started on a free port, and stopped.

It knows the `fermata` command and its log, and nothing of what the server does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

START_TIMEOUT = 120.0  # s until the weights are loaded: a large checkpoint from a cold disk
STOP_TIMEOUT = 20.0  # s from SIGTERM to the exit, beyond which something is wrong
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ServerDied(Exception):
    """The server ended, or did not get ready; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class LocalServer:
    """Where it listens, and which processes it is made of."""

    url: str  # ws://127.0.0.1:PORT/v1/responses
    process_id: int
    engine_process_id: int
    log: Path

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time used so far by the server's process and by the engine's. Linux only."""
        return _cpu_seconds(self.process_id), _cpu_seconds(self.engine_process_id)


@asynccontextmanager
async def local_server(*options: str, log: Path) -> AsyncIterator[LocalServer]:
    """Run `fermata serve` with these options on a free port of loopback, its log (JSON lines) in `log`.

    Ready when the weights are loaded. Raises ServerDied, also for a server that does not stop when told.
    Cancellation stops the server too.
    """
    command = [sys.executable, "-m", "scripts.cli", "serve", "--port", "0", "--log-format", "json", *options]
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # the terminal's ^C is for whoever started it
        )
    try:
        with trio.fail_after(START_TIMEOUT):
            server = await _when_ready(process, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with trio.move_on_after(STOP_TIMEOUT, shield=True) as patience:
            await process.wait()
        if patience.cancelled_caught:
            process.kill()
            raise ServerDied(f"the server did not stop within {STOP_TIMEOUT:g} s of SIGTERM")


async def _when_ready(process: trio.Process, log: Path) -> LocalServer:
    address: str | None = None
    engine: int | None = None
    while True:
        text = await trio.Path(log).read_text(errors="replace")
        for line in text.splitlines():
            entry = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            match entry.get("event"):
                case "listening":
                    address = entry["addresses"][0]
                case "engine_started":
                    engine = entry["process_id"]
                case "models_ready" if address is not None and engine is not None:
                    return LocalServer(
                        f"{address.replace('http', 'ws', 1)}/v1/responses", process.pid, engine, log
                    )
                case "model_unusable":
                    raise ServerDied(entry["reason"])
        if process.poll() is not None:
            raise ServerDied(f"exit code {process.returncode}\n{text[-2000:]}")
        await trio.sleep(0.05)


def _cpu_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
