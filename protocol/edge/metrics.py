"""What /metrics says: the statistics of the server's parts, for Prometheus. It counts nothing itself.

Strategy: one collector, asked at scrape time, that only reads. A part says what it knows as a section,
``{"runs": {"active": 3, "ended_total": {"completed": 5, "failed": 1}}}``, and the names follow from it:
``fermata_runs_active``, ``fermata_runs_ended_total{kind="completed"}``. A name ends in its unit; one that
ends in ``_total`` only grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias

import trio
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PROBE_INTERVAL = 0.1  # s; ten wakes a second cost nothing and miss no stall that a person would feel
LATENESS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # s


class Histogram:
    """How often which sizes were seen. `bounds` are upper, inclusive, ascending; one more has no bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


Value: TypeAlias = float | Mapping[str, float] | Histogram
Sections: TypeAlias = Mapping[str, Mapping[str, Value]]


class LatenessProbe:
    """How late the event loop wakes a task that slept: what every callback of ours costs everybody else."""

    def __init__(self) -> None:
        self._seconds = Histogram(LATENESS_BOUNDS)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = trio.current_time() + PROBE_INTERVAL
            await trio.sleep_until(due)
            self._seconds.observe(trio.current_time() - due)

    def statistics(self) -> dict[str, Value]:
        """The section "loop"."""
        return {"lateness_seconds": self._seconds}


class Exposition(Collector):
    """The text of /metrics. `sections` is called for each scrape, on the event loop, and must not wait."""

    def __init__(self, sections: Callable[[], Sections]) -> None:
        self._sections = sections
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files of this process

    def text(self) -> bytes:
        """All metrics, as of now."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for section, values in self._sections().items():
            for name, value in values.items():
                yield _metric(f"fermata_{section}_{name}", value)


def _metric(name: str, value: Value) -> Metric:
    help_text = name.removeprefix("fermata_").replace("_", " ")
    if isinstance(value, Histogram):
        edges = [*map(str, value.bounds), "+Inf"]
        buckets = list(zip(edges, map(float, accumulate(value.counts)), strict=True))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=value.sum)
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return family(name, help_text, value=float(value))
    labelled = family(name, help_text, labels=["kind"])
    for kind, number in value.items():
        labelled.add_metric([kind], float(number))
    return labelled
