"""A linear layer with W + L Rᵀ in place of W, the product taken on either side."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from forge_algos.adaptations.osft import _linear as _osft_linear
from forge_algos.adaptations.osft._linear import moved_linear


def tensors(T, N, M, r, *, pair, bias, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=random).to(dtype)

    return {
        "x": draw(T, M),
        "weight": draw(N, M),
        "bias": draw(N) if bias else None,
        "left": draw(N, r),
        "right": draw(M, r),
        "without": (draw(N, r), draw(M, r)) if pair else None,
    }


def naive(x, weight, bias, left, right, without=None):
    moved = weight + left @ right.T
    if without is not None:
        moved = moved - without[0] @ without[1].T
    return functional.linear(x, moved, bias)


def run(function, given, trained):
    leaves = {name: value.clone().requires_grad_(name in trained) for name, value in given.items() if torch.is_tensor(value)}
    y = function(**{**given, **leaves})
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    if trained:
        (y * weights).sum().backward()
    return y.detach(), {name: leaves[name].grad for name in trained}


SIZES = st.integers(1, 40)


@settings(max_examples=120, deadline=None)
@given(
    T=st.integers(1, 60),
    N=SIZES,
    M=SIZES,
    r=st.integers(1, 9),
    pair=st.booleans(),
    bias=st.booleans(),
    trained=st.sets(st.sampled_from(["x", "left", "right"])),
)
def test_output_and_gradients_are_those_of_the_sum(T, N, M, r, pair, bias, trained):
    """Output and gradients equal a naive product in float64.
    Short rows and long ones, tall and wide weights, either factor or both or none training.
    """
    given = tensors(T, N, M, r, pair=pair, bias=bias)
    trained = trained | ({"bias"} if bias and trained else set())
    ours, theirs = run(moved_linear, given, trained), run(naive, given, trained)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    for name in trained:
        torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("trained", [("x", "left"), ("x", "right"), ("x", "left", "right"), ("left",), ()])
@pytest.mark.parametrize("T", [3, 500])
def test_the_cheaper_side_is_taken(monkeypatch, T, trained):
    """W + L Rᵀ is computed for 500 rows and never for 3, forward and backward."""
    made = []
    summed = _osft_linear._sum
    monkeypatch.setattr(_osft_linear, "_sum", lambda *given: made.append(1) or summed(*given))
    run(moved_linear, tensors(T, 20, 30, 4, pair=False, bias=False), trained)
    assert len(made) == (0 if T == 3 else 2 if "x" in trained else 1)


def test_only_what_the_backward_pass_needs_is_saved():
    """Where only L trains, r numbers a row are saved for the backward pass; where R trains, x."""
    for trained, kept in (("left", (50, 4)), ("right", (50, 30))):
        seen = []
        given = tensors(50, 20, 30, 4, pair=False, bias=False)
        given[trained].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(tuple(t.shape)) or t, lambda t: t):
            moved_linear(**given)
        assert [shape for shape in seen if shape[0] == 50] == [kept]


@pytest.mark.parametrize("T", [3, 500])
def test_autocast_computes_in_its_dtype(T):
    """Under autocast products are bfloat16, as a linear layer's; factors get float32 gradients."""
    given = tensors(T, 20, 30, 4, pair=True, bias=True, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, grads = run(moved_linear, given, {"x", "left", "right"})
    assert y.dtype == torch.bfloat16
    exact, expected = run(naive, given, {"x", "left", "right"})
    assert float((y - exact).norm() / exact.norm()) < 0.01
    for name, gradient in grads.items():
        assert gradient.dtype == torch.float32
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < 0.03


def test_a_bfloat16_weight_without_autocast():
    """The output is the weight's dtype, as a linear layer's; the factors may be float32."""
    given = tensors(64, 8, 6, 2, pair=False, bias=True, dtype=torch.float32)
    narrow = {**given, "x": given["x"].bfloat16(), "weight": given["weight"].bfloat16(), "bias": given["bias"].bfloat16()}
    y, grads = run(moved_linear, narrow, {"x", "left"})
    assert y.dtype == torch.bfloat16
    assert grads["left"].dtype == torch.float32
    assert float((y - naive(**given)).norm() / y.norm()) < 0.02
