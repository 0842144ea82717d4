"""`--kl-target`: the weight of the KL follows what each rollout measured, and a cut run goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import forge

from .starts import metrics
from .verbs import settings_of


def test_the_weight_follows_the_rollouts_and_is_resumed(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rollout has the weight that the ones before it lead to, by their files; stopped within one, the same lines."""
    monkeypatch.syspath_prepend(tmp_path)
    given = settings_of("rloo", model_dir, tmp_path) | {
        "kl_weight": 0.5, "kl_target": 1e-3, "kl_horizon": 20, "num_iterations": 1, "updates_per_pass": 2, "max_steps": 6,
        "learning_rate": 2e-2, "lr_scheduler": "constant", "validation_split": 0.0, "full_state_every_steps": 1,
        "keep_full_state": True,
    }  # fmt: skip
    whole = forge.rloo(**given, ckpt_output_dir=tmp_path / "whole").output_dir
    rollouts = [line for line in metrics(whole) if "rollout_kl_weight" in line]
    assert len(rollouts) == 3
    weight = 0.5
    for line in rollouts:
        assert line["rollout_kl_weight"] == pytest.approx(weight, rel=1e-6)
        made = forge.algos.online.Rollout.read(whole / "rollouts" / f"step_{line['step'] + 1}.jsonl")
        kl = made.completion_kl
        weight *= 1 + min(max(kl.mean() / 1e-3 - 1, -0.2), 0.2) * len(kl) / 20
    steps = [line for line in metrics(whole) if "loss" in line]
    assert steps[-1]["kl_weight"] == pytest.approx(weight, rel=1e-6)
    assert len({line["kl_weight"] for line in steps}) == 3
    forge.rloo(**given | {"max_steps": 3}, ckpt_output_dir=tmp_path / "cut")
    other = forge.rloo(**given, ckpt_output_dir=tmp_path / "cut").output_dir
    again = [(line["loss"], line["kl_weight"]) for line in metrics(other) if "loss" in line]
    assert again == [(line["loss"], line["kl_weight"]) for line in steps]
