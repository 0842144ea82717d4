"""Liger's kernels against torch's own layers, interpreted by Triton on a CPU: outputs and gradients of whole small models.

Run by `hatch run liger:test`, whose environment holds liger-kernel and Triton. The interpreter has no library of device
functions: `rsqrt` and `tanh`, which Liger takes from there, are written out here.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from forge_accel import use_liger

pytestmark = [
    pytest.mark.lane,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1"
        or any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton", "transformers")),
        reason="needs liger-kernel, triton and TRITON_INTERPRET=1: hatch run liger:test",
    ),
]

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def device_functions(monkeypatch):
    """Give the interpreter the two device functions that it does not have."""
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


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_a_model_computes_the_same(family):
    """RMSNorm, the gated MLP and RoPE are replaced in every block, and loss and gradients stay.

    In float32: numpy, by which Triton interprets, has no bfloat16.
    """
    model = model_of(family)
    names = list(model.state_dict())
    loss, grads = step(model)
    found = use_liger(model, dtype=torch.float32, device=torch.device("cpu"))
    assert {each.kind for each in found} == {"RMSNorm", "SwiGLU", "RoPE"}
    assert all(each.number for each in found), found
    assert list(model.state_dict()) == names
    fused, fused_grads = step(model)
    assert fused == pytest.approx(loss, rel=1e-5)
    assert float((fused_grads - grads).norm() / grads.norm()) < 1e-5


def test_a_layer_that_computes_otherwise_is_left(monkeypatch):
    """A norm with another formula under the same name keeps its own forward, and the reason has the difference."""
    model = model_of("Llama")
    kind = type(model.model.norm)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states: own(self, hidden_states) * 1.1)
    found = {each.kind: each for each in use_liger(model, dtype=torch.float32, device=torch.device("cpu"))}
    assert found["RMSNorm"].number == 0
    assert "of the norm" in found["RMSNorm"].why
    assert found["SwiGLU"].number == 2
    assert "forward" not in vars(model.model.norm)
