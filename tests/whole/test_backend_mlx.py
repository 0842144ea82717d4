"""Backend `mlx`: mlx-lm's tuner on forge's rows; on Linux by mlx-cpu (`hatch run mlx:test`)."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import forge
from forge.backends._mlx import MLXBackend
from forge.talking._model import AnsweringModel

from .starts import metrics
from .verbs import settings_of

if TYPE_CHECKING:
    from pathlib import Path

# mlx-lm's own dependencies warn of what is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def loads() -> bool:
    """Whether MLX is there, with what computes: on Linux that is mlx-cpu."""
    try:
        import mlx.core
        import mlx_lm  # noqa: F401 - whether it can be
    except ImportError:
        return False
    return mlx.core is not None


installed = pytest.mark.skipif(not loads(), reason="MLX is not installed here: hatch run mlx:test")


def given(model_dir: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of a short LoRA run in several micro-batches a step, clipped and with weight decay."""
    found = settings_of("sft", model_dir, folder)
    del found["validation_split"]
    own = {
        "adapter": "lora",
        "lora_r": 4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.3,
        "warmup_steps": 2,
        "max_tokens_per_gpu": 128,
    }
    return {**found, "dtype": "float32", **own, **more}


@installed
@pytest.mark.slow
def test_the_steps_are_forges_and_the_adapter_is_pefts(model_dir: Path, tmp_path: Path) -> None:
    """Loss, norm and rate of each step are those of forge's own loop; plain PEFT has mlx-lm's logits."""
    import numpy as np
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    settings = given(model_dir, tmp_path)
    result = forge.sft(**settings, backend="mlx", ckpt_output_dir=tmp_path / "mlx")
    forge.sft(**settings, device="cpu", ckpt_output_dir=tmp_path / "forge")
    theirs, own = metrics(tmp_path / "mlx"), metrics(tmp_path / "forge")
    assert len(theirs) == len(own) == 4
    for one, other in zip(theirs, own, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert one["lr"] == pytest.approx(other["lr"], rel=1e-6)
        assert (one["samples"], one["tokens"], one["loss_tokens"]) == (other["samples"], other["tokens"], other["loss_tokens"])
    log = (tmp_path / "mlx" / "log.txt").read_text()
    assert "Not promised with it" in log
    assert "the adapter is PEFT's" in log
    assert "loaded back" in log
    assert "backend: mlx" in (tmp_path / "mlx" / "config.yaml").read_text()

    # what mlx-lm itself saved, applied by mlx-lm, and the export, applied by plain PEFT
    from forge.backends._mlx_model import attach, load_base, peft_layers

    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), result.model_dir).eval()
    exported = load_file(result.model_dir / "adapter_model.safetensors")
    assert any(float(value.abs().max()) > 0 for name, value in exported.items() if "lora_B" in name)
    import mlx.core as mx

    twin = load_base(str(model_dir), tmp_path / "twin", "float32")
    attach(twin, peft_layers(peft), 0.0)
    twin.load_weights(str(tmp_path / "mlx" / "backend" / "adapters.safetensors"), strict=False)
    twin.eval()
    ids = list(range(5, 37))
    with torch.no_grad():
        expected = peft(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(np.array(twin(mx.array([ids])))[0] - expected).max() < 1e-5


@installed
def test_an_adapter_ends_its_answers_as_it_was_trained(model_dir: Path, tmp_path: Path) -> None:
    """The token that ends a turn of the template and is no EOS of the model: in `forge chat` and in a merged export."""
    from transformers import GenerationConfig

    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(model_dir, base)
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    GenerationConfig(eos_token_id=0).save_pretrained(base)
    settings = given(base, tmp_path) | {"model_path": str(base), "max_steps": 1, "warmup_steps": 0}
    forge.sft(**settings, backend="mlx", ckpt_output_dir=run)
    assert "chat_template: <|im_end|> ends a turn and was no EOS of the model" in (run / "log.txt").read_text()
    assert AnsweringModel(run)._model.generation_config.eos_token_id == [0, 2]
    merged = forge.export(run, tmp_path / "merged", merge=True)
    assert GenerationConfig.from_pretrained(merged).eos_token_id == [0, 2]


@installed
def test_an_architecture_that_is_read_otherwise_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's model is compared with transformers' before the first step, and nothing is trained where they differ."""
    from forge.backends import _mlx_run

    def other(*arguments: Any) -> Any:
        model = load_base(*arguments)
        config = json.loads((tmp_path / "run" / "backend" / "model" / "config.json").read_text())
        assert config["rope_theta"] == 10000
        model.model.layers[0].self_attn.rope.base = 77.0
        return model

    from forge.backends._mlx_model import load_base

    monkeypatch.setattr(_mlx_run, "load_base", other)
    with pytest.raises(forge.SettingsError, match="before the first step, mlx-lm's model computes other logits"):
        forge.sft(**given(model_dir, tmp_path), backend="mlx", ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("verb", "more", "said"),
    [
        ("dpo", {}, "backend=mlx has no dpo; it has sft"),
        ("sft", {"adapter": "none"}, "adapter=none is not available with backend=mlx; it has lora, rslora"),
        ("sft", {"optimizer": "muon"}, "optimizer=muon has no effect with backend=mlx: it has AdamW"),
        ("sft", {"init_lora_weights": "pissa"}, "init_lora_weights=pissa has no effect with backend=mlx"),
        ("sft", {"nproc_per_node": 2}, "nproc_per_node=2 has no effect with backend=mlx: it is one process"),
    ],
)
def test_what_it_lacks_is_refused_by_name(
    verb: str, more: dict[str, Any], said: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    monkeypatch.setattr(MLXBackend, "_check_installed", lambda *_: None)
    settings = {**settings_of(verb, model_dir, tmp_path), "adapter": "lora", "backend": "mlx", **more}
    settings.pop("validation_split")
    with pytest.raises(forge.SettingsError, match=said):
        getattr(forge, verb)(**settings, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("mlx_lm") is not None, reason="mlx-lm is installed here")
def test_without_mlx_the_command_that_installs_it(model_dir: Path, tmp_path: Path) -> None:
    """One error, with what to install."""
    with pytest.raises(forge.SettingsError, match=r"mlx.*is not installed: `pip install 'forge-llm\[mlx\]'`"):
        forge.sft(**given(model_dir, tmp_path), backend="mlx", ckpt_output_dir=tmp_path / "run")


def test_a_folder_named_mlx_is_not_mlx(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-cpu without mlx leaves a namespace that can be found and not used: mlx is named, and nothing is written."""
    from importlib.metadata import PackageNotFoundError

    from forge.backends import _backend

    def version(name: str) -> str:
        if name == "mlx":
            raise PackageNotFoundError(name)
        return "0.32.2"

    monkeypatch.setattr(_backend, "find_spec", lambda name: name)
    monkeypatch.setattr(_backend, "version", version)
    with pytest.raises(forge.SettingsError, match=r"mlx is not installed: `pip install 'forge-llm\[mlx\]'`"):
        forge.sft(**given(model_dir, tmp_path), backend="mlx", ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mlx_without_what_computes(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux mlx and mlx-lm may be installed without mlx-cpu: that is named, before anything is written."""
    from forge.backends import _backend, _mlx

    for module in (_backend, _mlx):
        monkeypatch.setattr(module, "version", lambda _: "0.32.2")
    monkeypatch.setattr(_backend, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(
        forge.SettingsError, match=r"mlx 0.32.2 is installed and cannot be loaded .*`pip install mlx-cpu==0.32.2`"
    ):
        forge.sft(**given(model_dir, tmp_path), backend="mlx", ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
