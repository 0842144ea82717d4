"""osft_rule=paper: the formula of arXiv 2504.07097, by hand."""

import pytest
import torch

from ...oracle import make, naive, samples
from ...osft import LENGTHS, osft, protected, run, steps, values


def one_step(adaptation, optimizer):
    optimizer.zero_grad()
    total, count = naive(adaptation.model, samples(LENGTHS))
    (total / count).backward()
    adaptation.before_step()
    optimizer.step()
    adaptation.after_step()


def optimizer_of(adaptation, kind=torch.optim.SGD, **options):
    return kind([p for p in adaptation.model.parameters() if p.requires_grad], **options)


@pytest.mark.parametrize("ratio", [0.0625, 0.25, 0.75])
def test_one_sgd_step_is_the_papers_formula(ratio):
    """W − lr (∇W − U_h U_hᵀ ∇W V_h V_hᵀ), for every target."""
    before, model = values(make()), make()
    total, count = naive(model, samples(LENGTHS))
    (total / count).backward()
    adaptation = osft(osft_rule="paper", unfreeze_rank_ratio=ratio)
    one_step(adaptation, optimizer_of(adaptation, lr=0.3))
    for name, (U_h, V_h) in protected(before, adaptation.plan).items():
        gradient = model.get_submodule(name).weight.grad.double()
        expected = -0.3 * (gradient - U_h @ U_h.T @ gradient @ V_h @ V_h.T)
        found = adaptation.model.get_submodule(name).weight.detach().double() - before[f"{name}.weight"].double()
        assert float((found - expected).norm() / expected.norm()) < 1e-4, name


def test_what_adam_moves_in_the_protected_block_is_taken_back():
    """Adam's own move in the protected block is removed, and nothing else of its step.
    The weights are those of Adam on the projected gradients, less that block.
    """
    before, adaptation = values(make()), osft(osft_rule="paper")
    unprojected = osft(osft_rule="paper")
    options = {"lr": 0.01, "weight_decay": 0.5, "betas": (0.5, 0.5)}
    optimizers = [optimizer_of(each, torch.optim.AdamW, **options) for each in (adaptation, unprojected)]
    one_step(adaptation, optimizers[0])
    unprojected.after_step = lambda: None
    one_step(unprojected, optimizers[1])
    for name, (U_h, V_h) in protected(before, adaptation.plan).items():
        start = before[f"{name}.weight"].double()
        raw = unprojected.model.get_submodule(name).weight.detach().double()
        block = U_h.T @ (raw - start) @ V_h
        assert block.norm() > 1e-3
        found = adaptation.model.get_submodule(name).weight.detach().double()
        torch.testing.assert_close(found, raw - U_h @ block @ V_h.T, rtol=0, atol=1e-5)


def test_a_bfloat16_weight_keeps_its_dtype():
    """The block is removed in float32 and the weight rounded once."""
    adaptation = osft(make().bfloat16(), osft_rule="paper")
    one_step(adaptation, optimizer_of(adaptation, lr=0.1))
    assert {p.dtype for p in adaptation.model.parameters()} == {torch.bfloat16}


def test_the_gradient_norm_is_of_what_may_move():
    """`train` projects the gradient before it measures and clips the norm.
    What cannot move does not make the rest smaller.
    """
    model, before = make(), values(make())
    total, count = naive(model, samples(LENGTHS, seed=0))
    (total / count).backward()
    adaptation = osft(osft_rule="paper")
    squares = []
    for name, (U_h, V_h) in protected(before, adaptation.plan).items():
        gradient = model.get_submodule(name).weight.grad.double()
        squares.append((gradient - U_h @ U_h.T @ gradient @ V_h @ V_h.T).square().sum())
    (output,) = run(adaptation, steps(1))
    assert output.grad_norm == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-5)
