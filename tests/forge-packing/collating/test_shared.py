"""collate_shared: one flat row, from which each sample can be read back, what several begin with there once."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, collate, collate_shared

from .test_groups import sight

PREFIXES = [[*range(30)], [*range(18)] + [7] * 20, [*range(18)] + [7] * 10 + [8] * 5, [5, 6, 7], [1] * 16, [1] * 15, []]
"""What samples begin with: system prompts that have their first 18 tokens in common, and short frames of a template."""


@st.composite
def samples(draw):
    """Samples with a few tokens of their own after a prefix, some of which is learned."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        ids = draw(st.sampled_from(PREFIXES)) + draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
        found.append((ids, [token if draw(st.booleans()) else -100 for token in ids]))
    return found


def common(ids, other):
    """Tokens that the two begin with alike, the last of `ids` not counted."""
    size = 0
    while size < min(len(ids) - 1, len(other)) and ids[size] == other[size]:
        size += 1
    return size


@settings(deadline=None, max_examples=200)
@given(samples())
def test_every_sample_can_be_read_back(drawn):
    """A segment sees its sample, at positions 0, 1, ...; it learns what `collate` has as labels, from the token before each."""
    batch, plain = collate_shared(drawn), collate(drawn)
    assert batch.group_sizes.tolist() == [1] * len(drawn)
    rows, targets = [], []
    for (ids, _), own, (start, stop), first in zip(
        drawn, sight(batch), pairwise(batch.cu_seqlens.tolist()), plain.cu_seqlens.tolist(), strict=False
    ):
        assert batch.input_ids[own].tolist() == ids
        assert batch.position_ids[own].tolist() == list(range(len(ids)))
        assert own[start - stop :].tolist() == list(range(start, stop))
        labels = plain.labels[first : first + len(ids)].tolist()
        rows += [own[at - 1] for at in range(len(ids)) if labels[at] != -100]
        targets += [label for label in labels if label != -100]
    assert batch.rows.tolist() == rows
    assert batch.targets.tolist() == targets


@settings(deadline=None, max_examples=200)
@given(samples())
def test_a_prefix_of_sixteen_tokens_is_there_once(drawn):
    """Each sample adds what no earlier one begins with, unless 16 tokens or a thirty-second of the row are not reached."""
    wanted = []
    for at, (ids, _) in enumerate(drawn):
        longest = max((common(ids, other) for other, _ in drawn[:at]), default=0)
        wanted.append(len(ids) - (longest if longest >= 16 else 0))
    whole = sum(len(ids) for ids, _ in drawn)
    shares = sum(wanted) * 32 <= whole * 31 and whole > 0
    batch = collate_shared(drawn)
    assert np.diff(batch.cu_seqlens).tolist() == (wanted if shares else [len(ids) for ids, _ in drawn])
    assert (batch.kv_rows is not None) == (shares and sum(wanted) < whole)


def test_weights_stay_with_their_tokens():
    """A shared position has as many weights as samples learn what follows it."""
    ids = [*range(20)]
    one = SimpleNamespace(input_ids=[*ids, 1], labels=[-100] * 15 + [*ids[15:], 1], weights=[2.0] * 21)
    other = SimpleNamespace(input_ids=[*ids, 2, 3], labels=[-100] * 19 + [19, 2, 3], weights=None)
    batch = collate_shared([one, other])
    assert len(batch.input_ids) == 23
    assert batch.weights.tolist() == [2.0] * 6 + [1.0] * 3
    assert batch.rows.tolist() == [*range(14, 20), 18, 19, 21]


def test_bad_samples_are_refused_by_their_number():
    """As `collate` refuses them."""
    with pytest.raises(PackingError, match="example 1 has 2 input_ids and 1 label"):
        collate_shared([([1, 2], [1, 2]), ([1, 2], [1])])
    with pytest.raises(PackingError, match="max_tokens must be an integer of at least 1, got '5'"):
        collate_shared([([1, 2], [1, 2])], max_tokens="5")
