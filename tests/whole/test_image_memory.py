"""Rows with images in padded lines (Gemma 3): what the memory plan says of a step beside what the steps of a run take."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import forge
from forge.run import _memory

from ..lanes import ci_keeps
from . import pictures

if TYPE_CHECKING:
    from pathlib import Path

ROWS = {"sft": pictures.rows, "dpo": pictures.pairs, "kto": pictures.rated, "grpo": pictures.prompts}
GRPO: dict[str, Any] = {"reward": "lengths:lengths", "num_generations": 4, "max_new_tokens": 12, "kl_weight": 0.05}
GRPO |= {"effective_batch_size": 4, "validation_split": 0.25}
TOKENS = [("sft", 1024), ("sft", 256), ("dpo", 1024), ("dpo", 256), ("kto", 1024), ("kto", 256), ("grpo", 256)]


@pytest.mark.parametrize(("verb", "tokens"), ci_keeps([("dpo", 1024), ("grpo", 256)], TOKENS))
def test_the_plan_counts_padding_and_masks(verb: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fullest step of the run takes no more than was planned, and nearly that."""

    def all_steps(planned: Any, folder: Any, report: Any, **more: Any) -> Any:
        return _memory.FirstSteps(planned, folder, report, measured=range(planned.num_steps), **more)

    monkeypatch.setattr(_memory, "_SMALL", 0)
    monkeypatch.setattr(_memory.FirstSteps, "of", all_steps)
    monkeypatch.setattr("forge.tasks._rollouts.end_ids", lambda _: [10**6])
    (tmp_path / "lengths.py").write_text("def lengths(completions, **_): return [len(str(each)) % 3 for each in completions]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lengths", raising=False)
    model, data = pictures.save("gemma3", tmp_path / "model"), ROWS[verb](tmp_path)
    settings: dict[str, Any] = {"effective_batch_size": 24, **(GRPO if verb == "grpo" else {})}
    run = getattr(forge, verb)(
        model_path=str(model),
        data_path=str(data),
        ckpt_output_dir=tmp_path / "run",
        dtype="float32",
        num_epochs=1,
        max_tokens_per_gpu=tokens,
        **settings,
    )
    about = json.loads((run.output_dir / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    print(verb, tokens, phases["step"]["planned"] / measured, phases["first steps"]["planned"] / measured)
    assert 0.998 * measured <= phases["step"]["planned"] <= 1.1 * measured
    assert any("images are counted in padded lines" in note for note in about["notes"])


def test_a_model_that_packs_images_is_planned_so(tmp_path: Path) -> None:
    """Its masks keep documents with images apart."""
    model, data = pictures.save("llava", tmp_path / "model"), pictures.rows(tmp_path)
    settings = {"model_path": str(model), "data_path": str(data), "ckpt_output_dir": str(tmp_path / "run")}
    found = forge.dry_run(forge.sft, **settings, dtype="float32")
    assert found.memory is not None
    assert "samples with images are counted as packed, which not every model can be" in found.memory["notes"]
