"""The fixture `server`: one real server for all tests that leave it as they found it.

A pytest plugin: a test module says `pytest_plugins = ["shared_server"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import SCRIPTS, RealServer, write_script


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every server's scripts; a test may not add to it."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, legs in SCRIPTS.items():
        write_script(folder, name, *legs)
    return folder


@pytest.fixture(scope="session")
def server(scripts: Path) -> Iterator[RealServer]:
    """A server that is ready, shared: leave it as you found it."""
    with RealServer(f"--script={scripts}") as server:
        server.wait_for("models_ready")
        yield server
