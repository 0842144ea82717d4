"""Copies in host memory."""

import torch

from forge_dist.checkpoints._host_copy import HostCopy


def test_the_copy_does_not_change_with_its_source():
    """What is trained on after the copy is not in it; strides do not matter."""
    source = {"w": torch.arange(6.0).reshape(2, 3).t(), "s": torch.tensor(1)}
    copy = HostCopy().take(source)
    source["w"].zero_()
    source["s"].zero_()
    assert copy["w"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copy["w"].is_contiguous()
    assert copy["s"].item() == 1


def test_memory_is_used_again():
    """The second copy of the same tensors takes no new memory; one of another shape or format does; what is gone is let go."""
    host = HostCopy()
    first = host.take({"w": torch.zeros(4), "v": torch.zeros(4), "u": torch.zeros(1)})
    second = host.take({"w": torch.ones(4), "v": torch.ones(5)})
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["w"].tolist() == [1] * 4
    assert second["v"].shape == (5,)
    assert set(host._buffers) == {"w", "v"}
    assert host.take({"w": torch.ones(4, dtype=torch.int32)})["w"].dtype == torch.int32


def test_what_a_copy_would_still_take():
    """Only tensors without a buffer of their shape and format need memory."""
    host = HostCopy()
    state = {"w": torch.zeros(4), "v": torch.zeros(2, 2)}
    assert host.missing(state) == 32
    host.take(state)
    assert host.missing(state) == 0
    assert host.missing({"w": torch.zeros(5), "v": torch.zeros(2, 2)}) == 20
