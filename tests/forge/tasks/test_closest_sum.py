"""Sizes that fill a limit best."""

from __future__ import annotations

from itertools import product

from hypothesis import given, strategies as st

from forge.tasks._closest_sum import closest_sum


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=6), st.integers(0, 40))
def test_no_choice_comes_closer(sizes: list[tuple[int, int]], limit: int) -> None:
    """Beside all choices of sizes and all that each may be."""
    bounds = [(low, low + more) for low, more in sizes]

    def largest(chosen: list[int]) -> int:
        """The largest sum within the limit, 0 for none."""
        ways = product(*(range(bounds[at][0], bounds[at][1] + 1) for at in chosen))
        return max((sum(way) for way in ways if sum(way) <= limit), default=0)

    every = [[at for at, taken in enumerate(which) if taken] for which in product((False, True), repeat=len(bounds))]
    found = closest_sum(bounds, limit)
    assert found in every
    assert largest(found) == max(map(largest, every))
