"""Creates with an `event_id`: sent again, they find the run that they made.

It knows runs and who made them. Strategy: retries come within seconds, so the newest are remembered, bounded
in number and, of runs that have ended, in bytes. One that was forgotten is made anew.
"""

from __future__ import annotations

from collections import OrderedDict

from protocol.response import Run
from protocol.state import Phase

MAX_REMEMBERED = 128  # creates
MAX_ENDED_BYTES = 32 << 20  # of ended runs: four of the largest logs, or hundreds of usual ones
BYTES_A_TOKEN = 36  # of a ledger: a reference, and an int


class Retries:
    """The creates that can be sent again."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()  # by owner and event_id, oldest first

    def find(self, owner: str, event_id: str | None) -> Run | None:
        """The run that this create made."""
        return None if event_id is None else self._runs.get((owner, event_id))

    def remember(self, run: Run) -> None:
        """Its create may be sent again, if it has an `event_id`."""
        event_id = run.state.request.event_id
        if event_id is not None:
            self._runs[run.state.owner, event_id] = run
            while len(self._runs) > MAX_REMEMBERED:
                self._runs.popitem(last=False)

    def forget(self, run: Run) -> None:
        """Its create, sent again, makes another run."""
        event_id = run.state.request.event_id
        if event_id is not None and self._runs.get((run.state.owner, event_id)) is run:
            del self._runs[run.state.owner, event_id]

    def trim(self) -> None:
        """A run has ended: forget the oldest of those that have until the rest is within bounds."""
        size = self.size
        for run in self._ended:
            if size <= MAX_ENDED_BYTES:
                break
            size -= _size(run)
            self.forget(run)

    @property
    def size(self) -> int:
        """About how many bytes the ended runs keep."""
        return sum(map(_size, self._ended))

    @property
    def _ended(self) -> list[Run]:
        return [run for run in self._runs.values() if run.state.phase is Phase.ENDED]


def _size(run: Run) -> int:
    """Its events, what was sent for it, its tokens."""
    ledger = BYTES_A_TOKEN * len(run.state.ledger)
    return run.log.statistics()["bytes"] + run.state.work.bytes_in + ledger
