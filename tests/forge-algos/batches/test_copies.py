"""Batches go to the device from page-locked memory where the machine says so."""

import numpy as np
import pytest
import torch

from forge_algos import pin_batches
from forge_algos.batches._copies import to_device
from forge_algos.batches._learned import RowLoader

from ..oracle import make, pack, samples


@pytest.fixture
def pinned(monkeypatch):
    """Numbers of pinned tensors; on the made-up device, meta, copies keep nothing."""
    found = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: found.append(tensor.tolist()) or tensor)
    yield found
    pin_batches(False)


def test_every_array_of_a_row_is_pinned(pinned):
    """Ids, positions, ends, rows, targets: all that a packed row sends, once each, after it was asked for."""
    row, meta = pack(samples((5, 9))), torch.device("meta")
    RowLoader(make(), meta)(row)
    assert pinned == []
    pin_batches(True)
    sent = RowLoader(make(), meta)(row)
    assert len(pinned) == 5
    assert pinned[0] == row.input_ids.tolist()
    assert all(tensor.device == meta for tensor in (sent.inputs["input_ids"], sent.rows, sent.targets))


def test_nothing_is_pinned_for_the_host(pinned):
    """Tensors that stay on the host are copies in ordinary memory, of an array that may not be written."""
    pin_batches(True)
    array = np.arange(4)
    array.flags.writeable = False
    assert to_device(array, torch.device("cpu")).tolist() == [0, 1, 2, 3]
    assert pinned == []
