"""From items to tokens: filter, render, tokenise, each new item once. It knows a dialect and a filter, no
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from protocol import wire
from protocol.dialects.base import Dialect, Fragment, RenderingError
from protocol.errors import RequestError, context_too_long, nested_too_deeply
from protocol.filters import Filters
from protocol.work import Work

# Characters. Tokenising more takes over a millisecond, which the event loop should not lose.
TOKENISE_IN_THREAD = 16_384
CHARACTERS_A_TOKEN = 8  # prose and code have 3 to 5; a text with more is looked at in parts first
CUT_COSTS = 64  # tokens that the end of a part may come to beyond what it is in the whole text


class Intake:
    """How the input of one run becomes tokens. `tools` are those that the model is told of, `limit` the most
    tokens that can be of any use.
    """

    def __init__(self, dialect: Dialect, filters: Filters, tools: Sequence[wire.Tool], *, limit: int) -> None:
        self._dialect = dialect
        self._filters = filters
        self._tools = tools
        self._limit = limit

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
        work.characters_rendered += characters(fragment)
        with work.timed("tokenise"):
            await self._check_may_fit(fragment, work)
            return await self._tokenize(fragment, work)

    async def _check_may_fit(self, fragment: Fragment, work: Work) -> None:
        """Refuse a text far beyond the limit for what its first part comes to: it must not cost what it is
        long. Raises RequestError.
        """
        length = CHARACTERS_A_TOKEN * self._limit
        while length < characters(fragment):
            tokens = await self._tokenize(first_part(fragment, length), work)
            if len(tokens) > self._limit + CUT_COSTS:
                raise context_too_long(len(tokens), self._limit)
            length *= 2

    async def _tokenize(self, fragment: Fragment, work: Work) -> list[int]:
        length = characters(fragment)
        work.characters_tokenised += length
        if length < TOKENISE_IN_THREAD:
            return self._dialect.tokenize(fragment)
        return await trio.to_thread.run_sync(self._dialect.tokenize, fragment)


def first_part(fragment: Fragment, length: int) -> Fragment:
    """The beginning of a fragment, with this many characters of text at most."""
    part: Fragment = []
    for piece in fragment:
        if isinstance(piece, str):
            piece = piece[:length]
            length -= len(piece)
        part.append(piece)
        if length <= 0:
            break
    return part


def characters(fragment: Fragment) -> int:
    """Characters of text in a fragment; control tokens are none."""
    return sum(len(part) for part in fragment if isinstance(part, str))
