"""Malformed packed rows are refused, with what is wrong."""

import numpy as np
import pytest
import torch
from torch import nn

from forge_algos import PackedBatchError
from forge_algos.batches._learned import RowLoader, loss_count
from forge_algos.batches._packed import check_batch, next_tokens

from ..oracle import pack, samples


class Model(nn.Module):
    """A model of 61 tokens, as far as a loader asks."""

    def get_input_embeddings(self):
        """Return the table."""
        return nn.Embedding(61, 2)


def broken(**changes):
    batch = pack(samples([3, 4]))
    vars(batch).update(changes)
    return batch


MALFORMED = pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros(6, dtype=int)}, r"one shape \[T\], got \[7\], \[6\] and \[7\]"),
        ({"input_ids": np.ones((1, 7), dtype=int)}, "one shape"),
        ({"cu_seqlens": np.array([0, 3])}, "rise from 0 to the row's 7 tokens"),
        ({"cu_seqlens": np.array([1, 3, 7])}, "rise from 0"),
        ({"cu_seqlens": np.array([0, 3, 3, 7])}, "rise from 0"),
        ({"cu_seqlens": np.array([0])}, "rise from 0"),
        # In unsigned integers a step down is a large number.
        ({"cu_seqlens": np.array([0, 5, 3, 7], np.uint32), "position_ids": np.array([0, 1, 2, 0, 1, 0, 1])}, "rise from 0"),
        ({"position_ids": np.arange(7)}, "anew in every document"),
        ({"position_ids": np.array([0, 1, 2, 0, 1, 0, 1])}, "anew in every document"),
        ({"max_seqlen": 3}, "longest document has 4"),
        ({"input_ids": np.full(7, 5.7)}, r"input_ids must be an array of integers, got float64\[7\]"),
        ({"labels": np.full(7, 5.0)}, "labels must be an array of integers"),
        ({"position_ids": np.array([0, 1, 2, 0, 1, 2, 3.0])}, "position_ids must be an array of integers"),
        ({"input_ids": np.ones(7, bool)}, "input_ids must be an array of integers, got bool"),
        ({"input_ids": np.array([5, 5, 5, -1, 5, 5, 5])}, "input_ids holds the token id -1"),
        ({"labels": np.array([-100, 5, 5, -100, 99, 5, 5])}, "labels holds the token id 99"),
    ],
)


@MALFORMED
def test_malformed_rows_have_their_messages(changes, message):
    """Each way of being no packed row has its message."""
    check_batch(pack(samples([3, 4])), 61)
    with pytest.raises(PackedBatchError, match=message):
        check_batch(broken(**changes), 61)


def test_an_empty_row_is_answered_with_what_a_rank_without_work_runs():
    """A packer's row of no tokens is refused with what to run in its place."""
    with pytest.raises(PackedBatchError, match=r"a rank without work has it.* run the objective's `idle\(\)`"):
        check_batch(pack([]), 61)


def test_next_tokens():
    """Each position's target is the next label within its document, else -100."""
    batch = broken(labels=np.array([1, -100, 3, 4, 5, -100, 7]))
    assert next_tokens(batch).tolist() == [-100, 3, -100, 5, -100, 7, -100]
    assert next_tokens(pack([])).tolist() == []


@MALFORMED
def test_a_malformed_row_is_refused_by_its_count_or_before_its_forward(changes, message):
    """Counting leaves the check of a row with learned tokens to the loader: no malformed one passes both."""
    load = RowLoader(Model(), torch.device("cpu"))
    with pytest.raises(PackedBatchError, match=message):
        assert loss_count(broken(**changes)) > 0
        load(broken(**changes))


def test_a_malformed_row_without_learned_tokens_is_refused_by_its_count():
    """Nothing runs such a row, so that nothing else would look at it."""
    with pytest.raises(PackedBatchError, match="anew in every document"):
        loss_count(broken(labels=np.full(7, -100), position_ids=np.arange(7)))
    assert loss_count(broken(labels=np.full(7, -100))) == 0
