"""What each rank holds → its pieces."""

import pytest
import torch

from forge_dist import CheckpointError
from forge_dist.checkpoints._plan import Piece, local_pieces


def test_what_cannot_be_kept_is_refused():
    """No tensor, a sparse one, one without data and a format that no file has: each is named."""
    for value, words in [
        (3, "w is int"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            local_pieces({"w": value})


def test_pieces_are_views():
    """Nothing is copied to find out what there is to write."""
    weight = torch.nn.Parameter(torch.randn(3, 2))
    pieces, values = local_pieces({"w": weight})
    assert pieces == {"w": Piece("F32", [3, 2], [0, 0], [3, 2])}
    assert values["w"].data_ptr() == weight.data_ptr()
    assert not values["w"].requires_grad
