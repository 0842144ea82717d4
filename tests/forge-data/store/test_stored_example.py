"""An example of a store is read lazily and otherwise like any example."""

import pickle

import attrs
import numpy as np
import pytest

from forge_data import TokenizedExample

from ..stores import EXAMPLE, write


def test_is_an_example(tmp_path):
    """Ids, labels, segments, roles, length and loss count are those that were written, with their dtypes."""
    stored = write(tmp_path / "store", [1, 2])[1]
    assert isinstance(stored, TokenizedExample)
    for name in ("input_ids", "labels", "segments"):
        assert np.array_equal(getattr(stored, name), getattr(EXAMPLE, name)), name
        assert getattr(stored, name).dtype == np.int32
    assert stored.roles == EXAMPLE.roles
    assert (len(stored), stored.loss_count) == (2, 1)
    assert stored.labels is stored.labels
    assert "roles=('user', 'assistant')" in repr(stored)


def test_nothing_else(tmp_path):
    """Unknown attributes are an AttributeError, and it cannot be changed."""
    stored = write(tmp_path / "store")[0]
    with pytest.raises(AttributeError, match="has no attribute 'label'"):
        _ = stored.label
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        stored.labels = None


def test_travels(tmp_path):
    """Pickled, it is a plain example that needs no store."""
    back = pickle.loads(pickle.dumps(write(tmp_path / "store")[0]))
    assert type(back) is TokenizedExample
    assert back.labels.tolist() == EXAMPLE.labels.tolist()
    assert back.segments.tolist() == EXAMPLE.segments.tolist()
