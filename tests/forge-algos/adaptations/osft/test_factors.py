"""osft_rule=strict, osft_form=factors: one step by hand, and the projections around a step."""

import pytest
import torch

from ...oracle import make, naive, samples
from ...osft import LENGTHS, moved, osft, values

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
TARGETS = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in NAMES]


def off(left, basis):
    return left - basis @ (basis.T @ left)


@pytest.mark.parametrize("name", TARGETS)
def test_one_sgd_step_by_hand(name):
    """U, S and V of the free part each take an SGD step along their own gradient.
    The gradients of U and V are without their parts in the protected directions.
    """
    before, adaptation = values(make()), osft(osft_form="factors")
    model = make()
    weight = model.get_submodule(name).weight
    total, count = naive(model, samples(LENGTHS))
    (total / count).backward()
    gradient = weight.grad.double()
    U, S, Vh = torch.linalg.svd(before[f"{name}.weight"].double(), full_matrices=False)
    k = adaptation.plan[name]["protected"]
    U_l, S_l, V_l = U[:, k:], S[k:], Vh[k:]
    lr = 0.3
    new_U = U_l - lr * off(gradient @ V_l.T * S_l, U[:, :k])
    new_S = S_l - lr * (U_l.T @ gradient @ V_l.T).diagonal()
    new_V = V_l - lr * off(((U_l * S_l).T @ gradient).T, Vh[:k].T).T
    expected = new_U * new_S @ new_V - U_l * S_l @ V_l

    optimizer = torch.optim.SGD([p for p in adaptation.model.parameters() if p.requires_grad], lr=lr)
    total, count = naive(adaptation.model, samples(LENGTHS))
    (total / count).backward()
    adaptation.before_step()
    optimizer.step()
    adaptation.after_step()
    found = moved(adaptation, before)[name]
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_gradients_and_factors_are_confined():
    """Neither gradients before a step nor factors after it have parts in protected directions."""
    adaptation = osft(osft_form="factors")
    total, _ = naive(adaptation.model, samples(LENGTHS))
    total.backward()
    adaptation.before_step()
    delta = adaptation.model.model.layers[0].mlp.down_proj.osft
    for left, right in ((delta.left.grad, delta.right.grad), (delta.left, delta.right)):
        if left is delta.left:
            with torch.no_grad():
                left.add_(torch.randn_like(left))
                right.add_(torch.randn_like(right))
            assert (delta.protected_left.T @ left).norm() > 0.1
            adaptation.after_step()
        assert (delta.protected_left.T @ left).norm() < 1e-5 * left.norm()
        assert (right @ delta.protected_right).norm() < 1e-5 * right.norm()
