"""Moving a model keeps tied parameters tied, on devices for which `Module.to` makes new parameters too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_dist.loading._moving import exchange, moved


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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_stays_itself(device):
    """It changes its device in place, also where torch refuses to assign `.data`, and comes back with its values."""
    model = tied()
    parameter, bias = model["embed"].weight, model["head"].bias
    bias.requires_grad_(False)
    values = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    former = [exchange(each, each.detach().to(device, copy=True)) for each in (parameter, bias)]
    assert model["head"].weight is model["embed"].weight is parameter is optimizer.param_groups[0]["params"][0]
    assert isinstance(parameter, nn.Parameter)
    assert {each.device.type for each in model.parameters()} == {device}
    assert (parameter.requires_grad, bias.requires_grad) == (True, False)
    exchange(parameter, former[0])
    assert torch.equal(parameter, values)


def test_torch_refuses_to_assign_other_devices_data():
    """The reason for it; should torch change, the function can go."""
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(3, device="meta")
