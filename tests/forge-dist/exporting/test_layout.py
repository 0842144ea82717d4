"""What an export will hold is known before it is written."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from forge_dist.exporting._layout import as_stored, first_names, kept_once, layout_of
from forge_dist.verifying._tensors import same_bits

from ..conftest import SIZES


def mixture():
    """A model whose experts lie together in memory, and one by one in its files."""
    config = transformers.MixtralConfig(num_local_experts=3, num_experts_per_tok=2, **SIZES)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)


def model_of(architecture, make_model):
    return mixture() if architecture == "mixtral" else make_model(architecture)


ALL = ["llama-tied", "llama-untied", "qwen3", "gemma3", "mixtral"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("architecture", ALL)
def test_it_is_what_transformers_writes(architecture, make_model, tmp_path, dtype):
    """Names, shapes and types are those in the files of save_pretrained, for a fresh model and one that was loaded."""
    model = model_of(architecture, make_model)
    model.save_pretrained(tmp_path / "fresh")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    for one, name in ((model, "1"), (loaded, "2")):
        found = layout_of(one, dtype).files
        copied = type(one)(one.config) if dtype is None else type(one)(one.config).to(dtype)
        if hasattr(one, "_weight_conversions"):
            copied._weight_conversions = one._weight_conversions
        copied.save_pretrained(tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in written.items()}
        assert all(tensor.is_meta for tensor in found.values())


@pytest.mark.parametrize("architecture", ALL)
def test_block_by_block_is_the_whole(architecture, make_model):
    """Turning back the internal layout of each block by itself gives the bits of turning back the model; blocks are small."""
    model = model_of(architecture, make_model)
    layout = layout_of(model, None)
    state = kept_once(model, model.state_dict())
    assert state.keys() == layout.sources.keys() == layout.blocks.keys()
    found = {}
    for block in set(layout.blocks.values()):
        found |= as_stored(model, {name: state[name] for name in block})
        assert len(block) < 20
    expected = as_stored(model, state)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_tied_weights_have_one_source(make_model):
    """Each name of a tied weight leads to the one that is written."""
    layout = layout_of(make_model("llama-tied"), None)
    assert layout.aliases["lm_head.weight"] == layout.aliases["model.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in layout.sources
    assert first_names(make_model("llama-tied"))["lm_head.weight"] == "model.embed_tokens.weight"
    untied = layout_of(make_model("llama-untied"), None)
    assert untied.aliases["lm_head.weight"] == "lm_head.weight"


def test_a_partitioned_tensor_has_its_whole_shape(make_model):
    """What ZeRO-3 leaves in place of a weight says what shape it had."""
    model = make_model("qwen3")
    expected = layout_of(model, None).files["lm_head.weight"].shape
    parameter = model.lm_head.weight
    parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert layout_of(model, None).files["lm_head.weight"].shape == expected


def test_offloaded_weights_are_refused(make_model):
    """A tensor whose data is elsewhere cannot be exported."""
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is offloaded"):
        layout_of(make_model("qwen3").to("meta"), None)
