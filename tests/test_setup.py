"""scripts/setup.sh with an interpreter that makes no real environments and notes what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SETUP = Path(__file__).parent.parent / "scripts" / "setup.sh"
INTERPRETER = f"""#!/bin/sh
case "$1 $2" in
"-m venv") echo venv >>"$NOTES"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip") echo "$*" >>"$NOTES"; [ -z "$PIP_FAILS" ] ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@dataclass
class Checkout:
    """A repository with nothing but the set-up in it."""

    root: Path

    @property
    def notes(self) -> list[str]:
        path = self.root / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def command(self) -> list[str]:
        script = 'set -euo pipefail; source "$1/scripts/setup.sh"; ensure_venv .venv dev'
        return ["bash", "-c", script, "scripts/test", str(self.root)]

    def environment(self, **changes: str) -> dict[str, str]:
        python, notes = str(self.root / "interpreter"), str(self.root / "notes")
        return os.environ | {"PYTHON": python, "NOTES": notes, "PIP_FAILS": ""} | changes

    def set_up(self, **changes: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment(**changes)
        return subprocess.run(self.command(), env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SETUP, root / "scripts")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("trio==1\n")
    (root / "interpreter").write_text(INTERPRETER)
    (root / "interpreter").chmod(0o755)
    return Checkout(root)


def test_it_installs_the_pinned_project_once(checkout):
    first, second = checkout.set_up(), checkout.set_up()
    assert (first.returncode, second.returncode) == (0, 0)
    made, installed = checkout.notes
    assert made == "venv"
    assert installed.endswith(f"-c {checkout.root}/constraints.txt -e {checkout.root}[dev]")
    assert "making .venv" in first.stdout
    assert second.stdout == ""


def test_other_pins_make_another_environment(checkout):
    checkout.set_up()
    (checkout.root / "constraints.txt").write_text("trio==2\n")
    checkout.set_up()
    assert checkout.notes.count("venv") == 2


def test_an_installation_that_failed_is_done_again(checkout):
    failed = checkout.set_up(PIP_FAILS="1")
    assert failed.returncode == 1
    assert "could not be installed" in failed.stderr
    assert checkout.set_up().returncode == 0
    assert checkout.notes.count("venv") == 2


def test_two_at_the_same_time_make_one(checkout):
    options = {"env": checkout.environment(), "stdout": subprocess.DEVNULL}
    processes = [subprocess.Popen(checkout.command(), **options) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert checkout.notes.count("venv") == 1


@pytest.mark.parametrize(
    ("interpreter", "found"),
    [("#!/bin/sh\necho Python 3.9.2\nexit 1\n", "Python 3.9.2"), (None, "none")],
    ids=["too old", "missing"],
)
def test_without_a_python_that_is_new_enough_it_says_so(checkout, interpreter, found):
    (checkout.root / "interpreter").unlink()
    if interpreter is not None:
        (checkout.root / "interpreter").write_text(interpreter)
        (checkout.root / "interpreter").chmod(0o755)
    done = checkout.set_up()
    assert done.returncode == 1
    assert f"Python 3.11 or newer is needed; found: {found}" in done.stderr
