"""MXFP4 weights, written here by the format's definition, and read dequantized."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forge_dist import ModelError, base_dtype, check_model_path, export_model, load_model
from forge_dist.loading import _mxfp4

from ...ranks import run_on_ranks

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""What the three lower bits of an e2m1 number stand for; the fourth is the sign (OCP MX 1.0, section 5.3.3)."""


def quantized(weight):
    """float[..., N] → (uint8[..., N/32, 16], uint8[..., N/32]): two codes a byte, the first one low, and e8m0 exponents."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(dim=-1).clamp(min=2.0**-100).log2().floor() - 2  # the largest number is 1.5 * 2**2
    scaled = blocks / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(NUMBERS)).abs().argmin(dim=-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def dequantized(blocks, scales):
    """The numbers float32[..., N], one code after the other."""
    rows = []
    for row, exponents in zip(blocks.flatten(0, -3).tolist(), scales.flatten(0, -2).tolist(), strict=True):
        rows.append(
            [
                (-1 if code >= 8 else 1) * NUMBERS[code % 8] * 2.0 ** (exponent - 127)
                for block, exponent in zip(row, exponents, strict=True)
                for byte in block
                for code in (byte % 16, byte // 16)
            ]
        )
    return torch.tensor(rows).view(*blocks.shape[:-2], -1)


@pytest.fixture
def gpt_oss(tmp_path):
    """Path of a tiny gpt-oss whose experts are in MXFP4, and what its weights stand for."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        initializer_range=0.2,
    )
    path = tmp_path / "base"
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    stored, expected = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            # Rows of outputs in the file, of inputs in memory.
            blocks, scales = quantized(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = dequantized(blocks, scales).transpose(1, 2)
        else:
            stored[name], expected[name] = tensor, tensor.float()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return str(path), expected


def divided(ranks, path):
    import forge_dist

    settings = forge_dist.StrategySettings(strategy="fsdp2")
    strategy = forge_dist.make_strategy(settings, ranks, device=torch.device("cpu"), adapter=False)
    model = strategy.load(path, dtype=torch.float32, attention="eager")
    return {name: tensor.clone() for name, tensor in strategy.whole(model) if tensor is not None}


@pytest.mark.slow
def test_shards_are_what_the_format_says(gpt_oss):
    """Each rank dequantizes its own: fsdp2 is what is advised where the machine's memory is too small for the whole."""
    path, expected = gpt_oss
    found = run_on_ranks(divided, 2, path)[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())


def test_the_weights_are_what_the_format_says(gpt_oss):
    """Each weight is what the codes and scales stand for, in the dtype that was asked for, and all of them train."""
    path, expected = gpt_oss
    check_model_path(path)
    assert base_dtype(path) == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(path, dtype=dtype, device="cpu", attention=None)
        found = model.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name].float(), tensor), name
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_export_is_a_plain_model(gpt_oss, tmp_path):
    """It is written as floats under plain names, without a quantization_config, and plain transformers reads all of it."""
    path, expected = gpt_oss
    model = load_model(path, dtype=torch.float32, device="cpu", attention=None)
    export = export_model(model, tmp_path / "export", dtype=torch.bfloat16)
    assert load_file(export / "model.safetensors").keys() == expected.keys()
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values())
    assert plain.dtype == torch.bfloat16
    for name, tensor in expected.items():
        assert torch.equal(plain.state_dict()[name].float(), tensor), name


def test_too_little_memory_is_refused_before_loading(gpt_oss, monkeypatch):
    """The error says how much it takes and how much there is."""
    path, expected = gpt_oss
    needed = 4 * sum(tensor.numel() for tensor in expected.values())
    monkeypatch.setattr(_mxfp4, "_memory", lambda: needed)
    load_model(path, dtype=torch.float32, device="cpu", attention=None)
    monkeypatch.setattr(_mxfp4, "_memory", lambda: needed - 1)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ModelError, match=r"take \d+\.\d GiB dequantized to torch.float32, and this machine has \d+\.\d GiB"):
        load_model(path, dtype=torch.float32, device="cpu", attention=None)


def test_it_is_not_quantized_again(gpt_oss):
    """qlora on MXFP4 is refused with what to do."""
    path, _ = gpt_oss
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ModelError, match="not quantized again: use adapter=lora"):
        load_model(path, dtype=torch.float32, device="cpu", attention=None, quantization=four_bits)


def test_other_quantizations_are_refused(gpt_oss):
    """No other quantized weights are trained."""
    path, _ = gpt_oss
    file = Path(path) / "config.json"
    file.write_text(file.read_text().replace('"mxfp4"', '"fp8"'))
    with pytest.raises(ModelError, match="quantized weights"):
        check_model_path(path)
