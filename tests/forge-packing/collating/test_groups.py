"""collate_groups: one flat row, from which every completion can be read back, its prompt there once or each time."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate, collate_groups

TOKENS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-100, -100, 1, 7])), max_size=6)


@st.composite
def groups(draw):
    """Groups of 1 to 5 (input_ids, labels): mostly a prompt in common, few different tokens so that more than it may agree."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        prompt = [(token, -100) for token, _ in draw(TOKENS)]
        completions = draw(st.lists(TOKENS, min_size=1, max_size=5))
        group = [(prompt if draw(st.integers(0, 9)) else []) + completion for completion in completions]
        group = [sample or [(1, 1)] for sample in group]
        found.append([([token for token, _ in sample], [label for _, label in sample]) for sample in group])
    return found


def shared_tokens(group):
    """The longest beginning in which all examples have the same tokens and nothing learned, and which is the whole of none."""
    size = 0
    while len(group) > 1 and all(
        len(ids) > size + 1 and ids[size] == group[0][0][size] and (size == 0 or labels[size] == -100) for ids, labels in group
    ):
        size += 1
    return size


def sight(batch):
    """Of each completion, the positions in the row of all that it sees."""
    if batch.kv_rows is None:
        return [np.arange(start, stop) for start, stop in pairwise(batch.cu_seqlens)]
    return [batch.kv_rows[start:stop] for start, stop in pairwise(batch.cu_seqlens_k)]


@settings(deadline=None, max_examples=200)
@given(groups(), st.booleans())
def test_every_completion_can_be_read_back(drawn, share):
    """What a segment sees is its completion's whole example, at positions 0, 1, 2, ..., and its queries are the end of that."""
    batch = collate_groups(drawn, share_prompt=share)
    cu = batch.cu_seqlens
    examples = [example for group in drawn for example in group]
    assert cu.size == len(examples) + 1
    assert (cu[0], cu[-1]) == (0, batch.input_ids.size)
    assert batch.max_seqlen == max(np.diff(cu), default=0)
    prompts = [shared_tokens(group) if share else 0 for group in drawn]
    assert (batch.kv_rows is None) == (not any(prompts))
    seen = sight(batch)
    for (ids, _), own, (start, stop) in zip(examples, seen, pairwise(cu.tolist()), strict=True):
        assert batch.input_ids[own].tolist() == ids
        assert batch.position_ids[own].tolist() == list(range(len(ids)))
        assert own[start - stop :].tolist() == list(range(start, stop))
    assert batch.ends.tolist() == [int(own[-1]) for own in seen]
    assert batch.group_sizes.tolist() == [len(group) for group in drawn]
    # A shared prompt is there once, and no token is there for nothing.
    tokens = [len(ids) for ids, _ in examples]
    assert batch.input_ids.size == sum(tokens) - sum(p * (len(g) - 1) for p, g in zip(prompts, drawn, strict=True))
    if batch.kv_rows is not None:
        assert batch.kv_rows.size == sum(tokens) == batch.cu_seqlens_k[-1]
        assert batch.max_seqlen_k == max(tokens)


@settings(deadline=None, max_examples=200)
@given(groups(), st.booleans())
def test_every_learned_token_is_scored_once_from_the_token_before_it(drawn, share):
    """All of an example's learned tokens but its first, in order, each from the position of the token before it."""
    batch = collate_groups(drawn, share_prompt=share)
    rows, targets, lengths = [], [], []
    for (ids, labels), own in zip([example for group in drawn for example in group], sight(batch), strict=True):
        learned = [at for at in range(1, len(ids)) if labels[at] != -100]
        rows += [own[at - 1] for at in learned]
        targets += [labels[at] for at in learned]
        lengths.append(len(learned))
    assert batch.rows.tolist() == rows
    assert batch.targets.tolist() == targets
    assert batch.lengths.tolist() == lengths


@settings(deadline=None)
@given(groups())
def test_without_sharing_it_is_collate(drawn):
    """The same row as collate makes of all examples, so that nothing but the forward's work changes by sharing."""
    batch, plain = collate_groups(drawn), collate([example for group in drawn for example in group])
    for name in ("input_ids", "position_ids", "cu_seqlens"):
        assert np.array_equal(getattr(batch, name), getattr(plain, name))
    learned = np.flatnonzero(plain.labels != -100)
    assert batch.rows.tolist() == (learned - 1).tolist()
    assert batch.targets.tolist() == plain.labels[learned].tolist()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("drawn", [[], [[([1, 2, 3], [-100, 2, 3]), ([1, 2, 4], [-100, -100, 4])]]])
def test_types(drawn, share):
    """Indices are int64 and ends int32, in an empty row too; sizes are Python's ints."""
    batch = collate_groups(drawn, share_prompt=share)
    for name in ("input_ids", "position_ids", "rows", "targets", "lengths", "ends", "group_sizes"):
        assert (name, getattr(batch, name).dtype) == (name, np.int64)
    assert batch.cu_seqlens.dtype == np.int32
    assert type(batch.max_seqlen) is int
    if drawn and share:
        assert (batch.kv_rows.dtype, batch.cu_seqlens_k.dtype, type(batch.max_seqlen_k)) == (np.int64, np.int32, int)
    else:
        assert (batch.kv_rows, batch.cu_seqlens_k, batch.max_seqlen_k) == (None, None, None)


def test_no_groups_are_an_empty_row():
    """A rank without work in this pass."""
    batch = collate_groups([], share_prompt=True)
    assert batch.cu_seqlens.tolist() == [0]
    assert (batch.input_ids.size, batch.rows.size, batch.ends.size, batch.group_sizes.size, batch.max_seqlen) == (0,) * 5


def test_a_prompt_is_what_no_example_learns():
    """A common token that one example learns is not shared, for it has two losses; nor are the masked ones after it."""
    one, other = ([5, 6, 7, 8, 9], [-100, -100, 7, -100, 9]), ([5, 6, 7, 8, 4], [-100, -100, -100, -100, 4])
    batch = collate_groups([[one, other]], share_prompt=True)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 7, 8, 4]
    assert batch.rows.tolist() == [1, 3, 6]


def test_examples_stay_as_they_are():
    """Objects with more fields, read-only arrays and generators of groups are welcome, and the row is no view of them."""
    ids = np.array([1, 2, 3], dtype=np.int32)
    ids.setflags(write=False)
    batch = collate_groups([example] for example in [SimpleNamespace(input_ids=ids, labels=ids, more=1), (ids, ids)])
    batch.input_ids[:] = 0
    batch.targets[:] = 0
    assert ids.tolist() == [1, 2, 3]
    assert batch.group_sizes.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([], r"group 1 is a list without examples: .*\[chosen, rejected\]"),
        (7, "group 1 is a int without examples"),
        (SimpleNamespace(input_ids=[1], labels=[1]), "group 1 is a SimpleNamespace without examples"),
        ([([1], [1]), ([1, 2], [1])], "example 1 of group 1 has 2 input_ids and 1 label:"),
        ([([], [])], r"example 0 of group 1: input_ids must be a flat sequence of integers, at least one"),
        ([([1.5], [1])], "example 0 of group 1: input_ids must be"),
        (([1, 2], [1, 2]), "example 0 of group 1: input_ids must be"),
        ([{"input_ids": [1], "labels": [1]}], "example 0 of group 1 is a dict"),
    ],
)
def test_refuses(group, message):
    """A group or an example that is none is named by its place; a flat example in a group's place too."""
    with pytest.raises(PackingError, match=message):
        collate_groups([[([1], [1])], group])


def test_share_prompt_is_true_or_false():
    """A text such as "false" would be true."""
    with pytest.raises(PackingError, match="share_prompt must be True or False, got 'false'"):
        collate_groups([], share_prompt="false")


def test_too_many_tokens_for_int32():
    """A row that cu_seqlens cannot count is refused before memory is taken for it."""
    huge = np.broadcast_to(np.int32(1), (2**30,))
    masked = np.broadcast_to(np.int32(-100), (2**30,))
    with pytest.raises(PackingError, match="2147483648 tokens are too many for one row"):
        collate_groups([[(huge, masked), (huge, masked)]])
