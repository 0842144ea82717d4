"""fill: rows completed one after another; pack: the fewer rows of fill and best fit."""

from hypothesis import given, settings

from forge_packing.dividing.kernels import _fill
from forge_packing.dividing.kernels._best_fit import best_fit
from forge_packing.dividing.kernels._fill import fill, pack

from ...naive import partitions, steps


@settings(deadline=None, max_examples=300)
@given(steps())
def test_exact_rows(step):
    """Every sample is in a row, no row is empty or over capacity."""
    lengths, capacity, _ = step
    lengths = sorted(lengths, reverse=True)
    row_of = [-1] * len(lengths)
    rows = fill(lengths, capacity, row_of)
    loads = [sum(length for length, at in zip(lengths, row_of, strict=True) if at == row) for row in range(rows)]
    assert min(loads) >= 1
    assert max(loads) <= capacity
    assert sum(loads) == sum(lengths)


@settings(deadline=None, max_examples=300)
@given(steps(most_samples=8))
def test_the_first_row_is_as_full_as_can_be(step):
    """No set of samples with the longest of all fills a row better, where the search is not cut short."""
    lengths, capacity, _ = step
    lengths = sorted(lengths, reverse=True)
    row_of = [-1] * len(lengths)
    fill(lengths, capacity, row_of)
    first = sum(length for length, at in zip(lengths, row_of, strict=True) if at == 0)
    assert first == max(sum(lengths[i] for i in rows[0]) for rows in partitions(lengths, capacity))


@settings(deadline=None, max_examples=300)
@given(steps())
def test_pack_takes_the_better(step):
    """Never more rows than either; best fit alone where that cannot be beaten."""
    lengths, capacity, _ = step
    lengths = sorted(lengths, reverse=True)
    packed, fitted, filled = ([-1] * len(lengths) for _ in range(3))
    best = min(best_fit(lengths, capacity, fitted), fill(lengths, capacity, filled))
    assert pack(lengths, capacity, 0, packed) == best == max(packed) + 1
    pack(lengths, capacity, len(lengths), packed)
    assert packed == fitted


def test_large_inputs_are_left_to_best_fit(monkeypatch):
    """Beyond MOST samples nothing is searched: a row saved there is not worth the time."""
    lengths, row_of = [11, 8, 3, 2, 2, 2, 2], [-1] * 7
    assert pack(lengths, 15, 2, row_of) == 2
    monkeypatch.setattr(_fill, "MOST", 6)
    assert pack(lengths, 15, 2, row_of) == 3


def test_the_search_ends():
    """A row for which no set fits exactly is given up after TRIES, not after all sets."""
    lengths = [2**20] + [1000 + 2 * i for i in range(60, 0, -1)]  # odd space, even samples
    row_of = [-1] * len(lengths)
    assert fill(lengths, 2**20 + 30_001, row_of) == 2
