"""The `fermata` command. It knows the names of its subcommands, not what they do.

Each subcommand is a module of this package with `add_arguments(parser)` and `main(arguments) -> exit code`,
imported only when it is asked for: `fermata serve` must not wait for what another one needs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

SUBCOMMANDS = {
    "serve": "run the server",
    "agent": "give an agent a task in a folder",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run `fermata` with the given arguments, those of the process if None. Returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(_usage(), end="")
        return 0
    if name == "--version":
        print(f"fermata {_version()}")
        return 0
    if name not in SUBCOMMANDS:
        print(f"fermata: there is no subcommand '{name}'; 'fermata --help' lists them", file=sys.stderr)
        return 2
    module = import_module(f"scripts.{name}")
    parser = _Parser(
        prog=f"fermata {name}", description=(module.__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    module.add_arguments(parser)
    try:
        exit_code: int = module.main(parser.parse_args(words[1:]))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return exit_code


def _usage() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: fermata SUBCOMMAND [OPTION ...]",
            "",
            *lines,
            "",
            "fermata SUBCOMMAND --help: its options",
            "",
        ]
    )


def _version() -> str:
    try:
        return version("fermata")
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
