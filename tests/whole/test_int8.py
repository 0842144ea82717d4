"""Whole runs beside a base in 8 bits: any layout of the batch, killed and resumed, on ranks, merged."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forge
import forge_dist
from forge.cli._app import main
from forge_algos.adaptations.peft import _quantization as of_algos
from forge_dist.loading import _quantization as of_dist

from ..ranks import run_on_ranks
from .starts import final_state, metrics, sft, sft_with_signal, untimed, weights
from .verbs import run_verb, settings_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra bitsandbytes is not installed"
)


@pytest.fixture(scope="module")
def given(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a run of four steps, in several micro-batches a step."""
    return {
        **settings_of("sft", model_dir, tmp_path_factory.mktemp("rows")),
        "adapter": "qlora",
        "quant_type": "int8",
        "lora_r": 4,
        "learning_rate": 2e-2,
        "max_tokens_per_gpu": 64,
        "full_state_every_steps": 1,
        "keep_full_state": True,
    }


@pytest.fixture(scope="module")
def run(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run."""
    folder = tmp_path_factory.mktemp("int8") / "run"
    sft({**given, "ckpt_output_dir": str(folder)})
    return folder


def losses(run: Path) -> list[float]:
    """The losses of all steps, and those on held-out rows."""
    return [line[name] for name in ("loss", "eval_loss") for line in metrics(run) if name in line]


@pytest.mark.parametrize("more", [{"packing": "off"}, {"max_tokens_per_gpu": 512}])
def test_a_layout_changes_no_loss(more: dict[str, Any], given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """Each sample alone, or all of a step in one row: the losses of the run, which falls."""
    sft({**given, **more, "ckpt_output_dir": str(tmp_path)})
    assert losses(tmp_path) == pytest.approx(losses(run), rel=2e-6)
    held_out = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    assert held_out[-1] < held_out[0] - 0.01


@pytest.mark.slow
def test_killed_and_resumed_it_has_the_same_bits(given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    settings = {**given, "ckpt_output_dir": str(tmp_path)}
    with pytest.raises(RuntimeError, match="-9"):
        run_on_ranks(sft_with_signal, 1, settings, "optimizer", 3, "before", signal.SIGKILL, joined=False)
    sft(settings)
    assert untimed(tmp_path) == untimed(run)
    assert weights(tmp_path) == weights(run)
    assert final_state(tmp_path) == final_state(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_ranks(strategy: str, given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """The losses of one process."""
    settings = {**given, "strategy": strategy, "ckpt_output_dir": str(tmp_path)}
    run_on_ranks(run_verb, 2, "sft", settings, joined=False)
    assert losses(tmp_path) == pytest.approx(losses(run), rel=1e-4)


def test_it_is_merged_and_answers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged model is the trained one, on the numbers of the codes; `forge generate` asks the run."""
    adapter = next(run.glob("hf_format/samples_*"))
    assert json.loads((adapter / "forge_base.json").read_text())["quantization"]["load_in_8bit"] is True
    with pytest.raises(forge.SettingsError, match="beside a base in 4 or 8 bits.*give the dtype"):
        forge.export(run, tmp_path / "out", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(forge.export(run, tmp_path / "out", merge=True, dtype="float32"))
    trained = forge_dist.load_trained(str(adapter), dtype=torch.float32, device="cpu", as_trained=True)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, trained(ids).logits, rtol=1e-5, atol=1e-5)
    assert main(["generate", str(run), "what colour has the apple?", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()


def test_another_base_of_the_adapter_is_said(given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """Going on from it beside 4 bits is noted."""
    adapter = next(run.glob("hf_format/samples_*"))
    more = {"adapter_path": str(adapter), "quant_type": "nf4", "max_steps": 1, "ckpt_output_dir": str(tmp_path)}
    sft({**{name: value for name, value in given.items() if name != "lora_r"}, **more})
    assert "it was trained beside a base in 8 bits, and quant_type=nf4 has 4" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"adapter": "lora"}, "quant_type='int8' has no effect with adapter='lora'.*set adapter=qlora"),
        ({"double_quant": False}, "double_quant=False has no effect with quant_type='int8'"),
        ({"strategy": "zero3"}, "strategy=zero3.*use strategy=ddp or fsdp2"),
        ({"strategy": "fsdp2", "tp_size": 2}, "tp_size"),
    ],
)
def test_refused(more: dict[str, Any], named: str, given: dict[str, Any], tmp_path: Path) -> None:
    """What reads no such base is refused by name, before anything is written."""
    if "strategy" in more:
        with pytest.raises(Exception, match=named):
            run_on_ranks(run_verb, 2, "sft", {**given, **more, "ckpt_output_dir": str(tmp_path / "run")}, joined=False)
        return
    with pytest.raises(forge.SettingsError, match=named) as caught:
        sft({**given, **more, "ckpt_output_dir": str(tmp_path / "run")})
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_a_byte_a_weight(given: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """A byte a weight of the linear layers but the head, and four a row, in place of four bytes a weight."""
    adapters = {"lora": {"adapter": "lora", "quant_type": "nf4"}, "int8": {}}
    held = {}
    for name, more in adapters.items():
        found: Any = forge.dry_run(forge.sft, **{**given, **more, "dtype": "float32", "ckpt_output_dir": str(tmp_path)})
        held[name] = found.memory["phases"][0]["parts"]["weights"]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    shapes = [m.weight.shape for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert held["lora"] - held["int8"] == sum(3 * rows * columns - 4 * rows for rows, columns in shapes)


def test_leaves_agree() -> None:
    """Both leaves, which do not know each other, make the same layer of bitsandbytes': the same bits."""
    import bitsandbytes

    found = []
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for keep in (of_dist.multiply_exactly, of_algos._keep_as_loaded):
        torch.manual_seed(0)
        layer = bitsandbytes.nn.Linear8bitLt(32, 24, has_fp16_weights=False)
        layer.weight = bitsandbytes.nn.Int8Params(layer.weight.data, requires_grad=False).to("cpu")
        keep(layer)
        row = x.clone().requires_grad_()
        layer(row).square().sum().backward()
        found.append((layer(x), row.grad, *layer.state_dict().values(), layer.scales))
        kind = type(layer)
        of_algos._keep_as_loaded(layer)
        assert type(layer) is kind, "what the one made the other leaves"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
