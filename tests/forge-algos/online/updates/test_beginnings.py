"""What prompts begin with alike."""

import numpy as np
from hypothesis import given, strategies as st

from forge_algos.online import Beginnings

PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def common(one, other):
    """Count the first tokens that two prompts share, one after another."""
    size = 0
    while size < min(len(one), len(other)) and one[size] == other[size]:
        size += 1
    return size


@given(PROMPTS, st.integers(1, 6), st.randoms())
def test_a_prompt_adds_what_none_before_it_begins_with(prompts, least, random):
    """In any order, counted pair by pair; together they take the same in each order."""
    found = Beginnings(prompts, least)
    totals = set()
    for _ in range(2):
        order = list(range(len(prompts)))
        random.shuffle(order)
        added = found.added(order)
        for at, number in enumerate(order):
            most = max((common(prompts[number], prompts[other]) for other in order[:at]), default=0)
            assert added[at] == len(prompts[number]) - (most if most >= least else 0)
        totals.add(int(added.sum()))
    assert len(totals) == 1
    every = range(len(prompts))
    pairs = np.array([(a, b) for a in every for b in every if a != b], np.int64).reshape(-1, 2)
    shared = [common(prompts[a], prompts[b]) for a, b in pairs]
    assert found.shared(pairs[:, 0], pairs[:, 1]).tolist() == [size if size >= least else 0 for size in shared]
    assert found.any == any(size >= least for size in shared)


@given(PROMPTS)
def test_neighbours_have_most_in_common(prompts):
    """In `order` none has more in common with any before it than with its neighbour; each prompt comes once."""
    order = Beginnings(prompts, 1).order.tolist()
    assert sorted(order) == list(range(len(prompts)))
    for at, number in enumerate(order[1:], 1):
        every = [common(prompts[number], prompts[other]) for other in order[:at]]
        assert every[-1] == max(every)
