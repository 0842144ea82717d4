"""Numbers with their units in messages."""

from __future__ import annotations

import pytest

from forge._counted import counted, counted_are, figure, first_of


@pytest.mark.parametrize(
    ("things", "one"),
    [
        ("rows", "1 row"),
        ("micro-batches", "1 micro-batch"),
        ("processes", "1 process"),
        ("queries", "1 query"),
        ("others", "1 other"),
        ("short samples", "1 short sample"),
        ("entries", "1 entry"),
    ],
)
def test_one_of_them_is_in_the_singular(things: str, one: str) -> None:
    """Also where the plural is more than an s."""
    assert counted(1, things) == one
    assert [counted(number, things) for number in (0, 2, 1200)] == [f"0 {things}", f"2 {things}", f"1,200 {things}"]


def test_verbs_and_articles_follow() -> None:
    """One token is, two are; the first step, the first 2 steps."""
    assert (counted_are(1, "tokens"), counted_are(2, "tokens")) == ("1 token is", "2 tokens are")
    assert (first_of(1, "steps"), first_of(2, "steps")) == ("the first step", "the first 2 steps")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12.5, "12.5000"), (-0.5, "-0.5000"), (0.00004321, "4.32e-05"), (-0.0087, "-0.0087"), (0, "0.0000"), (-1e-9, "0.0000")],
)
def test_a_small_figure_keeps_its_digits(value: float, shown: str) -> None:
    """The losses of GRPO and of a self-distillation are far below 1: four decimals would show `0.0000` for each step."""
    assert figure(value) == shown
    assert (figure(float("nan")), figure(float("inf"))) == ("nan", "inf")
