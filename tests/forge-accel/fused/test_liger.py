"""Liger's kernels against torch's own layers, interpreted by Triton on a CPU: outputs and gradients of whole small models.

Run by `hatch run triton:test`, whose environment holds liger-kernel and Triton. The interpreter has no library of device
functions: `rsqrt` and `tanh`, which Liger takes from there, are written out here. It computes with the bits of bfloat16 as
with whole numbers; here it widens, computes in float32 and rounds, as a GPU does. What is taken and what is left is tested
with a stand-in for Liger's functions too, which needs neither.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from forge_accel import use_liger

CPU = torch.device("cpu")


def interpreted(test):
    """Mark a test that runs Liger's own kernels."""
    there = os.environ.get("TRITON_INTERPRET") == "1" and all(
        importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton", "transformers")
    )
    reason = "needs liger-kernel, triton and TRITON_INTERPRET=1: hatch run triton:test"
    return pytest.mark.lane(pytest.mark.usefixtures("device_functions")(pytest.mark.skipif(not there, reason=reason)(test)))


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def device_functions(monkeypatch):
    """Give the interpreter the two device functions and the arithmetic of bfloat16 that it does not have."""
    import triton
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm

    @triton.jit
    def rsqrt(x):
        return 1 / tl.sqrt(x)

    @triton.jit
    def tanh(x):
        return 2 * tl.sigmoid(2 * x) - 1

    # A kernel's source is looked up in its file: these two must see `tl` there.
    monkeypatch.setitem(globals(), "tl", tl)
    monkeypatch.setattr(rms_norm, "rsqrt", rsqrt)
    monkeypatch.setattr(geglu, "tanh", tanh)
    compute_bfloat16(monkeypatch)


def compute_bfloat16(monkeypatch):
    """Let the interpreter's operations on bfloat16 be those of float32, rounded to the nearest."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    unary, binary, cast = builder.unary_op, builder.binary_op, builder.cast_impl

    def short(each):
        return each.dtype.scalar == tl.bfloat16 and each.data.dtype == np.uint16

    def widened(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def rounded(numbers):
        wide = np.ascontiguousarray(numbers, np.float32)
        bits = wide.view(np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest).astype(np.uint16)

    def result(out):
        return handle(out if out.dtype == np.bool_ else rounded(out), tl.bfloat16)

    def unary_op(self, arg, op):
        return result(op(widened(arg.data))) if short(arg) else unary(self, arg, op)

    def binary_op(self, lhs, rhs, op):
        both = short(lhs) and short(rhs)
        return result(op(widened(lhs.data), widened(rhs.data))) if both else binary(self, lhs, rhs, op)

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return handle(rounded(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    for name, function in {"unary_op": unary_op, "binary_op": binary_op, "cast_impl": cast_impl}.items():
        monkeypatch.setattr(builder, name, function)


def model_of(family):
    """A small model of random weights, norms included."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model


def step(model):
    """The loss of one row, and all gradients."""
    ids = torch.arange(1, 24)[None]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@interpreted
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_a_model_computes_the_same(family, dtype, close):
    """RMSNorm, the gated MLP and RoPE are replaced in every block, and loss and gradients stay."""
    model = model_of(family).to(dtype)
    names = list(model.state_dict())
    loss, grads = step(model)
    found = use_liger(model, dtype=dtype, device=CPU)
    assert {each.kind for each in found} == {"RMSNorm", "SwiGLU", "RoPE"}
    assert all(each.number for each in found), found
    assert list(model.state_dict()) == names
    fused, fused_grads = step(model)
    assert fused == pytest.approx(loss, rel=close)
    assert float((fused_grads - grads).norm() / grads.norm()) < close


@interpreted
def test_each_norm_has_its_own_formula_in_bfloat16():
    """Llama's norm is rounded before its weight, Gemma's has 1 added to it: the other is not taken."""
    for family, casting in {"Llama": "casting as llama, offset 0", "Gemma2": "casting as gemma, offset 1"}.items():
        found = {each.kind: each for each in use_liger(model_of(family).bfloat16(), dtype=torch.bfloat16, device=CPU)}
        assert casting in found["RMSNorm"].why


@interpreted
def test_a_layer_that_computes_otherwise_is_left(monkeypatch):
    """A norm with another formula under the same name keeps its own forward, and the reason has the difference."""
    model = model_of("Llama")
    kind = type(model.model.norm)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: own(self, hidden_states) * 1.1)
    found = {each.kind: each for each in use_liger(model, dtype=torch.float32, device=CPU)}
    assert found["RMSNorm"].number == 0
    assert "of the norm" in found["RMSNorm"].why
    assert found["SwiGLU"].number == 2
    assert "forward" not in vars(model.model.norm)


def rotate(x):
    """Rotate halves, as RoPE does."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def apply_rotary_pos_emb(query, key, cos, sin):
    """RoPE as transformers' attention layers have it, by this name."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate(query) * sin, key * cos + rotate(key) * sin


def renaming(old, new):
    """Decorate a forward as transformers 5.24 does: an argument has another name."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


class Plain(nn.Module):
    """Attention layer, as far as rotation goes."""

    def forward(self, x, *, positions):
        """Rotate."""
        return apply_rotary_pos_emb(x, x, *positions)[0]


class Decorated(nn.Module):
    """The same, decorated twice."""

    @renaming("embeddings", "positions")
    @renaming("other", "positions")
    def forward(self, x, *, positions):
        """Rotate."""
        return apply_rotary_pos_emb(x, x, *positions)[0]


@pytest.fixture
def stand_in(monkeypatch):
    """A module in the place of Liger's functions; what a test gives it is what Liger has."""
    module = ModuleType("liger_kernel.transformers.functional")
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("kind", [Plain, Decorated])
def test_rope_is_found_in_a_decorated_forward(stand_in, kind):
    """The decorator's work is still done, and the function under it calls Liger's."""
    calls = []

    def liger_rope(query, key, cos, sin):
        calls.append(query.shape)
        return apply_rotary_pos_emb(query, key, cos, sin)

    stand_in.liger_rope = liger_rope
    layer = kind()
    (found,) = use_liger(nn.ModuleList([layer]), dtype=torch.float32, device=CPU)
    assert (found.kind, found.number) == ("RoPE", 1)
    x, angles = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2).repeat(1, 1, 2)
    positions = (angles.cos(), angles.sin())
    calls.clear()
    out = layer(x, **{"embeddings" if kind is Decorated else "positions": positions})
    assert calls == [x.shape]
    assert torch.equal(out, kind()(x, positions=positions))


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
@pytest.mark.parametrize("where", ["output", "gradient"])
def test_a_kernel_that_gives_nan_is_left(stand_in, value, word, where):
    """NaN is larger than no limit and smaller than none: it does not count as equal."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * value if where == "output" else x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * value if where == "gradient" else grad

    def liger_rope(query, key, cos, sin):
        return tuple(Broken.apply(each) for each in apply_rotary_pos_emb(query, key, cos, sin))

    stand_in.liger_rope = liger_rope
    (found,) = use_liger(nn.ModuleList([Plain()]), dtype=torch.float32, device=CPU)
    assert found.number == 0
    assert word in found.why
