"""The two places where what passes through a run can be looked at, changed, held back or refused.

`input` stands before rendering: every item that comes from outside passes it once. `output` stands between
the parser and the event log: everything the model says passes it once. These here let everything pass; a
stricter pair takes their place with the same three methods.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.dialects.base import Parsed
from protocol.wire import Item


class Filters:
    """Both filters of one run. Stateless, so there is nothing to write down with the run."""

    def input(self, items: Sequence[Item], param: str) -> Sequence[Item]:
        """What is to be rendered instead of these new items. Raises RequestError to refuse them; `param` is
        their path.
        """
        return items

    def output(self, parsed: Sequence[Parsed]) -> Sequence[Parsed]:
        """What may be shown now, in order; the rest is kept for a later call."""
        return parsed

    def flush(self) -> Sequence[Parsed]:
        """The leg is over: whatever was kept."""
        return ()
