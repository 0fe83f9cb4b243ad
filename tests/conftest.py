"""What holds for all tests: how long they search, and that none hangs.

Property tests try few examples, always the same ones, so that the suite is quick and says the same twice.
`FERMATA_EXAMPLES=500 pytest` tries that many in each, other ones every time; failures print how to repeat
them.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Iterator

import pytest
import structlog
import trio
from hypothesis import HealthCheck, Phase, settings

QUICK_EXAMPLES = 20
HANGS_AFTER = 600.0  # s of real time in one test: a deadline on a virtual clock does not catch a busy loop

STDERR = pytest.StashKey[int]()

examples = int(os.environ.get("FERMATA_EXAMPLES", "0"))
settings.register_profile(
    "fermata",
    max_examples=examples or QUICK_EXAMPLES,
    derandomize=not examples,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate, Phase.target, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fermata")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # tests' own is captured, and lost when the process ends


@pytest.fixture(autouse=True)
def _no_hanging(request: pytest.FixtureRequest) -> Iterator[None]:
    """Show where a test hangs, and end everything, instead of waiting for ever."""
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """trio runs tasks that are ready in a random order: the same one in every test, unless we search."""
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", not examples)
    trio._core._run._r.seed(None if examples else 0)


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> Iterator[None]:
    """Logs of what is tested are noise, but for errors."""
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    yield
    structlog.configure(wrapper_class=before)
