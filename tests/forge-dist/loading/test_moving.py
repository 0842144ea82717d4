"""Moving a model keeps tied parameters tied, on devices for which `Module.to` makes new parameters too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_dist.loading._moving import moved


def tied() -> nn.ModuleDict:
    """An embedding and a head that share a matrix, and a bias of the head's own."""
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_stay_tied(device):
    """One parameter where there was one: torch's own `to` makes two on meta, as on Ascend's NPUs."""
    model = moved(tied(), device)
    assert model["head"].weight is model["embed"].weight
    assert {each.device.type for each in model.parameters()} == {device}
    assert len(list(model.parameters())) == 2


def test_torch_alone_unties_them():
    """The reason for it; should torch change, the function can go."""
    model = tied().to(torch.device("meta"))
    assert model["head"].weight is not model["embed"].weight
