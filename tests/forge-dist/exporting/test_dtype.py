"""The dtype in which an export stores each tensor."""

import pytest
import torch

from forge_dist import export_model
from forge_dist.exporting._dtype import stored_dtype


def test_floats_alone_are_cast(make_model):
    """Floats are stored as asked for, and as they are without a dtype; whole numbers stay what they are."""
    model = make_model("llama-untied")
    weight, steps = model.lm_head.weight, torch.tensor([3])
    assert stored_dtype(model, torch.bfloat16)("lm_head.weight", weight) == torch.bfloat16
    assert stored_dtype(model, None)("lm_head.weight", weight) == torch.float32
    assert stored_dtype(model, torch.bfloat16)("steps", steps) == torch.int64


@pytest.mark.parametrize(
    ("dtype", "strict", "kept"),
    [(torch.bfloat16, True, True), (torch.float16, True, True), (torch.bfloat16, False, False), (torch.float16, False, True)],
)
def test_what_the_architecture_keeps_in_float32_stays(make_model, dtype, strict, kept):
    """Modules that transformers upcasts when loading are not rounded on the way out, by transformers' rules for each type."""
    model = make_model("llama-untied")
    setattr(model, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", {"q_proj"})
    stored = stored_dtype(model, dtype)
    for name, expected in {"q_proj": torch.float32 if kept else dtype, "k_proj": dtype}.items():
        full = f"model.layers.1.self_attn.{name}.weight"
        assert stored(full, model.get_parameter(full)) == expected


def test_the_model_is_not_cast(make_model, state_of, tmp_path):
    """An export in another dtype leaves every bit of the model in memory."""
    model = make_model("llama-untied")
    before = state_of(model)
    export_model(model, tmp_path / "out", dtype=torch.bfloat16)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items())
