"""An export is proved, or refused by name."""

import json
import math
import random
import shutil

import pytest
import torch
from hypothesis import given, strategies as st

from forge_dist import ExportError, check_export, export_model, load_model
from forge_dist.verifying._judge import difference


@pytest.fixture
def model(base, documents):
    """A model as a run holds it: our attention, in training mode, float32."""
    return load_model(
        base, dtype=torch.float32, device="cpu", attention="check_documents", attention_function=documents
    ).train()


@pytest.fixture
def exported(model, tmp_path):
    """Its export."""
    return export_model(model, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_export_passes(save_base, architecture, tmp_path, samples, dtype):
    """What was exported passes, for every architecture and type; in float32 the two losses are the same number."""
    model = load_model(save_base(architecture), dtype=torch.float32, device="cpu")
    found = check_export(model, export_model(model, tmp_path / "out", dtype=dtype), samples)
    assert found.loss_tokens == 15
    assert found.tensors == len({tensor.data_ptr() for tensor in model.state_dict().values()})
    assert found.difference <= (1e-6 if dtype == torch.float32 else 5e-3)
    assert found.tolerance == (1e-5 if dtype == torch.float32 else 1e-1)
    assert found.difference == abs(found.reloaded - found.in_memory) / max(found.in_memory, 1.0)


def test_a_model_in_bfloat16_passes(base, tmp_path, samples):
    """A model that is held in bfloat16 is compared in bfloat16."""
    model = load_model(base, dtype=torch.bfloat16, device="cpu")
    found = check_export(model, export_model(model, tmp_path / "out"), samples)
    assert found.in_memory == found.reloaded
    assert found.tolerance == 2e-2


def test_the_loss_is_the_model_s(model, exported, samples):
    """The loss that is reported is that of plain transformers on the same samples."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(exported)
    input_ids, labels = samples[1]
    expected = plain(input_ids=torch.tensor([input_ids]), labels=torch.tensor([labels])).loss.item()
    assert check_export(model, exported, samples[1:2]).reloaded == pytest.approx(expected, rel=1e-6)


def test_dropout_and_autocast_are_off_meanwhile(model, exported, samples):
    """A model that trains with dropout, under autocast, is compared without both."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    alone = check_export(model.eval(), exported, samples)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check_export(model.train(), exported, samples) == alone
    assert alone.difference <= 1e-6


def test_the_run_goes_on_as_if_nothing_had_been(model, exported, samples, state_of):
    """Weights, gradients, modes, attention and random state are afterwards as before."""
    model.model.norm.eval()
    model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
    before, grad = state_of(model), model.lm_head.weight.grad.clone()
    torch.manual_seed(3)
    random.seed(3)
    draws = torch.random.get_rng_state(), random.getstate()
    check_export(model, exported, samples)
    assert torch.equal(torch.random.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(model.lm_head.weight.grad, grad)
    assert model.config._attn_implementation == "check_documents"
    assert [name for name, module in model.named_modules() if not module.training] == ["model.norm"]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named(model, exported, samples, file):
    """Without its weights or its configuration a directory does not pass."""
    (exported / file).unlink()
    with pytest.raises(ExportError, match=r"out.*" + file.replace(".", r"\.")):
        check_export(model, exported, samples)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_named(model, exported, samples, size):
    """Weights that end anywhere too early do not pass."""
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ExportError, match=r"model\.safetensors is not a whole"):
        check_export(model, exported, samples)


@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("bit", [1, 128])
def test_a_flipped_bit_is_found(model, exported, samples, where, bit):
    """One bit, anywhere in the data, the lowest of a number included, is found, and its tensor named."""
    weights = exported / "model.safetensors"
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + int(where * (len(content) - start - 1))] ^= bit
    weights.write_bytes(content)
    with pytest.raises(ExportError, match=r"the tensor \S+ is not the one in memory"):
        check_export(model, exported, samples)


def test_a_flipped_bit_in_the_header_is_found(model, exported, samples):
    """Any byte of the header, flipped, is refused (but for the padding and the note of the format, which mean nothing)."""
    weights = exported / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    names = content[8 : 8 + length].index(b"model.")
    for at in range(8 + names, 8 + len(content[8 : 8 + length].rstrip()), 97):
        weights.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ExportError):
            check_export(model, exported, samples[2:])


def test_a_weight_changed_in_memory_is_found(model, exported, samples):
    """An export of an older model does not pass for the present one, however small the change."""
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] *= 1 + 2**-22
    with pytest.raises(ExportError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is not the one in memory"):
        check_export(model, exported, samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0.5}, "nats per token instead of"),
        ({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}, "nats per token instead of"),
        ({"hidden_act": "relu"}, "nats per token instead of"),
        ({"num_attention_heads": 8}, "shape of weight"),
        ({"num_hidden_layers": 1}, "unexpected weight"),
        ({"num_hidden_layers": 3}, "lacks weight"),
        ({"vocab_size": 62}, "another shape of weight"),
        ({"model_type": "nosuchmodel"}, "cannot be read back"),
    ],
)
def test_a_wrong_configuration_is_found(model, exported, samples, edit_config, changes, message):
    """Right weights under a wrong config.json compute another loss or do not fit; both are refused."""
    edit_config(exported, **changes)
    with pytest.raises(ExportError, match=message):
        check_export(model, exported, samples)


def test_an_untied_configuration_is_found(model, exported, samples, edit_config):
    """A tied head that the configuration says is untied would come back random; it is refused."""
    edit_config(exported, tie_word_embeddings=False)
    with pytest.raises(ExportError, match=r"lm_head\.weight"):
        check_export(model, exported, samples)


def test_a_bfloat16_export_is_bit_checked_too(model, tmp_path, samples):
    """The looser loss bound of a rounded export hides no flipped bit."""
    exported = export_model(model, tmp_path / "half", dtype=torch.bfloat16)
    content = bytearray((exported / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (exported / "model.safetensors").write_bytes(content)
    with pytest.raises(ExportError, match="is not the one in memory"):
        check_export(model, exported, samples)


def test_another_run_s_export_does_not_pass(model, exported, samples, save_base, tmp_path):
    """A directory of the same shape from another model is refused."""
    shutil.rmtree(exported)
    shutil.copytree(save_base("llama-tied", name="other"), exported)
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert check_export(model, exported, samples).difference == 0  # the same seed: the same model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with pytest.raises(ExportError, match="is not the one in memory"):
        check_export(model, exported, samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slightly_wrong_configuration_is_found(model, tmp_path, samples, edit_config, dtype):
    """A change that moves the loss by less than rounding the weights does is found in a rounded export too."""
    exported = export_model(model, tmp_path / "slight", dtype=dtype)
    edit_config(exported, rms_norm_eps=1e-3)
    with pytest.raises(ExportError, match="nats per token instead of"):
        check_export(model, exported, samples)


def test_a_float16_export_that_overflows_is_found(model, tmp_path, samples):
    """Weights that float16 cannot hold become infinite in the file, faithfully; the loss tells."""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    exported = export_model(model, tmp_path / "half", dtype=torch.float16)
    with pytest.raises(ExportError, match="instead of"):
        check_export(model, exported, samples)


@given(st.floats(1e-30, 1e3), st.floats(-1.0, 1.0))
def test_differences_are_relative_above_one_nat(expected, error):
    """The measure is symmetric in sign, zero only for equals, and no small loss makes it large."""
    found = difference(expected, expected + error)
    assert 0 <= found <= abs(error) * (1 + 1e-9)
    assert found == pytest.approx(abs((expected + error) - expected) / max(expected, 1.0))
    assert math.isnan(difference(expected, math.nan))


@pytest.mark.parametrize("unlearned", [[], [([1, 2, 3], [-100, -100, -100])], [([4], [4])]])
def test_nothing_to_compare_is_refused(model, exported, unlearned):
    """Without a learned token there is no loss, and no proof."""
    with pytest.raises(ExportError, match="has a learned token"):
        check_export(model, exported, unlearned)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, r"samples\[1\] is a dict, and a pair \(input_ids, labels\) is wanted"),
        (([1, 10**6], [1, 2]), r"samples\[1\]: its input_ids hold 1000000, and the model knows tokens from 0 to \d+: tokenize"),
        (([1, -100], [1, 2]), "its input_ids hold -100"),
        (([1, 2], [1, -5]), "its labels hold -5"),
        (([1, 2], [1]), "has 2 input_ids and 1 labels"),
        (([[1, 2]], [[1, 2]]), r"its input_ids have the shape \[1, 2\]"),
        (("one", "two"), "its input_ids are no whole numbers"),
    ],
)
def test_what_is_no_sample_is_named(model, exported, samples, wrong, said):
    """Rows as dicts, ids of another vocabulary and the like: one error, before anything is read back."""
    with pytest.raises(ExportError, match=said):
        check_export(model, exported, [samples[0], wrong])


def test_a_diverged_model_is_refused(model, tmp_path, samples):
    """A model that computes NaN is no success, though it was written faithfully."""
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    exported = export_model(model, tmp_path / "nan")
    with pytest.raises(ExportError, match="loss of the model in memory is nan"):
        check_export(model, exported, samples)
    assert model.training


def test_no_directory_at_all(model, tmp_path, samples):
    """A path where nothing is, is named."""
    with pytest.raises(ExportError, match="nothing-here"):
        check_export(model, tmp_path / "nothing-here", samples)
