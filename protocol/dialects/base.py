"""What a dialect is: items to text to tokens, and sampled tokens back to parts of items.

A dialect knows one model family's chat template, tool-call syntax, reasoning marks and stop tokens. It does
not know runs, events, sockets, or how tokens are sampled.

Strategy. The ledger of a conversation is append-only: what was sampled stays as sampled, and only new items
are rendered. So a dialect never renders a history. It writes three kinds of fragment, and a conversation is
their concatenation:

    opening      instructions and tools, once, at the head
    items        any run of new items, after the opening, after other items, or after a sampled turn
    turn start   what makes the model speak

Rendering (characters) and tokenising (ids) are two calls because they are two costs. A fragment is a list of
control token ids and plain strings: text that came from outside can only ever be in the strings, so it can
never become a control token, whatever it spells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from protocol.wire import Item, Tool

Fragment: TypeAlias = "list[int | str]"
"""Control token ids and plain text, in order."""


class RenderingError(Exception):
    """The items cannot be written in this dialect: `param` is the path of the offending field
    (``input[2].content[0]``).
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


# What a parser reads out of sampled tokens. Indices and ids are not its business.


class TextDelta(msgspec.Struct, frozen=True):
    """More of the assistant's message."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A call to a tool of the request: its name is complete and known. `custom`: free text instead of JSON
    arguments.
    """

    name: str
    namespace: str | None = None
    custom: bool = False


class CallDelta(msgspec.Struct, frozen=True):
    """More of the open call's arguments (JSON text, as sampled) or input (free text)."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The open call is over. `complete` is False if it broke: cut off, or arguments that are not a JSON
    object.
    """

    complete: bool


class Malformed(msgspec.Struct, frozen=True):
    """Something looked like a call and was not; its text was (or will be) given as `TextDelta`. For counting
    and logs.
    """

    why: str


Parsed: TypeAlias = TextDelta | ReasoningDelta | CallStarted | CallDelta | CallEnded | Malformed


class Parser(Protocol):
    """Reads one model turn, incrementally: no token is looked at twice. Deterministic: the same tokens fed in
    any grouping give the same concatenated text, the same calls and the same order.
    """

    def feed(self, tokens: Sequence[int]) -> list[Parsed]:
        """What these further tokens make known. Text that may still turn out to be a mark, or half a UTF-8
        character, waits.
        """
        ...

    def finish(self) -> list[Parsed]:
        """The turn is over (stop token, length, cut): what was still waiting. A call still open is cut."""
        ...


class Dialect(Protocol):
    """One model family's way of writing. Stateless and shared by all runs; methods do no I/O."""

    name: str
    stop_tokens: tuple[int, ...]

    def opening(
        self, instructions: str | None, tools: Sequence[Tool], tool_choice: object = "auto"
    ) -> Fragment:
        """The head of a conversation; may be empty.

        Raises RenderingError.
        """
        ...

    def items(self, items: Sequence[Item]) -> Fragment:
        """New items, in order. Neighbouring assistant items (message, reasoning, calls) are one model turn,
        closed.

        Raises RenderingError.
        """
        ...

    def turn_start(self) -> Fragment:
        """What comes before the model speaks."""
        ...

    def turn_end(self, last_token: int) -> Fragment:
        """What closes a sampled turn whose last token is this one: less if the model sampled its stop token
        itself.
        """
        ...

    def sampled(self, items: Sequence[Item]) -> Fragment:
        """What the model would have to sample to say these output items as one turn, its stop token included
        (forced legs).
        """
        ...

    def tokenize(self, fragment: Fragment) -> list[int]:
        """Token ids of a fragment; its strings never yield control tokens."""
        ...

    def parser(self, tools: Sequence[Tool]) -> Parser:
        """A fresh parser for one model turn in which these tools may be called."""
        ...
