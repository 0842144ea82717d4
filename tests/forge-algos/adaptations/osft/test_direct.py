"""osft_rule=strict, osft_form=direct reaches exactly the changes that the rule allows."""

import torch
from hypothesis import given, settings, strategies as st

from forge_algos.adaptations.osft._bases import Directions, decompose
from forge_algos.adaptations.osft._delta import attach
from forge_algos.adaptations.osft._direct import Direct


def layer(N, M, r, *, svd="exact", seed=0):
    """(linear layer under the direct form, U_h, V_h by torch in float64)."""
    # The global generator, for what a test draws afterwards: without a seed a matrix of nearly no rank would come now and then.
    random = torch.manual_seed(seed)
    linear = torch.nn.Linear(M, N, bias=False)
    linear.weight.requires_grad = False
    linear.weight.copy_(torch.randn(N, M, generator=random))
    d = min(N, M)
    bases = decompose(linear.weight, protected=d - r, svd=svd)
    if svd == "randomized":
        # What a method that finds the protected directions alone would hand over.
        k = d - r
        bases = type(bases)(U=bases.U[:, :k], S=bases.S[:k], Vh=bases.Vh[:k], fingerprint="", error=0.0)
    attach(linear, Direct(Directions(bases, (N, M), r), linear.weight))
    U, _, Vh = torch.linalg.svd(linear.weight.double(), full_matrices=False)
    return linear, U[:, : d - r], Vh[: d - r].T


def confined(matrix, U_h, V_h):
    """(I − U_h U_hᵀ) X (I − V_h V_hᵀ), a column or row of zeros where nothing is free."""
    matrix = matrix - U_h @ (U_h.T @ matrix)
    return matrix - matrix @ V_h @ V_h.T


SHAPES = {
    "N": st.integers(2, 24),
    "M": st.integers(2, 24),
    "share": st.floats(0, 1),
    "svd": st.sampled_from(["exact", "randomized"]),
    "seed": st.integers(0, 9),
}


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_any_parameter_is_orthogonal_on_both_sides(N, M, share, svd, seed):
    """Whatever C, A or B an optimizer writes: U_hᵀ ΔW = 0 and ΔW V_h = 0.
    From all singular vectors or the protected ones alone.
    """
    r = 1 + int(share * (min(N, M) - 2))
    linear, U_h, V_h = layer(N, M, r, svd=svd, seed=seed)
    with torch.no_grad():
        linear.osft.weight.normal_()
    moved = linear.osft.moved().double()
    assert moved.shape == (N, M)
    assert torch.linalg.matrix_rank(moved, rtol=1e-4) == r
    assert (U_h.T @ moved).norm() <= 1e-5 * moved.norm()
    assert (moved @ V_h).norm() <= 1e-5 * moved.norm()


@settings(max_examples=60, deadline=None)
@given(**SHAPES)
def test_one_sgd_step_is_the_projected_gradient(N, M, share, svd, seed):
    """From 0 one SGD step of the direct form is projected gradient descent in W.
    ΔW = −lr (I − U_hU_hᵀ) ∇W (I − V_hV_hᵀ), so that no allowed direction is missing.
    """
    r = 1 + int(share * (min(N, M) - 2))
    linear, U_h, V_h = layer(N, M, r, svd=svd, seed=seed)
    x, target = torch.randn(7, M), torch.randn(7, N)
    weight = linear.weight.detach().clone().requires_grad_()
    torch.nn.functional.mse_loss(x @ weight.T, target).backward()
    expected = -0.5 * confined(weight.grad.double(), U_h, V_h)

    optimizer = torch.optim.SGD(linear.osft.parameters(), lr=0.5)
    torch.nn.functional.mse_loss(linear(x), target).backward()
    optimizer.step()
    moved = linear.osft.moved().double()
    assert (moved - expected).norm() <= 1e-4 * expected.norm() + 1e-7
    trained = sum(p.numel() for p in linear.osft.parameters())
    assert trained == (r * r if N == M else max(N, M) * r)
    torch.testing.assert_close(linear(x), x @ (linear.weight + moved.float()).T, rtol=1e-4, atol=1e-5)


def test_constants_are_in_no_state_and_follow_the_layer():
    """The state has only what trains; directions are float32 and move with the layer's device."""
    linear, *_ = layer(6, 4, 2)
    assert set(linear.state_dict()) == {"weight", "osft.weight"}
    assert {buffer.dtype for buffer in linear.buffers()} == {torch.float32}
    assert {buffer.device.type for buffer in linear.to("meta").buffers()} == {"meta"}
