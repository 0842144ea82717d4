"""mini-trainer's OSFT beside ours, rule strict: the same steps of its factors, the same first direction of the direct form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from forge_algos import AdapterSettings, adapt

theirs = pytest.importorskip(
    "mini_trainer.osft_utils", reason="mini-trainer is not installed here: `hatch run peers:test`", exc_type=ImportError
)
SHAPES = [(48, 48), (64, 40), (40, 64)]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def problem(N, M):
    torch.manual_seed(N)
    model = nn.Sequential(nn.Linear(M, N, bias=False))
    return model, torch.randn(96, M), torch.randn(96, N)


def steps_of_mini_trainer(weight, x, y, k, make, number):
    """ΔW after its own decomposition, projections and reconstruction, in its own order."""
    svd = theirs.create_svd_dict(weight, top_k=k)
    # Of what it takes apart itself: W less its own factors is rounding of W, not a move.
    start = theirs.reconstruct_weight_matrix(svd, torch.float64).detach()
    optimizer = make([svd["U_low"], svd["S_low"], svd["V_low"]])
    for _ in range(number):
        optimizer.zero_grad()
        high = (x @ svd["V_high"].T * svd["S_high"]) @ svd["U_high"].T
        low = (x @ svd["V_low"].T * svd["S_low"]) @ svd["U_low"].T
        nn.functional.mse_loss(high + low, y).backward()
        with torch.no_grad():
            theirs.project_gradient_to_orthogonal_space(svd)
            optimizer.step()
            theirs.project_parameter_to_orthogonal_space(svd)
    return theirs.reconstruct_weight_matrix(svd, torch.float64).detach() - start


def steps_of_ours(model, x, y, make, number, **changes):
    adaptation = adapt(model, AdapterSettings(adapter="osft", **changes))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for _ in range(number):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adaptation.before_step()
        optimizer.step()
        adaptation.after_step()
    return adaptation.plain("0.weight", model[0].weight.detach().double()), adaptation.plan["0"]["protected"]


@pytest.mark.parametrize(("optimizer", "number"), [("sgd", 1), ("adamw", 20)])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_move_as_mini_trainers(shape, optimizer, number):
    """One step of SGD, 20 of AdamW with weight decay: ΔW within 1e-4."""
    model, x, y = problem(*shape)
    weight = model[0].weight.detach().clone()
    make = OPTIMIZERS[optimizer]
    ours, k = steps_of_ours(copy.deepcopy(model), x, y, make, number, osft_form="factors")
    assert k == int(min(shape) * 0.75)
    expected = steps_of_mini_trainer(weight, x, y, k, make, number)
    assert float((ours - weight - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_direct_form_stays_in_mini_trainers_set(shape):
    """What 20 steps of AdamW have moved, put through mini-trainer's own projections, comes back as it was."""
    model, x, y = problem(*shape)
    weight = model[0].weight.detach().clone()
    ours, k = steps_of_ours(model, x, y, OPTIMIZERS["adamw"], 20)
    moved = (ours - weight).float()
    svd = theirs.create_svd_dict(weight, top_k=k)
    for U, V in ((moved, torch.zeros(1, shape[1])), (torch.zeros(shape[0], 1), moved)):
        svd["U_low"], svd["V_low"] = nn.Parameter(U.clone()), nn.Parameter(V.clone())
        with torch.no_grad():
            theirs.project_parameter_to_orthogonal_space(svd)
        projected = svd["U_low"] if U is moved else svd["V_low"]
        assert float((projected.detach() - moved).norm() / moved.norm()) < 1e-5
