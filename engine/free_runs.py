"""Which blocks are free, as runs of consecutive ones.

Knows numbers only. Strategy: each maximal run is known by both of its ends, so freeing joins neighbours and
taking shortens a run without a search; a heap of sizes, cleaned when it is asked, finds the largest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class FreeRuns:
    """The free blocks as maximal runs, with the largest one at hand."""

    def __init__(self, blocks: int) -> None:
        self.count = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # (-size, stop), stale entries among them; no living run is missing, and none is entered as too small,
        # since runs are taken from the front and joining enters anew
        self._by_size: list[tuple[int, int]] = []
        if blocks:
            self.add(0, blocks)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._stop_of.items())

    def add(self, start: int, stop: int) -> None:
        """Free the blocks `start` to `stop`, joining them with free neighbours."""
        self.count += stop - start
        before = self._start_of.pop(start, None)
        if before is not None:
            start = before
        after = self._stop_of.pop(stop, None)
        if after is not None:
            stop = after
        self._put(start, stop)

    def take_from(self, start: int, wanted: int) -> int:
        """Take up to `wanted` blocks of the run that begins at `start`; how many (0: no such run)."""
        stop = self._stop_of.get(start)
        if stop is None:
            return 0
        taken = min(wanted, stop - start)
        del self._stop_of[start]
        self.count -= taken
        if start + taken < stop:
            self._stop_of[start + taken] = stop
            self._start_of[stop] = start + taken
        else:
            del self._start_of[stop]
        return taken

    def largest(self) -> tuple[int, int] | None:
        """The largest run as (start, stop)."""
        while self._by_size:
            negative_size, stop = self._by_size[0]
            start = self._start_of.get(stop)
            if start is not None and stop - start == -negative_size:
                return start, stop
            heapq.heappop(self._by_size)
            if start is not None and stop - start < -negative_size:
                heapq.heappush(self._by_size, (start - stop, stop))
        return None

    def split(self, start: int, stop: int, at: int) -> None:
        """Make two runs of the run `start` to `stop`, the second beginning at `at`."""
        if start < at < stop:
            self._put(start, at)
            self._put(at, stop)

    def _put(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        heapq.heappush(self._by_size, (start - stop, stop))
        if len(self._by_size) > 4 * len(self._stop_of) + 64:  # mostly stale
            self._by_size = [(start - stop, stop) for start, stop in self._stop_of.items()]
            heapq.heapify(self._by_size)
