"""Made-up micro-batches of the online verbs' memory plan: those with the most tokens, and with the most of tokens and keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from forge.tasks._fullest_rows import Update, fullest_lines, with_keys
from forge_algos.online.updates._divide import divide_shards


def update_of(prompt_tokens: list[tuple[int, ...]], **more: object) -> Update:
    """An update with small limits."""
    limits = {"groups": len(prompt_tokens), "each": 4, "max_new_tokens": 10, "max_tokens": 100, "max_keys": 800, "shares": True}
    return Update(prompt_tokens=np.array(prompt_tokens), **{**limits, **more})


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 200),
    st.integers(1, 400),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_within_their_limits(prompts, each, new, spare, max_keys, groups, shares, twice):
    """No row has more tokens, keys, prompts or completions of one than a micro-batch may have, and it has what it says."""
    tokens = np.array(prompts)[:, : 2 if twice else 1]
    most = int(tokens.max()) + new + spare
    limits = {"each": each, "max_new_tokens": new, "max_tokens": most, "max_keys": max_keys, "shares": shares}
    update = Update(prompt_tokens=tokens, groups=groups, **limits)
    found = update.fullest()
    assert found
    for row in found:
        used, counts = np.unique(row.prompts, return_counts=True)
        assert len(used) <= groups
        assert counts.max() <= each
        assert row.lengths.min() >= 1
        assert row.lengths.max() <= new
        once = used if shares else row.prompts
        keys = tokens[row.prompts].sum(axis=0) + row.lengths.sum()
        computed = tokens[once].sum(axis=0) + row.lengths.sum()
        assert tokens[once].max(axis=1).sum() + row.lengths.sum() <= most
        if shares and len(row.lengths) > 1:
            assert keys.max() <= max_keys
        assert row.tokens == computed.sum()
        assert row.keys == keys.sum()
        assert update.several(row) or len(row.lengths) == min(groups, len(tokens)) * each


def test_the_fullest_rows_of_long_prompts_have_short_completions() -> None:
    """Tokens and keys are both as many as there may be, with completions shorter than allowed."""
    found = update_of([(500,)] * 10, each=64, max_new_tokens=1000, max_tokens=8192, max_keys=8 * 8192).fullest()
    row = max(found, key=lambda row: with_keys(row.tokens, row.keys))
    assert row.tokens == 8192
    assert row.keys > 7.9 * 8192
    assert row.lengths.sum() < 1000 * len(row.lengths)


def test_a_step_that_fits_one_row_has_no_other() -> None:
    """With the longest completions it is whole, and no micro-batch runs beside its gradients."""
    update = update_of([(5,), (7,)])
    (row,) = {(each.tokens, each.keys): each for each in update.fullest() if len(each.lengths) == 8}.values()
    assert (row.tokens, row.keys) == (12 + 80, 4 * 12 + 80)
    assert not update.several(row)
    assert update_of([(5,), (7,)], max_tokens=91).several(row)


def test_short_completions_fill_a_row_behind_the_prompts_that_add_up_to_it() -> None:
    """43 and 41 with a token each, neither the longest nor the shortest. Behind two prompts both rows count."""
    limits = {"each": 1, "max_new_tokens": 1, "max_tokens": 86, "max_keys": 8 * 86}
    found = update_of([(43,), (42,), (41,), (40,)], **limits).fullest()
    assert max(row.tokens for row in found) == 86
    taught = update_of([(4, 43), (9, 42), (41, 40), (42, 44), (40, 41)], **limits).fullest()
    assert max(row.tokens for row in taught) == (41 + 40 + 2) + (40 + 41 + 2)
    repeated = update_of([(10,), (9,)], each=4, max_new_tokens=1, max_tokens=31, shares=False).fullest()
    assert max(row.tokens for row in repeated) == 31


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.integers(0, 200), st.integers(1, 2))
def test_no_division_into_lines_has_more_places(
    data: st.DataObject, prompts: int, each: int, new: int, spare: int, ranks: int
) -> None:
    """Nor more tokens of images, nor of completions, where every completion has the same length."""
    tokens = np.array(data.draw(st.lists(st.integers(1, 40), min_size=prompts, max_size=prompts)))
    images = np.array([data.draw(st.integers(0, each)) for each in tokens.tolist()])
    owner, own = np.repeat(np.arange(prompts), each), np.full(prompts * each, new)
    most = int(tokens.max()) + new + spare
    shards = divide_shards(
        np.arange(len(owner)), owner, tokens[owner], own, max_tokens=most, data_parallel_size=ranks, share_prompts=False,
        layout="lines",
    )  # fmt: skip
    update = {"groups": prompts, "each": each, "max_new_tokens": new, "max_tokens": most, "ranks": ranks}
    for shuffled in (False, True):
        found = fullest_lines(tokens, images, **update, shuffled=shuffled)
        assert all(row.tokens <= most for row in found)
        for row in (row for shard in shards for row in shard if len(row)):
            taken = owner[row]
            assert len(row) * int((tokens[taken] + new).max()) <= max(each.tokens for each in found)
            assert int(images[taken].sum()) <= max(int(images[each.prompts].sum()) for each in found)
            assert len(row) * new <= max(int(each.lengths.sum()) for each in found)
