"""One sample's arrays."""

import numpy as np

from forge_data import TokenizedExample


def test_from_mask():
    """Labels are the ids where the mask is set and -100 elsewhere, int32; the length is that of the sample."""
    example = TokenizedExample.from_mask(np.array([4, 5, 6], dtype=np.int32), np.array([True, False, True]))
    assert example.labels.tolist() == [4, -100, 6]
    assert example.labels.dtype == example.input_ids.dtype == np.int32
    assert len(example) == 3


def test_loss_count():
    """The first label never counts: nothing comes before it."""
    example = TokenizedExample.from_mask(np.array([4, 5, 6], dtype=np.int32), np.array([True, False, True]))
    assert example.loss_count == 1
