"""Counts of rows and tokens that must add up."""

import pickle

import pytest

from forge_data import Accounting


def test_balance():
    """Kept and dropped add up to read, in text too."""
    books = Accounting(10, 7, {"too_long": 3})
    assert str(books) == "kept 7 of 10 rows; dropped 3 too_long"
    assert books.as_dict() == {
        "read": 10, "kept": 7, "dropped": {"too_long": 3}, "samples": 7, "tokens_read": 0, "tokens_kept": 0, "tokens_lost": {},
        "forms": {},
    }  # fmt: skip
    assert str(Accounting(2000, 2000)) == "kept 2,000 of 2,000 rows"


def test_tokens_balance():
    """Tokens add up too; what was cut off kept rows is listed beside what was dropped."""
    books = Accounting(10, 7, {"too_long": 3}, 9, 1000, 700, {"too_long": 250, "truncated": 50})
    assert str(books) == "kept 7 of 10 rows as 9 samples; dropped 3 too_long; lost 50 tokens truncated"
    books = Accounting(3, 3, samples=4, forms={"one_sample_a_turn": 1, "enable_thinking=false": 3})
    assert str(books) == "kept 3 of 3 rows as 4 samples; rendered 3 enable_thinking=false, 1 one_sample_a_turn"


@pytest.mark.parametrize(
    "counts",
    [
        (10, 7, {"x": 2}),
        (1, 2, {"x": -1}),
        (1, True, {}),
        (1.0, 1, {}),
        (2, 2, {}, 1),
        (2, 2, {}, 2, 10, 9),
        (2, 2, {}, 2, 10, 9, {"x": 2}),
        (2, 2, {}, 2, 10, 11, {"x": -1}),
    ],
)
def test_no_balance(counts):
    """Counts that do not add up, or are not counts, are refused."""
    with pytest.raises(ValueError, match="add up|whole and not negative|each becomes one at least"):
        Accounting(*counts)


def test_travels():
    """It cannot be changed, and it pickles."""
    books = Accounting(10, 7, {"b": 2, "a": 1}, 8, 20, 15, {"a": 5})
    with pytest.raises(TypeError):
        books.dropped["c"] = 3
    assert pickle.loads(pickle.dumps(books)) == books
    assert Accounting(**books.as_dict()) == books
