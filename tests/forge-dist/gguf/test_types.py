"""Types of a GGUF file's tensors."""

import copy
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from forge_dist import gguf_rounded, gguf_type
from forge_dist.gguf._types import quantize, stored_bytes, unheld

from ..gguf_models import MODELS, model_of

gguf = pytest.importorskip("gguf", reason="gguf is an extra of forge-dist: pip install 'forge-dist[gguf]'")

BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
LEVELS = {"q8_0": 127, "q5_1": 31, "q5_0": 16, "q4_1": 15, "q4_0": 8}
"""Steps of a type's grid between 0 and its scale (`_0`), or between the least and the largest number of a block (`_1`)."""


@given(
    strategies.sampled_from(sorted(LEVELS)),
    strategies.lists(strategies.floats(-100, 100, width=32), min_size=32, max_size=32),
)
def test_a_block_is_rounded_within_its_step(dtype, numbers):
    """No number moves by more than a step, nor by more than the scale's own rounding to float16."""
    values = torch.tensor([numbers])
    reach = (values.max() - values.min()) if dtype.endswith("_1") else values.abs().max()
    moved = (gguf_rounded(values, dtype) - values).abs().max()
    # Scale and offset are float16 (11 bits), and smaller than 6e-8 they are nothing.
    assert moved <= reach / LEVELS[dtype] + values.abs().max() * 2**-10 + 6e-8 * 130


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *BLOCKS])
def test_the_sizes_and_values_are_those_of_the_file(dtype):
    """What is written takes the bytes that were announced; and what was rounded once is left alone."""
    values = torch.randn(2, 3, 64)
    written = quantize(values, dtype)
    assert written.nbytes == stored_bytes(values.shape, dtype)
    rounded = gguf_rounded(values, dtype)
    assert rounded.shape == values.shape
    if dtype in ("float32", "float16", "bfloat16"):
        assert torch.equal(rounded, values.to(getattr(torch, dtype)).float())
    if dtype in ("q8_0", "mxfp4"):
        assert np.array_equal(quantize(rounded, dtype), written)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "found"),
    [
        ("blk.0.ffn_up.weight", (96, 64), "q4_0", "q4_0"),
        ("output.weight", (400, 64), "q4_1", "q8_0"),
        ("token_embd.weight", (400, 64), "q5_0", "q8_0"),
        ("token_embd.weight", (400, 64), "float16", "float16"),
        ("blk.0.attn_output.weight", (64, 48), "q5_1", "float16"),
        ("blk.0.attn_norm.weight", (64,), "q4_0", "float32"),
        ("blk.0.ffn_gate_inp.weight", (4, 64), "q8_0", "float32"),
        ("blk.0.ffn_gate_exps.bias", (4, 64), "float16", "float32"),
        ("blk.0.ffn_gate_exps.weight", (4, 96, 64), "mxfp4", "mxfp4"),
        ("blk.0.attn_q.weight", (64, 64), "mxfp4", "q8_0"),
    ],
)
def test_which_tensor_is_of_which_type(name, shape, dtype, found):
    """The rule of llama.cpp's converter and llama-quantize, but for the ends of a file of few bits."""
    assert gguf_type(name, shape, dtype) == found


@pytest.mark.parametrize("tied", [True, False])
def test_which_weights_of_a_model_are_rounded(tied, tmp_path):
    """By the model's names, each of the type that the written file has it in; vectors are not."""
    import transformers

    from forge_dist import rounded_weights
    from forge_dist.gguf._architectures import ARCHITECTURES
    from forge_dist.gguf._export import tensors_to_write
    from forge_dist.gguf._layout import names_in_file

    arch = ARCHITECTURES["qwen2"]
    config = transformers.Qwen2Config(
        vocab_size=70, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    found = rounded_weights(model, "q4_0")
    assert found["model.embed_tokens.weight"] == ("q8_0", -1)
    assert found.get("lm_head.weight") == (None if tied else ("q8_0", -1))
    assert found["model.layers.0.mlp.down_proj.weight"] == ("float16", -1), "its rows have 48 numbers"
    assert found["model.layers.0.self_attn.q_proj.weight"] == ("q4_0", -1)
    assert {model.get_parameter(name).ndim for name in found} == {2}
    written = {name: gguf_type(name, tensor.shape, "q4_0") for name, tensor in tensors_to_write(model, arch, tmp_path).items()}
    names = {
        known: name for name, parts in names_in_file(model.state_dict(), config, arch, tmp_path).items() for known in parts
    }
    assert found == {names[known]: (kind, -1) for known, kind in written.items() if kind != "float32"}
    assert rounded_weights(model, "float32") == {}
    peft = pytest.importorskip("peft")
    for beside in ({"trainable_token_indices": [3, 4]}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": tied}):
        adapter = peft.LoraConfig(target_modules=["q_proj", "down_proj"], use_dora=True, **beside)
        assert rounded_weights(peft.get_peft_model(copy.deepcopy(model), adapter), "q4_0") == found, "once it is merged"


SHORT = {"gpt_oss", "gemma2", "qwen2_moe"}
"""Models that are tried in CI; the others in the lane."""


@pytest.mark.together
@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.lane) for name in MODELS])
def test_every_architecture_computes_with_its_files_numbers(name, tmp_path):
    """Rounded in place, each weight has the numbers of its tensors in the file: fused, reordered and transposed ones too."""
    algos = pytest.importorskip("forge_algos", reason="forge_algos is not installed beside forge_dist")
    from forge_dist import rounded_weights
    from forge_dist.gguf._architectures import ARCHITECTURES
    from forge_dist.gguf._layout import gguf_tensors

    model = model_of(name)
    tensors = gguf_tensors(model, ARCHITECTURES[model.config.model_type], tmp_path)
    written = {key: tensor.values().detach().clone() for key, tensor in tensors.items()}
    with algos.QuantizedWeights(model, rounded_weights(model, "q4_1")).in_place():
        for key, tensor in tensors.items():
            read = gguf_rounded(written[key], gguf_type(key, written[key].shape, "q4_1"))
            assert torch.equal(tensor.values(), read), key


def test_weights_of_experts_are_rounded():
    """One tensor of the model is two of the file, of one type; what the file has as a vector is not rounded."""
    import transformers

    from forge_dist import rounded_weights

    config = transformers.Qwen2MoeConfig(
        vocab_size=70, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    found = rounded_weights(transformers.Qwen2MoeForCausalLM(config), "q4_0")
    experts = {name.rpartition("layers.0.mlp.")[2]: kind for name, kind in found.items() if ".mlp." in name}
    assert experts["experts.gate_up_proj"] == experts["experts.down_proj"] == ("q4_0", -1)
    assert "shared_expert_gate.weight" not in experts


@pytest.mark.parametrize("dtype", ["float16", *BLOCKS])
@given(strategies.sampled_from([1.0, 6e4, 7e4, 5e5, 1.1e6, 2.2e6, 8e6, 9e6, 1e38]), strategies.booleans())
def test_what_a_type_cannot_hold_is_found(dtype, number, negative):
    """Each tensor is either named, or read back as finite numbers; no warning of numpy's passes."""
    values = torch.linspace(-1, 1, 64).reshape(2, 32)
    values[1, 7] = -number if negative else number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = quantize(values, dtype)
    kind = gguf.GGMLQuantizationType[{"float16": "F16"}.get(dtype, dtype.upper())]
    with np.errstate(all="ignore"):
        held = np.isfinite(gguf.quants.dequantize(written, kind)).all()
    assert bool(unheld(values, written, dtype)) is not bool(held)


@pytest.mark.parametrize(("number", "why"), [(float("nan"), "is NaN"), (float("-inf"), "is infinite")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *BLOCKS])
def test_what_is_no_number_is_found(dtype, number, why):
    """In whatever type, by its kind."""
    values = torch.ones(2, 32)
    values[0, 3] = number
    assert why in unheld(values, quantize(values, dtype), dtype)


def test_experts_of_mxfp4_stay_what_they_are():
    """Numbers that lie on the grid of mxfp4, as those of gpt-oss's experts, are rounded to themselves."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=draw) * torch.exp2(torch.randint(-12, 12, (64, 1), generator=draw))
    once = gguf_rounded(values, "mxfp4")
    assert not torch.equal(once, values)
    assert torch.equal(gguf_rounded(once, "mxfp4"), once)
