"""Causal SDPA of whole samples against an oracle that computes one row of scores at a time, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from forge_accel.attention import _causal
from forge_accel.attention._causal import causal_attention


def naive(query, key, value, window=None, scaling=None):
    """One explicit softmax a query: float64 loops over batch, head and position; the last query stands at the last key."""
    B, H, T, D = query.shape
    groups, offset = H // key.shape[1], key.shape[2] - T
    scaling = D**-0.5 if scaling is None else scaling
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                stop = offset + t + 1
                start = 0 if window is None else max(0, stop - window)
                keys, values = (x[b, h // groups, start:stop].double() for x in (key, value))
                rows.append(torch.softmax(keys @ query[b, h, t].double() * scaling, dim=0) @ values)
    return torch.stack(rows).reshape(B, H, T, value.shape[3])


def states(B, H, groups, T, keys, D, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(B, T, H * groups, D, generator=g, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(B, keys, H, D, generator=g, dtype=dtype).transpose(1, 2) for _ in range(2))
    return [x.detach().requires_grad_() for x in (query, key, value)]


@given(
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    groups=st.integers(1, 3),
    T=st.integers(1, 19),
    cached=st.integers(0, 7),
    D=st.sampled_from([1, 5, 16]),
    window=st.none() | st.integers(1, 24),
    seed=st.integers(0, 99),
)
def test_any_shape_agrees_with_the_loop(B, H, groups, T, cached, D, window, seed):
    """Odd sizes, grouped heads, a cache of any length, a window of any size: the same as explicit scores."""
    query, key, value = states(B, H, groups, T, T + cached, D, seed)
    got = causal_attention(query, key, value, window=window)
    torch.testing.assert_close(got.double(), naive(query, key, value, window), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 8, 23])
@pytest.mark.parametrize("cached", [0, 6])
def test_gradients_agree_with_the_loop(window, cached):
    """Every path's gradients are those of explicit scores, with 9 heads over 3."""
    inputs = states(1, 3, 3, 23, 23 + cached, 64)
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    causal_attention(*inputs, window=window).square().sum().backward()
    naive(*copies, window=window).square().sum().backward()
    largest = max(x.grad.abs().max() for x in copies)
    for got, expected in zip(inputs, copies, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=2e-6 * float(largest), rtol=0)


def test_scaling_is_applied():
    """`scaling` replaces head ** -0.5."""
    query, key, value = states(1, 2, 1, 9, 9, 8)
    torch.testing.assert_close(
        causal_attention(query, key, value, scaling=0.9).double(), naive(query, key, value, scaling=0.9), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("window", [None, 3])
def test_values_may_be_narrower_than_keys(window):
    """The head size of the values is their own."""
    query, key, _ = states(1, 2, 2, 11, 11, 8)
    value = torch.randn(1, 2, 11, 5)
    torch.testing.assert_close(
        causal_attention(query, key, value, window=window).double(), naive(query, key, value, window), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize(("T", "window"), [(16, None), (16, 5), (1, None)])
def test_dropout_drops(T, window):
    """Dropout of nearly everything leaves nearly nothing; of nothing, everything; and the seed decides what."""
    query, key, value = states(1, 2, 1, T, 16, 8)
    value = torch.ones_like(value)
    torch.manual_seed(0)
    mostly_gone = causal_attention(query, key, value, window=window, dropout=0.97)
    torch.manual_seed(0)
    torch.testing.assert_close(mostly_gone, causal_attention(query, key, value, window=window, dropout=0.97), rtol=0, atol=0)
    assert (mostly_gone == 0).float().mean() > 0.3
    torch.testing.assert_close(causal_attention(query, key, value, window=window), torch.ones_like(mostly_gone))


@pytest.mark.parametrize(
    ("dtype", "masked", "grouped"),
    [(torch.bfloat16, False, True), (torch.float32, False, False), (torch.bfloat16, True, False)],
)
def test_grouped_heads_on_a_device_only_where_a_kernel_takes_them(dtype, masked, grouped, monkeypatch):
    """A GPU's flash kernel takes grouped heads in 16 bits without a mask; for the others keys and values are repeated."""
    asked, plain = [], _causal.scaled_dot_product_attention
    monkeypatch.setattr(
        _causal, "scaled_dot_product_attention", lambda *args, **how: (asked.append(how["enable_gqa"]), plain(*args, **how))[1]
    )
    query, key = (torch.empty(1, heads, 8, 16, dtype=dtype, device="meta") for heads in (4, 2))
    mask = torch.empty(8, 8, dtype=torch.bool, device="meta") if masked else None
    assert _causal.sdpa(query, key, key, mask=mask, causal=not masked).shape == (1, 4, 8, 16)
    assert asked == [grouped]
