"""Rows of token ids: refused unless ids and labels are consistent."""

import numpy as np
import pytest

from forge_data import DataError
from forge_data.formats._tokenised import check_vocabulary, checked_tokens


def check(ids, labels, vocabulary=100, **more):
    tokens = checked_tokens("f:5", {"input_ids": ids, "labels": labels, **more})
    check_vocabulary(tokens, vocabulary)
    return tokens


def test_kept():
    """Ids and mask stay as they are; the first label need not be -100."""
    sample = check([3, 4, 5], [3, -100, 5], len=3, attention_mask=[1, 1, 1])
    assert sample.input_ids.tolist() == [3, 4, 5]
    assert sample.input_ids.dtype == np.int32
    assert sample.trained.tolist() == [True, False, True]


@pytest.mark.parametrize("count", [2, 1])
def test_counted(count):
    """mini-trainer's count of learned tokens is checked; a first label may be counted or not."""
    assert check([3, 4, 5], [3, -100, 5], num_loss_counted_tokens=count).trained.sum() == 2
    with pytest.raises(DataError, match="f:5: field num_loss_counted_tokens is int 3, but 2 labels are not -100"):
        check([3, 4, 5], [3, -100, 5], num_loss_counted_tokens=3)


def test_arrays():
    """Arrays of integers are read as lists are."""
    assert check(np.array([3, 4], dtype=np.uint16), np.array([-100, 4]), attention_mask=np.ones(2, int)).trained.tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("ids", "labels", "more", "expected"),
    [
        ([1, 2], [1], {}, "f:5: input_ids holds 2 tokens and labels 1; they must be as long as each other"),
        ([1, 2], [1, 2], {"len": 3}, "f:5: field len is int 3, but input_ids holds 2 tokens"),
        ([1, 2], [1, 2], {"attention_mask": [1, 0]}, "f:5: attention_mask holds zeros, so the row is padded"),
        ([1, 2], [1, 2], {"attention_mask": 5}, "f:5: field attention_mask is int 5; it must be a list of 0 and 1"),
        ([1, 2], [1, 2], {"attention_mask": True}, "f:5: field attention_mask is true; it must be a list"),
        ([1, 2], [1, 2], {"attention_mask": "11"}, "f:5: field attention_mask is the string '11'; it must be a list"),
        ([1, 2], [1, 2], {"attention_mask": [1]}, "f:5: field attention_mask is a list of 1, but input_ids holds 2 tokens"),
        ([1, 2], [1, 2], {"attention_mask": []}, "f:5: field attention_mask is a list of 0, but"),
        ([1, 2], [1, 2], {"attention_mask": [1, 2]}, r"f:5: field attention_mask\[1\] is int 2; it must be 0 or 1"),
        ([1, 2], [1, 2], {"attention_mask": ["1", 1]}, r"f:5: field attention_mask\[0\] is the string '1'; it must be 0 or 1"),
        ([1, 2], [1, 2], {"attention_mask": np.array([1, 0])}, "f:5: attention_mask holds zeros"),
        ([1, 100], [1, 100], {}, r"f:5: field input_ids\[1\] is 100, outside the vocabulary 0 to 99; was the row made with "
                                 r"another"),
        ([-1, 2], [-100, 2], {}, r"f:5: field input_ids\[0\] is -1, outside the vocabulary"),
        ([1, 2.0], [1, 2], {}, r"f:5: field input_ids\[1\] is float 2.0; token ids are whole numbers"),
        ([1, True], [1, 1], {}, r"f:5: field input_ids\[1\] is true; token ids are whole numbers"),
        ([1, 2], [1, "2"], {}, r"f:5: field labels\[1\] is the string '2'"),
        ([1, 2**40], [1, 2], {}, r"f:5: field input_ids\[1\] is int 1099511627776; token ids"),
        ("12", [1, 2], {}, "f:5: field input_ids is the string '12'; it must be a list of token ids"),
        ([[1, 2]], [[1, 2]], {}, r"f:5: field input_ids\[0\] is a list of 2"),
        (np.zeros((1, 2), dtype=int), [1, 2], {}, r"f:5: field input_ids is an array int64\[1, 2\]"),
        (np.array([1.0]), [1], {}, r"f:5: field input_ids is an array float64\[1\]"),
        ([1, 2, 3], [-100, 9, 3], {}, r"f:5: field labels\[1\] is 9 where input_ids\[1\] is 2; a label must be the id at its "
                                      r"own pos"),
        ([1, 2, 3, 4], [2, 3, 4, -100], {}, r"f:5: field labels\[0\] is 2 where input_ids\[0\] is 1: the labels are shifted, "
                                            r"each is the next"),
        ([1, 2, 3, 4], [-100, -100, 4, 0], {}, r"the labels are shifted, each is the next token; give labels\[t\] == "
                                               r"input_ids\[t\]"),
        ([1, 2, 3, 4], [-100, 1, 2, 3], {}, r"the labels are shifted, each is the previous token"),
        ([1, 2], [-1, 2], {}, r"f:5: field labels\[0\] is -1 where input_ids\[0\] is 1; .* or -100 where nothing is learned"),
    ],
)  # fmt: skip
def test_refused(ids, labels, more, expected):
    """An inconsistent row is refused by place, field and position."""
    with pytest.raises(DataError, match=expected):
        check(ids, labels, **more)


def test_without_a_vocabulary():
    """Without a tokenizer, ids only have to fit into int32."""
    assert check([1, 2_000_000], [-100, 2_000_000], None).input_ids.tolist() == [1, 2_000_000]
