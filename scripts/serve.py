"""Run the server until SIGTERM or SIGINT.

The first signal lets the work in progress finish (--grace) and then exits with 0; the second ends the
process at once. This file knows options, files, the environment and signals; what a server is made of, it
only puts together.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import structlog
import trio

from protocol.edge.logs import set_up_logging
from protocol.edge.rest import Rest
from protocol.edge.server import ListenError, Server
from protocol.edge.tls import CertificateError
from protocol.models import ScriptError
from protocol.service import Service
from protocol.settings import (
    Device,
    Dtype,
    Lifecycle,
    LogFormat,
    LogLevel,
    Rehydrate,
    Settings,
    SettingsError,
    Switch,
)
from protocol.store import StoreError
from protocol.websocket import serve_connection

KEYS_VARIABLE = "FERMATA_API_KEYS"
SIZE_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

log = structlog.get_logger()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fermata serve`."""
    default = {field.name: field.default for field in fields(Settings)}

    def option(name: str, help_text: str, **how: Any) -> None:
        field_name = name.replace("-", "_")
        shown = "" if default[field_name] is None else " (%(default)s)"
        parser.add_argument(f"--{name}", default=default[field_name], help=help_text + shown, **how)

    def choice(name: str, help_text: str, literal: Any) -> None:
        option(name, help_text, choices=get_args(literal))

    option("host", "the address to listen on", metavar="ADDRESS")
    option("port", "the port to listen on; 0: any free one", type=int)
    parser.add_argument(
        "--model",
        default=default["model"],
        metavar="PATH_OR_ID",
        help="a checkpoint's folder or hub id (the small model that comes with the server)",
    )
    option(
        "engine",
        "what makes the tokens: torch, or paced:decode=RATE,prefill=RATE[,step=SECONDS] for forced legs only,"
        " without weights, at these rates in tokens a second",
        metavar="ENGINE",
    )
    choice("device", "where the model runs", Device)
    choice("dtype", "the type of its weights", Dtype)
    option("threads", "the engine's threads", type=int, metavar="N")
    choice("lifecycle", "of a WebSocket response that does not name its own", Lifecycle)
    parser.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that callers may use; repeatable. Also read: {KEYS_VARIABLE}, comma-separated",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="more keys, one a line; # begins a comment"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow an address that others reach, without a key"
    )
    option("tls-cert", "a certificate (chain) in PEM: serve https and wss", type=Path, metavar="FILE")
    option("tls-key", "its key, in PEM, not encrypted", type=Path, metavar="FILE")
    parser.add_argument(
        "--allow-origin",
        dest="allow_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin that may connect, such as https://example.org; repeatable; '*': any",
    )
    option(
        "max-context", "tokens of context, if fewer than the checkpoint allows", type=int, metavar="TOKENS"
    )
    parser.add_argument(
        "--kv-memory",
        type=_size,
        default=default["kv_memory"],
        metavar="SIZE",
        help="memory for the KV cache, such as 512MiB or 2GiB (1GiB)",
    )
    option("max-held", "runs that one caller may keep held", type=int, metavar="N")
    option("hold-timeout", "how long a held run waits for its client", type=float, metavar="SECONDS")
    option(
        "state-dir",
        "the folder that responses are stored in; they end with the server otherwise",
        type=Path,
        metavar="DIR",
    )
    option("max-in-flight", "responses that one caller may wait for at once over HTTP", type=int, metavar="N")
    choice("prefix-cache", "find the KV of ended conversations again by content", Switch)
    parser.add_argument(
        "--share-prefix",
        action="store_true",
        help="find it across keys too: cached_tokens then tells one key what another has sent",
    )
    choice("rehydrate", "what a stored conversation goes on from", Rehydrate)
    choice("log-format", "how the log is written, to standard error", LogFormat)
    choice("log-level", "the least that is logged", LogLevel)
    parser.add_argument(
        "--script",
        dest="scripts",
        action="append",
        type=Path,
        default=[],
        metavar="PATH",
        help="a file of scripted responses, or a folder of them; repeatable",
    )
    option("grace", "from the first signal until what still runs is cut off", type=float, metavar="SECONDS")


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns 0 after draining, 1 if the port cannot be had, 2 for a bad option."""
    try:
        settings = settings_from(arguments, os.environ.get(KEYS_VARIABLE, ""))
    except SettingsError as error:
        return _complain(f"argument {error}", 2)
    set_up_logging(settings.log_format, settings.log_level)
    try:
        trio.run(_serve, settings)
    except ScriptError as error:
        return _complain(f"argument --script: {error}", 2)
    except (ListenError, StoreError, CertificateError) as error:
        return _complain(str(error), 1)
    return 0


def settings_from(arguments: argparse.Namespace, keys_variable: str) -> Settings:
    """The settings that the options and the environment's keys amount to. Raises `SettingsError`."""
    given = vars(arguments).copy()
    key_file: Path | None = given.pop("api_key_file")
    keys = [*given.pop("api_keys"), *(key.strip() for key in keys_variable.split(",") if key.strip())]
    if key_file is not None:
        keys += _keys_in(key_file)
    return Settings(
        api_keys=tuple(keys),
        allow_origins=tuple(given.pop("allow_origins")),
        scripts=tuple(given.pop("scripts")),
        **given,
    )


async def _serve(settings: Settings) -> None:
    service = Service(settings)
    server = Server(settings, service, Rest(service), partial(serve_connection, service=service))
    stop = trio.Event()
    refused: ListenError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_signals, stop)
        try:
            await server.run(stop)
        except ListenError as error:
            refused = error
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused


async def _watch_signals(stop: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as numbers:
        async for number in numbers:
            if stop.is_set():
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            log.info("signal", name=signal.Signals(number).name)
            stop.set()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * SIZE_UNITS[(match[2] or "").upper()])


def _keys_in(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("api_key_file", f"{file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise SettingsError("api_key_file", f"there is no key in {file}")
    return keys


def _complain(message: str, exit_code: int) -> int:
    print(f"fermata serve: {message}", file=sys.stderr)
    return exit_code
