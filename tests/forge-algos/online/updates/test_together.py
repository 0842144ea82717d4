"""Completions whose prompts begin alike are put into one micro-batch."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_algos import RolloutError
from forge_algos.online import Beginnings
from forge_algos.online.updates._divide import divide_shards
from forge_algos.online.updates._updates import beginnings_of, packed

LEAST = 4


def tokens_of(prompts, least=LEAST):
    """Count the tokens of prompts in one row, one after another."""
    total, seen = 0, []
    for prompt in prompts:
        most = 0
        for other in seen:
            same = [a == b for a, b in zip(prompt, other, strict=False)]
            most = max(most, same.index(False) if False in same else len(same))
        total += len(prompt) - (most if most >= least else 0)
        seen.append(prompt)
    return total


@st.composite
def steps(draw):
    """Prompts of one kind or two, some behind a system prompt; completions of each, some of them left out; limits."""
    kinds, groups = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    prompts = []
    for kind in range(kinds):
        systems = [[], [90 + kind] * 10, [80 + kind] * 5 + [70] * 8]
        prompts.append(
            [draw(st.sampled_from(systems)) + draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)) for _ in range(groups)]
        )
    each = draw(st.integers(1, 4))
    owner = np.repeat(np.arange(groups), each)
    own = np.array(draw(st.lists(st.integers(1, 9), min_size=len(owner), max_size=len(owner))))
    kept = np.flatnonzero(draw(st.lists(st.booleans(), min_size=len(owner), max_size=len(owner))))
    longest = np.array([max(len(kind[at]) for kind in prompts) for at in range(groups)])
    most = int(longest.max()) + 9 + draw(st.integers(0, 40))
    keys = draw(st.none() | st.integers(1, 8 * most))
    return prompts, owner, own, kept, longest, {"max_tokens": most, "max_keys": keys}


@given(steps(), st.integers(1, 4))
def test_never_more_micro_batches_and_never_more_tokens(step, ranks):
    """Each completion is in one row of one rank, rows are within their limits, ranks have equally many.

    Than without a look at what prompts begin with there are no more micro-batches, and no more tokens are computed; where
    prompts of one kind share nothing, the division is the same.
    """
    prompts, owner, own, kept, longest, limits = step
    divide = partial(divide_shards, kept, owner, longest[owner], own, **limits, data_parallel_size=ranks, share_prompts=True)
    plain = divide()
    alike = [Beginnings(kind, LEAST) for kind in prompts]
    dealt = divide(beginnings=alike)
    assert len(dealt) == ranks
    assert {len(mine) for mine in dealt} == {len(dealt[0])}
    rows = [row for mine in dealt for row in mine]
    assert sorted(np.concatenate([np.zeros(0, int), *rows]).tolist()) == kept.tolist()

    def computed(row):
        """Tokens of the row of each kind of prompts."""
        return [tokens_of([kind[group] for group in np.unique(owner[row])]) + int(own[row].sum()) for kind in prompts]

    for row in rows:
        assert max(computed(row)) <= limits["max_tokens"]
        assert row.tolist() == sorted(row.tolist())
        if limits["max_keys"] is not None and len(row) > 1:
            assert (longest[owner] + own)[row].sum() <= limits["max_keys"]
    assert len(dealt[0]) <= len(plain[0])
    assert sum(sum(computed(row)) for row in rows) <= sum(sum(computed(row)) for mine in plain for row in mine)
    if len(prompts) == 1 and not alike[0].any:
        assert [[row.tolist() for row in mine] for mine in dealt] == [[row.tolist() for row in mine] for mine in plain]
    again = divide(beginnings=[Beginnings(kind, LEAST) for kind in prompts])
    assert [[row.tolist() for row in mine] for mine in again] == [[row.tolist() for row in mine] for mine in dealt]


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_system_prompts_are_in_two_rows(ranks):
    """Of 40 prompts, every other behind one of two system prompts of 100 tokens, each row has one of them."""
    prompts = [[1 + at % 2] * 100 + [at, at + 1] for at in range(40)]
    every, before, own = np.arange(40), np.full(40, 102), np.full(40, 8)
    more = {"max_tokens": 300, "data_parallel_size": ranks, "share_prompts": True}
    plain = divide_shards(every, every, before, own, **more)
    dealt = divide_shards(every, every, before, own, **more, beginnings=[Beginnings(prompts, 16)])
    rows = [row for mine in dealt for row in mine]
    assert [len(set(row % 2)) for row in rows] == [1] * len(rows)
    assert len(plain[0]) == 20 // ranks
    assert len(dealt[0]) == (2 if ranks == 1 else 1)
    assert max(100 + 10 * len(row) for row in rows) <= 300


def test_rows_are_even():
    """A rank's longest row is no longer than its share and a completion."""
    prompts = [[7] * 50 + [at] for at in range(30)]
    every = np.arange(30)
    more = {"max_tokens": 1000, "data_parallel_size": 4, "share_prompts": True, "beginnings": [Beginnings(prompts, 16)]}
    dealt = divide_shards(every, every, np.full(30, 51), np.full(30, 9), **more)
    assert sorted(len(row) for mine in dealt for row in mine) == [6, 8, 8, 8]


def test_what_a_row_has_once_is_what_its_maker_says():
    """Without a maker of rows there is nothing to count on; one that shares less is found by its row."""
    with pytest.raises(RolloutError, match="least_prefix=16: the tokens, 1 or more, from which on collate shares"):
        beginnings_of([[1]], least_prefix=16, collate=None)
    with pytest.raises(RolloutError, match="least_prefix=0"):
        beginnings_of([[1]], least_prefix=0, collate=lambda _: None)
    assert beginnings_of([[1]], least_prefix=None, collate=None) == []

    def collate(groups):
        ids, labels = groups[0][0]
        return type("Row", (), {"input_ids": ids, "targets": labels[labels != -100], "lengths": [1]})

    given = (np.array([0]), np.array([0]), (np.arange(5),), (np.array([7]),))
    assert packed(*given, share_prompts=True, collate=collate, max_tokens=6) is not None
    with pytest.raises(RolloutError, match=r"a row of 6 tokens, where max_tokens is 5: it shares less than share_prompts"):
        packed(*given, share_prompts=True, collate=collate, max_tokens=5)
