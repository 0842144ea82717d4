"""Bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from forge_dist import ExportError
from forge_dist.exporting._layout import layout_of
from forge_dist.strategies._gather import whole_tensors
from forge_dist.verifying._tensors import Files, prove_model, prove_reloaded_names, prove_reloaded_tensor, same_bits

from ..alone import Alone

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@given(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3))
def test_a_tensor_has_its_own_bits(dtype, shape):
    """Any dtype and shape, none and one element included, equals its clone, also where it is not contiguous."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    assert same_bits(tensor, tensor.clone())
    if tensor.ndim > 1:
        assert same_bits(tensor.transpose(0, 1), tensor.transpose(0, 1).contiguous())


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), False),
        (torch.ones(2, 3), torch.ones(3, 2), False),
    ],
)
def test_bits_not_values(first, second, same):
    """The last bit, the sign of zero, the type and the shape count; NaN equals itself."""
    assert same_bits(first, second) is same


def test_a_model_has_its_checkpoint_names(save_base, make_model, architecture, tmp_path):
    """The tensors that are looked for are exactly those that transformers writes."""
    base, model = Path(save_base(architecture)), make_model(architecture)
    layout = layout_of(model, None)
    assert layout.files.keys() == load_file(base / "model.safetensors").keys()
    with Files(base, "model") as files:
        prove_model(files, model, layout, whole_tensors(model, model.device, None, Alone()), layout.files)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[0, 0] += 1
    with Files(base, "model") as files, pytest.raises(ExportError, match="up_proj.weight is not the one in memory"):
        prove_model(files, model, layout, whole_tensors(model, model.device, None, Alone()), layout.files)


def prove_files(expected, directory):
    """The float dtypes in the files of `directory`, if they hold what is expected."""
    with Files(directory, "model") as files:
        files.prove_names(expected)
        for name in sorted(expected):
            files.prove(name, expected[name])
        return files.dtypes


def prove_reloaded(model, reloaded, dtypes, where):
    """Whether a tensor of a reloaded model was rounded, if it holds those of the model."""
    ours, theirs = model.state_dict(), reloaded.state_dict()
    prove_reloaded_names(ours, theirs, where)
    rounded = [prove_reloaded_tensor(name, ours[name], theirs[name], dtypes, where) for name in ours]
    return any(rounded)


EXPECTED = {"a": torch.randn(3), "b": torch.randn(2, 2), "n": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("a"), r"lacks tensor a \(1 such\)"),
        (lambda t: t.update({"z": torch.zeros(1), "y": torch.zeros(1)}), r"unknown tensor y \(2 such\)"),
        (lambda t: t["b"].view(torch.uint8)[0, 0].add_(1), "the tensor b is not the one in memory: the largest difference"),
        (lambda t: t.update({"b": t["b"].reshape(4)}), r"the tensor b .*shape \[4\] instead of \[2, 2\]"),
        (lambda t: t.update({"n": torch.tensor([1, 3])}), "the tensor n is not"),
        (lambda t: t.update({"b": t["b"].to(torch.int64)}), "the tensor b is stored as torch.int64"),
    ],
)
def test_files_that_differ_are_refused(tmp_path, change, message):
    """The first tensor that is missing, too many or different is named, with how far off it is."""
    tensors = {name: tensor.clone() for name, tensor in EXPECTED.items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=message):
        prove_files(EXPECTED, tmp_path)


def test_files_that_agree(tmp_path):
    """The float dtypes found are those of the files: rounded on the way out, or not."""
    save_file({"a": EXPECTED["a"].bfloat16(), "b": EXPECTED["b"], "n": EXPECTED["n"]}, tmp_path / "model.safetensors")
    assert prove_files(EXPECTED, tmp_path) == {torch.bfloat16, torch.float32}


def test_several_files(tmp_path):
    """A tensor in any of the files is compared."""
    tensors = {name: tensor.clone() for name, tensor in EXPECTED.items()}
    places = dict.fromkeys(("a", "n"), "1.safetensors") | {"b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"a": tensors["a"], "n": tensors["n"]}, tmp_path / "1.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "2.safetensors")
    assert prove_files(EXPECTED, tmp_path) == {torch.float32}
    save_file({"b": tensors["b"] + 1}, tmp_path / "2.safetensors")
    with pytest.raises(ExportError, match=r"2\.safetensors: the tensor b"):
        prove_files(EXPECTED, tmp_path)


def test_a_reloaded_model_that_differs_is_refused(make_model, tmp_path):
    """Every tensor counts, of whatever part; one that went through a stored type is compared after the same rounding."""
    model, other = make_model("qwen3"), make_model("qwen3")
    assert prove_reloaded(model, other, set(), tmp_path) is False
    assert prove_reloaded(model, make_model("qwen3").bfloat16().float(), {torch.bfloat16}, tmp_path) is True
    with pytest.raises(ExportError, match=r"loads a tensor model\.embed_tokens\.weight"):
        prove_reloaded(model, make_model("qwen3").bfloat16().float(), {torch.float16}, tmp_path)
    other.lm_head.weight.data[0, 0] += 1
    with pytest.raises(ExportError, match=r"loads a tensor lm_head\.weight .*difference is 1"):
        prove_reloaded(model, other, set(), tmp_path)
    other.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ExportError, match="with the unknown tensor extra"):
        prove_reloaded(model, other, set(), tmp_path)
    with pytest.raises(ExportError, match="without tensor extra"):
        prove_reloaded(other, model, set(), tmp_path)
