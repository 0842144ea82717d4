"""collate: one flat row, from which every sample can be read back."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate, collate_groups

TOKENS = st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from([-100, 1, 7, 199_999])), min_size=1, max_size=12)
KINDS = {
    "pair": lambda ids, labels: (ids, labels),
    "object": lambda ids, labels: SimpleNamespace(input_ids=ids, labels=labels),
    "named tuple": namedtuple("Example", ["input_ids", "labels"]),
    # Names come before places: a tuple with more or other fields is read by name.
    "wide tuple": lambda ids, labels: namedtuple("Wide", ["labels", "extra", "input_ids"])(labels, None, ids),
    "int32": lambda ids, labels: (np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)),
    "mixed": lambda ids, labels: (np.array(ids, dtype=np.uint64), labels),
}


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(TOKENS, st.sampled_from(sorted(KINDS))), max_size=8))
def test_inverse(samples):
    """Cut at cu_seqlens, the row is the samples again, but for the first label of each, which is -100."""
    examples = [KINDS[kind]([t for t, _ in sample], [label for _, label in sample]) for sample, kind in samples]
    batch = collate(examples)
    assert (batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype) == (np.int64,) * 3
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == batch.input_ids.size == batch.labels.size == batch.position_ids.size
    assert batch.cu_seqlens.size == len(samples) + 1
    assert type(batch.max_seqlen) is int
    assert batch.max_seqlen == max((len(sample) for sample, _ in samples), default=0)
    for (sample, _), start, stop in zip(samples, batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        assert batch.input_ids[start:stop].tolist() == [token for token, _ in sample]
        assert batch.labels[start:stop].tolist() == [-100, *(label for _, label in sample[1:])]
        assert batch.position_ids[start:stop].tolist() == list(range(len(sample)))


def test_empty():
    """No examples are an empty row, with the same types: a rank without work in this pass."""
    batch = collate([])
    assert batch.cu_seqlens.tolist() == [0]
    assert (batch.input_ids.size, batch.labels.size, batch.position_ids.size, batch.max_seqlen) == (0, 0, 0, 0)
    assert (batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype) == (np.int64,) * 3
    assert batch.cu_seqlens.dtype == np.int32


def test_examples_stay_as_they_are():
    """The first label is set in the row, not in the caller's array, of which the row is no view either."""
    ids, labels = np.array([1, 2, 3]), np.array([1, 2, 3])
    labels.setflags(write=False)
    batch = collate([(ids, labels)])
    batch.input_ids[:] = 0
    assert ids.tolist() == [1, 2, 3]
    assert labels.tolist() == [1, 2, 3]
    assert batch.labels.tolist() == [-100, 2, 3]


def test_examples_may_come_one_by_one():
    """A generator is as good as a list."""
    assert collate(pair for pair in [([1], [1]), ([2, 3], [2, 3])]).cu_seqlens.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (([1, 2], [1]), "example 1 has 2 input_ids and 1 label:"),
        (([], []), r"example 1: input_ids must be a flat sequence of integers, at least one; got float64\[0\]"),
        (([1.5], [1]), r"example 1: input_ids must be .* got float64\[1\]"),
        (([1], [True]), r"example 1: labels must be .* got bool\[1\]"),
        (([[1, 2]], [[1, 2]]), r"example 1: input_ids must be .* got int64\[1, 2\]"),
        (([[1], [1, 2]], [1]), "example 1: input_ids must be a flat sequence of integers"),
        (([1, 2], [1, 2], [0, 1]), "example 1 is a tuple: give objects with input_ids and labels, or pairs"),
        (([5, -7], [5, 6]), r"example 1: input_ids\[1\] is -7; it must be a token id, from 0"),
        (([5, 6], [5, -1]), r"example 1: labels\[1\] is -1; it must be a token id, or -100 where no loss is counted"),
        ((np.array([2**63], np.uint64), [1]), r"example 1: input_ids\[0\] is -9223372036854775808"),
        (
            (np.array([5, 6], np.uint16), np.array([5, -100]).astype(np.uint16)),
            r"example 1: labels\[1\] is 65436, which is -100 in uint16; keep labels in a signed type",
        ),
        (7, "example 1 is a int: give objects"),
        ({"input_ids": [1], "labels": [1]}, r'example 1 is a dict: .*\(row\["input_ids"\], row\["labels"\]\)'),
        (SimpleNamespace(input_ids=[1]), "example 1 is a SimpleNamespace: give objects"),
    ],
)
def test_refuses(example, message):
    """An example that is none is named by its place."""
    with pytest.raises(PackingError, match=message):
        collate([([1], [1]), example])


def test_shifted_labels_are_refused():
    """Labels that are all the next token would be shifted once more by the loss; others may be what they like."""
    shifted = [([5, 6, 7, 8, 9], [-100, 7, 8, 9, -100]), ([3, 4, 2], [4, 2, -100])]
    with pytest.raises(PackingError, match="the labels are shifted, each is the next token: give labels"):
        collate(shifted)
    for labels in ([-100, 7, 8, 9, 9], [-100, 6, 8, 9, -100]):
        assert collate([([5, 6, 7, 8, 9], labels)]).labels.tolist() == labels
    assert collate([([5] * 6, [5] * 6), ([1], [1])]).labels.tolist() == [-100, 5, 5, 5, 5, 5, -100]
    wrapped = np.array([7, 65436], np.uint16)  # a token of a vocabulary of 65,536
    assert collate([(wrapped, wrapped)]).labels.tolist() == [-100, 65436]


def test_too_many_tokens_for_int32():
    """A row that cu_seqlens cannot count is refused before memory is taken for it."""
    huge = np.broadcast_to(np.int32(1), (2**31,))
    with pytest.raises(PackingError, match="2147483648 tokens are too many for one row"):
        collate([(huge, huge)])


def test_a_plan_feeds_it():
    """Through a plan on 3 ranks and collate, every token of every sample arrives once an epoch."""
    from forge_packing import plan

    data = [list(range(100 * i, 100 * i + 1 + i % 5)) for i in range(20)]
    made = plan([len(ids) for ids in data], batch_size=6, max_tokens=9, world_size=3)
    arrived = []
    for step in range(made.num_steps):
        for rank in range(3):
            for indices in made.micro_batches(step, rank):
                arrived += collate([(data[i], data[i]) for i in indices]).input_ids.tolist()
    assert sorted(arrived) == sorted(token for ids in data for token in ids)


def weighted(ids, labels, weights):
    """An example with weights."""
    return SimpleNamespace(input_ids=ids, labels=labels, weights=weights)


def test_weights():
    """Weights lie beside the labels, 0 where no loss is counted, 1 for an example without; a row without any has none."""
    batch = collate([weighted([1, 2, 3], [1, -100, 3], [0.5, 0.5, 0.25]), ([4, 5], [-100, 5]), weighted([6, 7], [6, 7], None)])
    assert batch.weights.dtype == np.float32
    assert batch.weights.tolist() == [0, 0, 0.25, 0, 1, 0, 1]
    assert collate([([4, 5], [-100, 5]), weighted([6], [6], None)]).weights is None
    assert collate([]).weights is None


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"example 1 has 2 input_ids and weights \[1\]: there must be one a token"),
        ([1.0, -1.0], "example 1: the weight of token 1 is -1.0; weights are finite numbers from 0"),
        ([float("nan"), 1.0], "example 1: the weight of token 0 is nan"),
        (["a", "b"], "example 1: weights must be a flat sequence of numbers"),
    ],
)
def test_weights_refused(weights, message):
    """Weights that are none are named by their example, and completions that are compared have none."""
    with pytest.raises(PackingError, match=message):
        collate([([1], [1]), weighted([1, 2], [1, 2], weights)])
    with pytest.raises(PackingError, match="example 0 of group 0 has weights, which completions that are compared cannot have"):
        collate_groups([[weighted([1, 2], [-100, 2], [0.0, 2.0])]])
