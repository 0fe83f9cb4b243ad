"""From items to tokens: filter, render, tokenise, each new item once. It knows a dialect and a filter, no
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from protocol import wire
from protocol.dialects.base import Dialect, Fragment, RenderingError
from protocol.errors import RequestError, nested_too_deeply
from protocol.filters import Filters
from protocol.work import Work

# Characters. Tokenising more takes over a millisecond, which the event loop should not lose.
TOKENISE_IN_THREAD = 16_384


class Intake:
    """How the input of one run becomes tokens. `tools` are those that the model is told of."""

    def __init__(self, dialect: Dialect, filters: Filters, tools: Sequence[wire.Tool]) -> None:
        self._dialect = dialect
        self._filters = filters
        self._tools = tools

    async def opening(self, instructions: str | None, work: Work) -> list[int]:
        """The tokens that a conversation with these instructions begins with. As `items` otherwise."""
        return await self._tokens(lambda: self._dialect.opening(instructions, self._tools), work)

    async def items(self, items: Sequence[wire.Item], work: Work, param: str = "input") -> list[int]:
        """The tokens of new items. What it takes is counted in `work`.

        Waits only while long texts are tokenised in a thread. Cancelled, it has changed nothing but `work`.
        Raises RequestError.
        """
        with work.timed("safety_in"):
            items = self._filters.input(items, param)
        return await self._tokens(lambda: self._dialect.items(items), work)

    async def _tokens(self, render: Callable[[], Fragment], work: Work) -> list[int]:
        try:
            with work.timed("render"):
                fragment = render()
        except RenderingError as error:
            raise RequestError(str(error), param=error.param) from error
        except RecursionError as error:
            raise nested_too_deeply() from error
        characters = sum(len(part) for part in fragment if isinstance(part, str))
        work.characters_rendered += characters
        work.characters_tokenised += characters
        with work.timed("tokenise"):
            if characters < TOKENISE_IN_THREAD:
                return self._dialect.tokenize(fragment)
            return await trio.to_thread.run_sync(self._dialect.tokenize, fragment)
