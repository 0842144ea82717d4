"""save_dtype: exports of a run in another dtype than the model in model_path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import forge

from .starts import metrics


@pytest.fixture
def given(model_dir: Path, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of two steps with an export after each, of a model in float32."""
    return {
        "model_path": str(model_dir),
        "data_path": str(chats),
        "ckpt_output_dir": str(tmp_path / "run"),
        "effective_batch_size": 4,
        "max_tokens_per_gpu": 256,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "save_samples": 4,
        "keep_full_state": True,
    }


def dtypes(run: Path) -> dict[str, set[torch.dtype]]:
    """The dtypes of each export's tensors."""
    found = {}
    for file in sorted(run.glob("hf_format/*/model.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found[file.parent.name] = {opened.get_tensor(name).dtype for name in opened.keys()}  # noqa: SIM118 - no mapping
    return found


@pytest.mark.slow
def test_exports_are_rounded_and_training_is_not(given: dict[str, Any], tmp_path: Path) -> None:
    """Every export has the dtype and is compared with its tolerance; the losses are those of a run without it."""
    half = forge.sft(**given, save_dtype="bfloat16", validation_split=0.2)
    whole = forge.sft(**given | {"ckpt_output_dir": str(tmp_path / "whole")}, validation_split=0.2)
    assert dtypes(half.output_dir) == {"samples_4": {torch.bfloat16}, "samples_8": {torch.bfloat16}}
    assert dtypes(whole.output_dir) == {"samples_4": {torch.float32}, "samples_8": {torch.float32}}
    losses = [[line["loss"] for line in metrics(run.output_dir) if "loss" in line] for run in (half, whole)]
    assert losses[0] == losses[1]
    # The figures of the result are those of what was exported.
    exported = [line["exported_eval_loss"] for line in metrics(half.output_dir) if "exported_eval_loss" in line]
    assert exported == [half.eval_after["eval_loss"]] != [whole.eval_after["eval_loss"]]
    config = (half.model_dir / "config.json").read_text()
    assert '"bfloat16"' in config


@pytest.mark.slow
def test_another_dtype_for_a_finished_run_is_exported_anew(given: dict[str, Any]) -> None:
    """No export of the former dtype passes for one of the new; nothing is trained again."""
    forge.sft(**given)
    again = forge.sft(**given, save_dtype="float16")
    assert dtypes(again.output_dir) == {"samples_4": {torch.float32}, "samples_8": {torch.float16}}
    assert len(metrics(again.output_dir)) == 2
    assert "save_dtype: null → float16" in (again.output_dir / "log.txt").read_text()


@pytest.mark.parametrize("adapter", ["lora", "prompt"])
def test_adapters_are_refused(given: dict[str, Any], adapter: str, tmp_path: Path) -> None:
    """They stay in float32, so the setting would have no effect."""
    with pytest.raises(forge.SettingsError, match=f"save_dtype=bfloat16 has no effect with adapter={adapter}"):
        forge.sft(**given, adapter=adapter, save_dtype="bfloat16")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("bad", ["int8", "bf16", "", 16])
def test_other_dtypes_are_refused(given: dict[str, Any], bad: Any) -> None:
    """By name, with those that there are."""
    with pytest.raises(forge.SettingsError, match="save_dtype must be one of 'float32', 'bfloat16', 'float16'"):
        forge.sft(**given, save_dtype=bad)
