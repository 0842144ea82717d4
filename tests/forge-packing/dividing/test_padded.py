"""Padded micro-batches: as wide as their widest line, within max_tokens with the padding counted."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, divide, plan

WIDTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def places(rows, widths, lines):
    return [int(lines[row].sum() * widths[row].max()) if row.size else 0 for row in rows]


@settings(deadline=None, max_examples=300)
@given(WIDTHS, st.integers(24, 60), st.integers(1, 4), st.data())
def test_laws_of_a_padded_division(widths, max_tokens, ranks, data):
    """Exact partition, as many on every rank, ascending indices, and no micro-batch over max_tokens places."""
    lines = np.array(data.draw(st.lists(st.integers(1, 2), min_size=len(widths), max_size=len(widths))))
    widths = np.array(widths)
    found = divide(widths * lines, max_tokens=max_tokens, world_size=ranks, widths=widths, lines=lines)
    (count,) = {len(rank) for rank in found}
    rows = [row for rank in found for row in rank]
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(widths)))
    assert all((np.diff(row) > 0).all() for row in rows)
    assert max(places(rows, widths, lines)) <= max_tokens
    assert sum(row.size > 0 for row in rows) > (count - 1) * ranks


def fewest(widths, max_tokens):
    """Return the fewest micro-batches of any division, by trying all."""
    best = len(widths)

    def place(at, bins):
        nonlocal best
        if len(bins) >= best:
            return
        if at == len(widths):
            best = len(bins)
            return
        for number, held in enumerate(bins):
            more = [*held, widths[at]]
            if len(more) * max(more) <= max_tokens:
                place(at + 1, [*bins[:number], more, *bins[number + 1 :]])
        place(at + 1, [*bins, [widths[at]]])

    place(0, [])
    return best


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(9, 30))
def test_there_are_no_fewer_micro_batches(widths, max_tokens):
    """With one line a sample there are as few as any division has."""
    (rank,) = divide(widths, max_tokens=max_tokens, widths=widths)
    assert len(rank) == fewest(widths, max_tokens)


def test_a_long_row_stands_alone(tmp_path):
    """One row of 6,000 tokens among a thousand of 8 is no forward of a thousand times 6,000 places."""
    lengths = np.array([8] * 500 + [6000] + [8] * 500)
    made = plan(lengths, batch_size=1001, max_tokens=8192, widths=lengths + 20)
    rows = made.micro_batches(0)
    assert max(made.places(row) for row in rows) <= 8192
    assert len(rows) == 5
    assert [row.size for row in rows if 500 in row] == [1]
    made.check()
    assert made.places([500, 0]) == 2 * 6020
    assert plan(lengths, batch_size=1001, max_tokens=16384).places([500, 0]) == 6008
    # Padding only divides a step: the order is the same, and a saved plan is the same plan.
    plain = plan(lengths, batch_size=1001, max_tokens=8192)
    assert made.order_fingerprint == plain.order_fingerprint
    assert made.fingerprint != plain.fingerprint
    made.save(tmp_path / "plan.npz")
    loaded = type(made).load(tmp_path / "plan.npz")
    assert loaded.fingerprint == made.fingerprint
    assert [row.tolist() for row in loaded.micro_batches(0)] == [row.tolist() for row in rows]
    assert [row.tolist() for row in made.until(epochs=2, max_steps=None).micro_batches(0)] == [row.tolist() for row in rows]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lines": [1, 1]}, "give widths too"),
        ({"widths": [1]}, "one entry a sample"),
        ({"widths": [0, 3]}, "at least 1, found 0"),
        ({"widths": [9, 3]}, "sample 0 takes 9 places, more than max_tokens=8"),
        ({"widths": [5, 3], "lines": [2, 1]}, "sample 0 takes 10 places"),
    ],
)
def test_padding_that_cannot_be_is_refused(more, message):
    """One error says what and where."""
    with pytest.raises(PackingError, match=message):
        plan([4, 3], batch_size=2, max_tokens=8, **more)
    with pytest.raises(PackingError, match=message):
        divide([4, 3], max_tokens=8, **more)
