"""Groups of completions: the forward's arguments, what is learned, and malformed rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos import SFT, PackedBatchError, check_groups, group_inputs, group_tensors, idle_groups

from ..oracle import CPU, VOCAB, make


def row(**changes):
    """Return groups of 2 and 1 completions, each group's prompt once.
    A prompt of 2 with completions of 2 and 1, then one of 3 tokens by itself.
    """
    fields = {
        "input_ids": np.array([5, 6, 7, 8, 9, 5, 3, 4]),
        "position_ids": np.array([0, 1, 2, 3, 2, 0, 1, 2]),
        "rows": np.array([1, 2, 1, 6]),
        "targets": np.array([7, 8, 9, 4]),
        "lengths": np.array([2, 1, 1]),
        "ends": np.array([3, 4, 7]),
        "group_sizes": np.array([2, 1]),
        "cu_seqlens": np.array([0, 4, 5, 8], np.int32),
        "max_seqlen": 4,
        "kv_rows": np.array([0, 1, 2, 3, 0, 1, 4, 5, 6, 7]),
        "cu_seqlens_k": np.array([0, 4, 7, 10], np.int32),
        "max_seqlen_k": 4,
    }
    assert not changes.keys() - fields.keys()
    return SimpleNamespace(**{**fields, **changes})


def repeated(**changes):
    """Return the same groups with the prompt repeated."""
    fields = {
        "input_ids": np.array([5, 6, 7, 8, 5, 6, 9, 5, 3, 4]),
        "position_ids": np.array([0, 1, 2, 3, 0, 1, 2, 0, 1, 2]),
        "rows": np.array([1, 2, 5, 8]),
        "ends": np.array([3, 6, 9]),
        "cu_seqlens": np.array([0, 4, 7, 10]),
        "kv_rows": None,
        "cu_seqlens_k": None,
        "max_seqlen_k": None,
    }
    return row(**{**fields, **changes})


def test_the_forwards_arguments():
    """The forward gets one row, no cache and no mask.
    Where prompts are shared also the keys that each segment sees, with ends and sizes of their own.
    """
    inputs = group_inputs(row(), CPU)
    assert {name: x.tolist() for name, x in inputs.items() if isinstance(x, torch.Tensor)} == {
        "input_ids": [[5, 6, 7, 8, 9, 5, 3, 4]],
        "position_ids": [[0, 1, 2, 3, 2, 0, 1, 2]],
        "cu_seq_lens_q": [0, 4, 5, 8],
        "cu_seq_lens_k": [0, 4, 7, 10],
        "kv_rows": [0, 1, 2, 3, 0, 1, 4, 5, 6, 7],
    }
    assert {name: x for name, x in inputs.items() if not isinstance(x, torch.Tensor)} == {
        "use_cache": False,
        "max_length_q": 4,
        "max_length_k": 4,
    }
    assert {inputs["cu_seq_lens_q"].dtype, inputs["cu_seq_lens_k"].dtype} == {torch.int32}
    assert inputs["kv_rows"].dtype == torch.int64


def test_a_row_that_shares_nothing_is_an_ordinary_packed_row():
    """Without shared prompts there are no kv_rows, and keys have the very same ends.
    So an attention need not compare them.
    """
    inputs = group_inputs(repeated(), CPU)
    assert "kv_rows" not in inputs
    assert inputs["cu_seq_lens_k"] is inputs["cu_seq_lens_q"]


def test_what_is_learned():
    """Rows and targets are int64 on the device, lengths int64 on the CPU."""
    rows, targets, lengths = group_tensors(row(rows=np.array([1, 2, 1, 6], np.int32)), torch.device("meta"))
    assert (rows.device.type, targets.device.type, lengths.device.type) == ("meta", "meta", "cpu")
    assert {rows.dtype, targets.dtype, lengths.dtype} == {torch.int64}
    assert lengths.tolist() == [2, 1, 1]
    assert group_tensors(row(), CPU)[0].tolist() == [1, 2, 1, 6]


def test_read_only_rows_are_copied():
    """A read-only view is copied, without a warning."""
    ids = np.array([5, 6, 7, 8, 9, 5, 3, 4])
    ids.setflags(write=False)
    group_inputs(row(input_ids=ids), CPU)["input_ids"].zero_()
    assert ids.any()


@pytest.mark.parametrize("sizes", [(2,), (1, 1), (3, 2)])
def test_the_idle_row_is_valid(sizes):
    """An idle row has groups of the requested sizes, for any vocabulary, and runs.
    Each completion has something to learn.
    """
    batch = idle_groups(sizes)
    check_groups(batch, 1)
    assert batch.group_sizes.tolist() == list(sizes)
    rows, targets, lengths = group_tensors(batch, CPU)
    assert lengths.tolist() == [1] * sum(sizes)
    logits = make()(**group_inputs(batch, CPU)).logits[0, rows]
    assert logits.shape == (sum(sizes), VOCAB)
    assert targets.shape == (sum(sizes),)


@pytest.mark.parametrize("batch", [row(), repeated()])
def test_valid_rows_pass(batch):
    """Rows with prompts once or repeated pass."""
    check_groups(batch)
    check_groups(batch, VOCAB)


def test_an_empty_row_passes():
    """An empty row, that of a rank without work, passes."""
    none = np.zeros(0, np.int64)
    empty = dict.fromkeys(("input_ids", "position_ids", "rows", "targets", "lengths", "ends", "group_sizes"), none)
    check_groups(repeated(**empty, cu_seqlens=np.array([0]), max_seqlen=0), VOCAB)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (row(input_ids=np.full(8, 5.7)), r"input_ids must be an array of integers, got float64\[8\]"),
        (row(targets=np.full(4, 7.5)), "targets must be an array of integers"),
        (row(position_ids=np.arange(7)), r"one shape \[T\], got \[8\] and \[7\]"),
        (row(input_ids=np.zeros((1, 8), int), position_ids=np.zeros((1, 8), int)), r"one shape \[T\], got \[1, 8\]"),
        (row(cu_seqlens=np.array([0, 4, 5])), r"cu_seqlens must rise from 0 to the row's 8 tokens, got \[0, 4, 5\]"),
        (row(cu_seqlens=np.array([0, 4, 4, 8])), r"cu_seqlens must rise"),
        (row(cu_seqlens=np.zeros(0, int)), r"cu_seqlens must rise"),
        (row(max_seqlen=3), "longest segment of cu_seqlens has 4 tokens, but the row says 3"),
        (row(cu_seqlens_k=np.array([0, 4, 7, 9])), "cu_seqlens_k must rise from 0 to kv_rows' 10 tokens"),
        (row(cu_seqlens_k=None), "cu_seqlens_k must rise"),
        (row(max_seqlen_k=3), "longest segment of cu_seqlens_k has 4 tokens, but the row says 3"),
        (row(max_seqlen_k=None), "but the row says None"),
        (row(kv_rows=None), "come together"),
        (row(cu_seqlens_k=np.array([0, 7, 10]), max_seqlen_k=7), "for each segment of cu_seqlens"),
        (row(cu_seqlens_k=np.array([0, 3, 7, 10])), "for each segment of cu_seqlens"),
        (row(kv_rows=np.array([0, 1, 2, 3, 0, 1, 3, 5, 6, 7])), "must end, for each segment, in the segment's own positions"),
        (row(kv_rows=np.array([0, 1, 2, 3, 0, 5, 4, 5, 6, 7])), "name earlier ones before them"),
        (row(kv_rows=np.array([0, 1, 2, 3, -8, 1, 4, 5, 6, 7])), "name earlier ones before them"),
        (row(kv_rows=np.array([0, 1, 2, 3, 1, 1, 4, 5, 6, 7])), "position_ids must count"),
        (row(position_ids=np.array([0, 1, 2, 3, 0, 0, 1, 2])), "position_ids must count"),
        (repeated(position_ids=np.arange(10)), "position_ids must count"),
        (row(targets=np.array([7, 8, 9])), "has 4 rows and 3 targets, but its completions have 4 learned tokens"),
        (row(lengths=np.array([2, 1, 2])), "its completions have 5 learned tokens"),
        (row(lengths=np.array([3, -1, 2])), "learned tokens"),
        (row(ends=np.array([3, 4])), "has 3 lengths and 2 ends, but its groups have 3 completions"),
        (row(group_sizes=np.array([2, 2])), "but its groups have 4 completions"),
        (row(group_sizes=np.array([3, 0])), "but its groups have 3 completions"),
        (row(rows=np.array([1, 2, 1, 8])), "rows must lie in the row's 8 tokens, got 1 to 8"),
        (row(ends=np.array([-1, 4, 7])), "ends must lie in the row's 8 tokens, got -1 to 7"),
        (row(input_ids=np.array([5, 6, 7, 8, 9, 5, 61, 4])), "input_ids holds the token id 61, .* ends at 60"),
        (row(targets=np.array([7, -100, 9, 4])), "targets holds the token id -100"),
    ],
)
def test_malformed_rows_are_refused(batch, message):
    """Each contradiction is refused by name, with what was found."""
    with pytest.raises(PackedBatchError, match=message):
        check_groups(batch, VOCAB)


def test_tokens_of_a_row():
    """A prompt counts once for the completions of its group, and again for each other group that shares it."""
    assert SFT().tokens(row()) == 8
    assert SFT().tokens(repeated()) == 10
    assert SFT().tokens(row(group_sizes=np.array([1, 1, 1]))) == 10
    assert SFT().tokens(idle_groups()) == 4
