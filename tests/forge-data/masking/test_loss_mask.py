"""Character spans → learned tokens, on cases by hand."""

import numpy as np
from hypothesis import given, strategies as st

from forge_data.masking._loss_mask import Span, trained_in_order, trained_tokens


def trained(offsets, spans, added=()):
    flags = np.isin(np.arange(len(offsets)), list(added))
    return np.flatnonzero(trained_tokens(np.array(offsets), spans, flags)).tolist()


def test_through_the_last_added_token():
    """The turn ends with the last added token after the content; blanks before it are learned, after it not."""
    offsets = [(0, 4), (4, 6), (6, 7), (7, 12), (12, 13)]
    assert trained(offsets, [Span(4, 4, 6, 12, 13)], added=[0, 3]) == [1, 2, 3]


def test_added_tokens_within_the_content_end_nothing():
    """A look-alike in the content is no turn end; without a turn end, the closing text is."""
    offsets = [(0, 4), (4, 6), (6, 8), (8, 9), (9, 12), (12, 13)]
    assert trained(offsets, [Span(4, 4, 9, 12, 13)], added=[1]) == [1, 2, 3, 4]


def test_a_token_over_the_border():
    """A token that begins in the header is learned if it holds a character of the content; blanks before it do not count."""
    assert trained([(0, 3), (3, 6)], [Span(4, 4, 6, 6, 6)]) == [1]
    assert trained([(0, 3), (3, 5), (5, 6)], [Span(4, 5, 6, 6, 6)]) == [2]


def test_a_special_token_that_swallows_blanks():
    """A token of the header that took the blanks after it along (rstrip) is not learned for that."""
    assert trained([(0, 6), (6, 8)], [Span(4, 4, 8, 8, 8)], added=[0]) == [1]


def test_a_token_over_the_end():
    """A token with the last character of the content is learned."""
    assert trained([(0, 2), (2, 5)], [Span(0, 0, 3, 3, 5)]) == [0, 1]


def test_empty_tokens():
    """A token that stands for no character is learned only inside a span."""
    offsets = [(0, 0), (0, 2), (2, 2), (2, 4), (4, 4)]
    assert trained(offsets, [Span.plain(2, 4)]) == [3]
    assert trained(offsets, [Span.plain(0, 4)]) == [1, 2, 3]


def test_several_spans():
    """Spans are independent of each other."""
    offsets = [(i, i + 1) for i in range(6)]
    assert trained(offsets, [Span.plain(1, 2), Span.plain(4, 6)]) == [1, 4, 5]
    assert trained(offsets, []) == []


@st.composite
def texts(draw):
    """Draw tokens of a text, which rarely overlap, some of them added, and any spans."""
    places = sorted(draw(st.lists(st.integers(0, 12), max_size=9)))
    ends = np.maximum.accumulate([place + draw(st.integers(0, 3)) for place in places]) if places else []
    spans = draw(st.lists(st.lists(st.integers(0, 15), min_size=5, max_size=5).map(sorted), max_size=3))
    added = draw(st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
    return (
        np.array([places, ends], dtype=np.int64).T.reshape(-1, 2),
        [Span(*span) for span in spans],
        np.array(added, dtype=bool),
    )


@given(st.lists(texts(), min_size=1, max_size=5))
def test_many_texts_at_once(rows):
    """Many texts at once give what each gives alone."""
    firsts = np.cumsum([0, *(len(offsets) for offsets, _, _ in rows)]).tolist()
    apart = 100 * np.arange(len(rows))
    made = trained_in_order(
        np.concatenate([offsets + shift for (offsets, _, _), shift in zip(rows, apart, strict=True)]),
        [Span(*(np.array(span) + shift).tolist()) for (_, spans, _), shift in zip(rows, apart, strict=True) for span in spans],
        np.concatenate([added for _, _, added in rows]),
        [first for (_, spans, _), first in zip(rows, firsts, strict=False) for _ in spans],
    )
    assert made.tolist() == [trained for row in rows for trained in trained_tokens(*row).tolist()]
