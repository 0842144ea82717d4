"""AdamW is the paper's, and decays matrices only."""

import pytest
import torch

from forge_algos import AdapterSettings, OptimizerSettings, adamw, attach_lora

from .oracle import make


@pytest.mark.parametrize("fused", [False, True])
def test_two_steps_by_hand(fused):
    """arXiv 1711.05101, algorithm 2, written out; plain and fused."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    config = OptimizerSettings(learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.7, eps=1e-3)
    optimizer = adamw(model, config, fused=fused)
    expected = {n: p.detach().double() for n, p in model.named_parameters()}
    m = {n: torch.zeros_like(p) for n, p in expected.items()}
    v = {n: torch.zeros_like(p) for n, p in expected.items()}
    for step in (1, 2):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.7 * v[name] + 0.3 * g**2
            decay = 0.5 if parameter.dim() >= 2 else 0.0
            expected[name] = expected[name] * (1 - 0.1 * decay)
            expected[name] -= 0.1 * (m[name] / (1 - 0.8**step)) / ((v[name] / (1 - 0.7**step)).sqrt() + 1e-3)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_norms_and_biases_do_not_decay():
    """Two groups that hold every parameter once; the second, of vectors, has no decay."""
    model = make("llama-tied")
    decayed, plain = adamw(model, OptimizerSettings(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in plain["params"]} == {1}
    held = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_frozen_parameters_are_left_out():
    """Adapters only, at their own default rate."""
    model = attach_lora(make(), AdapterSettings(adapter="lora"))
    (group,) = adamw(model, OptimizerSettings()).param_groups
    assert len(group["params"]) == sum(p.requires_grad for p in model.parameters())
    assert group["lr"] == 2e-4
    assert adamw(make(), OptimizerSettings()).param_groups[0]["lr"] == 2e-5
