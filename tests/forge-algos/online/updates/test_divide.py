"""Cutting a rollout into updates, shards and micro-batches."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_algos import RolloutError
from forge_algos.online.updates._divide import divide_shards, divide_steps


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.integers(0, 5), st.integers(0, 3))
def test_an_update_has_whole_groups_and_a_pass_has_all(groups, each, updates, seed, number):
    """Every completion is in one update of a pass, groups are whole.
    Updates differ by one group at most.
    """
    owner = np.repeat(np.arange(groups) * 3, each)
    steps = divide_steps(owner, updates=updates, seed=seed, number=number)
    assert len(steps) == updates
    assert sorted(np.concatenate(steps).tolist()) == list(range(groups * each))
    sizes = [len(set(owner[step].tolist())) for step in steps]
    assert sum(sizes) == groups
    assert max(sizes) - min(sizes) <= 1


def test_the_order_is_the_seeds():
    """Another pass or seed has another order; one update a pass is not shuffled."""
    owner = np.arange(40)
    orders = {tuple(np.concatenate(divide_steps(owner, updates=4, seed=s, number=n))) for s in (0, 1) for n in (0, 1)}
    assert len(orders) == 4
    assert (divide_steps(owner, updates=1, seed=0, number=1)[0] == owner).all()
    again = divide_steps(owner, updates=4, seed=0, number=1)
    assert all((a == b).all() for a, b in zip(again, divide_steps(owner, updates=4, seed=0, number=1), strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=9)), max_size=9),
    st.integers(18, 60),
    st.none() | st.integers(1, 90),
    st.integers(1, 4),
    st.booleans(),
)
def test_ranks_share_everything_in_rows_that_fit(groups, max_tokens, max_keys, ranks, share):
    """Each completion is in one row of one rank, no row has too many tokens or keys.
    Ranks have equally many rows.
    """
    owner = np.array([g for g, (_, lengths) in enumerate(groups) for _ in lengths], np.int64)
    before = np.array([p for p, lengths in groups for _ in lengths], np.int64)
    own = np.array([n for _, lengths in groups for n in lengths], np.int64)
    dealt = divide_shards(
        np.arange(len(owner)),
        owner,
        before,
        own,
        max_tokens=max_tokens,
        max_keys=max_keys,
        data_parallel_size=ranks,
        share_prompts=share,
    )
    assert len(dealt) == ranks
    assert len({len(mine) for mine in dealt}) == 1
    rows = [row for mine in dealt for row in mine]
    assert sorted(np.concatenate([np.zeros(0, int), *rows]).tolist()) == list(range(len(owner)))
    for row in rows:
        prompts = {owner[i]: before[i] for i in row}.values() if share else before[row]
        assert sum(prompts) + own[row].sum() <= max_tokens
        if share and max_keys is not None and len(row) > 1:
            assert (before + own)[row].sum() <= max_keys


def test_short_completions_of_a_long_prompt_are_divided_by_their_keys():
    """Ten groups of 64 short answers fit two rows by their tokens, and would gather 20 times as many keys."""
    owner, before, own = np.repeat(np.arange(10), 64), np.full(640, 500), np.full(640, 5)

    def rows(max_keys=None):
        (mine,) = divide_shards(
            np.arange(640), owner, before, own, max_tokens=8192, max_keys=max_keys, data_parallel_size=1, share_prompts=True
        )
        return [505 * len(row) for row in mine]

    assert [round(keys / 8192, 1) for keys in rows()] == [19.7, 19.7]
    few = rows(8 * 8192)
    assert max(few) <= 8 * 8192
    # As few as there may be, and even.
    assert len(few) == -(-505 * 640 // (8 * 8192))
    assert max(few) - min(few) <= 505


def test_a_limit_of_keys_that_is_not_reached_changes_nothing():
    """Rows are those without a limit, whatever the lengths."""
    owner = np.repeat(np.arange(20), 4)
    before, own = np.repeat(np.arange(20) % 7 + 3, 4), np.arange(80) % 5 + 6
    more = {"max_tokens": 60, "data_parallel_size": 2, "share_prompts": True}
    free = divide_shards(np.arange(80), owner, before, own, **more)
    limited = divide_shards(np.arange(80), owner, before, own, max_keys=480, **more)
    assert [[row.tolist() for row in rank] for rank in limited] == [[row.tolist() for row in rank] for rank in free]


def test_rows_are_even():
    """A step slightly longer than a row becomes two of half the size; each rank gets work."""
    many = np.arange(22)
    tens = np.full(22, 5)
    (mine,) = divide_shards(many, many, tens, tens, max_tokens=200, data_parallel_size=1, share_prompts=False)
    assert [len(row) for row in mine] == [11, 11]
    dealt = divide_shards(many, many, tens, tens, max_tokens=1000, data_parallel_size=2, share_prompts=False)
    assert [[len(row) for row in rank] for rank in dealt] == [[11], [11]]


def test_what_fits_in_no_row_is_refused():
    """A completion longer than a row is refused with its length and what to do."""
    one = np.array([0])
    with pytest.raises(RolloutError, match="have 11 tokens, but a micro-batch holds max_tokens=10"):
        divide_shards(one, one, np.array([6]), np.array([5]), max_tokens=10, data_parallel_size=1, share_prompts=False)
