"""The state of a model in the float type of an export."""

import pytest
import torch

from forge_dist.exporting._dtype import cast_state_dict


def test_no_cast_no_copy(make_model):
    """Without a dtype, or with the model's own, every tensor is the model's own memory."""
    model = make_model("llama-tied")
    for dtype in (None, torch.float32):
        for name, tensor in cast_state_dict(model, dtype).items():
            assert tensor.data_ptr() == model.state_dict()[name].data_ptr()


def test_floats_are_cast_and_the_model_is_not(make_model, state_of):
    """Each float is rounded as torch rounds it; the model keeps its bits."""
    model = make_model("llama-untied")
    model.register_buffer("steps", torch.tensor([3]))
    before = state_of(model)
    cast = cast_state_dict(model, torch.bfloat16)
    assert cast["steps"].dtype == torch.int64
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
        if tensor.is_floating_point():
            assert torch.equal(cast[name], tensor.to(torch.bfloat16))


def test_tied_weights_are_cast_once(make_model):
    """Two names of one tensor stay two names of one tensor."""
    cast = cast_state_dict(make_model("llama-tied"), torch.bfloat16)
    assert cast["lm_head.weight"] is cast["model.embed_tokens.weight"]
    cast = cast_state_dict(make_model("llama-untied"), torch.bfloat16)
    assert cast["lm_head.weight"] is not cast["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("dtype", "strict", "kept"),
    [(torch.bfloat16, True, True), (torch.float16, True, True), (torch.bfloat16, False, False), (torch.float16, False, True)],
)
def test_what_the_architecture_keeps_in_float32_stays(make_model, dtype, strict, kept):
    """Modules that transformers upcasts when loading are not rounded on the way out, by transformers' rules for each type."""
    model = make_model("llama-untied")
    setattr(model, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", {"q_proj"})
    cast = cast_state_dict(model, dtype)
    assert cast["model.layers.1.self_attn.q_proj.weight"].dtype == (torch.float32 if kept else dtype)
    assert cast["model.layers.1.self_attn.k_proj.weight"].dtype == dtype


def test_what_is_elsewhere_is_refused(make_model):
    """A tensor on the meta device has no data to write."""
    with pytest.raises(ValueError, match="offloaded"):
        cast_state_dict(make_model("llama-tied").to("meta"), None)
