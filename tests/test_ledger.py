"""The ledger against a list of (token, sampled) pairs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ledger import Ledger

tokens = st.lists(st.integers(0, 1000), max_size=5)
appends = st.lists(st.tuples(tokens, st.booleans()), max_size=8)


def built(parts: list[tuple[list[int], bool]]) -> tuple[Ledger, list[tuple[int, bool]]]:
    ledger = Ledger()
    plain: list[tuple[int, bool]] = []
    for part, sampled in parts:
        ledger.append(part, sampled=sampled)
        plain += [(token, sampled) for token in part]
    return ledger, plain


def pairs(ledger: Ledger, start: int = 0) -> list[tuple[int, bool]]:
    return [(token, sampled) for part, sampled in ledger.since(start) for token in part]


@given(parts=appends, start=st.integers(0, 40))
def test_since_gives_every_token_with_its_origin_in_as_few_spans_as_there_are(
    parts: list[tuple[list[int], bool]], start: int
) -> None:
    ledger, plain = built(parts)
    assert len(ledger) == len(plain)
    assert pairs(ledger, start) == plain[start:]
    spans = list(ledger.since(start))
    assert all(part for part, _ in spans)
    assert all(a[1] != b[1] for a, b in pairwise(spans))


@given(parts=appends, cut=st.integers(0, 40), more=tokens)
def test_a_cut_takes_sampled_tokens_of_the_end_and_nothing_else(
    parts: list[tuple[list[int], bool]], cut: int, more: list[int]
) -> None:
    ledger, plain = built(parts)
    length = max(0, len(plain) - cut)
    if all(sampled for _, sampled in plain[length:]):
        ledger.cut(length)
        ledger.append(more, sampled=False)
        assert pairs(ledger) == plain[:length] + [(token, False) for token in more]
        assert ledger == built([([token], sampled) for token, sampled in pairs(ledger)])[0]
    else:
        with pytest.raises(AssertionError):
            ledger.cut(length)
        assert pairs(ledger) == plain
