"""The ledger: the token ids of a conversation in order, each with where it came from. The truth that KV is a
cache of.

Append-only, but for a cut of sampled tokens that nobody has been shown. It knows no text and no items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class Span(msgspec.Struct):
    """Neighbouring tokens of one origin, up to `end` (exclusive)."""

    end: int
    sampled: bool


class Ledger(msgspec.Struct):
    """Token ids, and spans that tell rendered tokens from sampled ones."""

    tokens: list[int] = []
    spans: list[Span] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def copy(self) -> Ledger:
        """A ledger of its own with the same content."""
        return Ledger(self.tokens.copy(), [Span(span.end, span.sampled) for span in self.spans])

    def append(self, tokens: Sequence[int], *, sampled: bool) -> None:
        """Add tokens at the end."""
        if not tokens:
            return
        self.tokens.extend(tokens)
        if self.spans and self.spans[-1].sampled == sampled:
            self.spans[-1].end = len(self.tokens)
        else:
            self.spans.append(Span(len(self.tokens), sampled))

    def cut(self, length: int) -> None:
        """Drop sampled tokens at the end, down to `length` tokens in all."""
        assert length <= len(self.tokens)
        start = self.spans[-2].end if len(self.spans) > 1 else 0
        assert length == len(self.tokens) or (self.spans[-1].sampled and length >= start), (
            "only tokens of the last sampled span can be cut"
        )
        del self.tokens[length:]
        if length == start and self.spans:
            self.spans.pop()
        elif self.spans:
            self.spans[-1].end = length

    def since(self, start: int) -> Iterator[tuple[list[int], bool]]:
        """The tokens from `start` on, span by span, each with whether it was sampled."""
        begin = 0
        for span in self.spans:
            if span.end > start:
                yield self.tokens[max(begin, start) : span.end], span.sampled
            begin = span.end
