"""`forge grpo` with loss_type=online_dpo: pairs of the model's own completions, on any division, resumed to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import forge

from .starts import metrics
from .verbs import assert_two_ranks_as_one, settings_of


@pytest.fixture
def given(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(tmp_path)
    own = {"loss_type": "online_dpo", "kl_weight": 0.1, "num_generations": 3, "num_iterations": 1, "effective_batch_size": 6}
    return (
        settings_of("grpo", model_dir, tmp_path)
        | own
        | {"validation_split": 0.0, "learning_rate": 1e-2, "lr_scheduler": "constant"}
    )


def test_learns_from_pairs_and_is_resumed_to_the_bit(given: dict[str, Any], tmp_path: Path) -> None:
    """The loss begins at ln 2 for each pair that prefers one, and falls; rollouts name both; a cut run is the whole one."""
    states = given | {"full_state_every_steps": 1, "keep_full_state": True}
    whole = forge.grpo(**states, ckpt_output_dir=tmp_path / "whole").output_dir
    lines = [line for line in metrics(whole) if "loss" in line]
    rollout = forge.algos.online.Rollout.read(whole / "rollouts" / "step_1.jsonl")
    pairs = [rollout.rewards[(rollout.groups == at) & rollout.trained] for at in range(6)]
    assert all(len(each) == 2 for each in pairs)
    preferring = sum(len(set(each.tolist())) == 2 for each in pairs)
    assert preferring
    assert lines[0]["loss"] == pytest.approx(math.log(2) * preferring / 6, rel=1e-4)
    assert lines[0]["loss_completions"] == 12
    assert lines[0]["grad_norm"] > 0
    forge.grpo(**states | {"max_steps": 2}, ckpt_output_dir=tmp_path / "cut")
    cut = forge.grpo(**states, ckpt_output_dir=tmp_path / "cut").output_dir
    assert [line["loss"] for line in metrics(cut) if "loss" in line] == [line["loss"] for line in lines]


def test_what_pairs_cannot_have_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    """On the command line as in Python: no β, two steps on a rollout, TRL's trainer; nothing is written."""
    for changes, said in (
        ({"kl_weight": 0.0}, "kl_weight=0 with loss_type='online_dpo'"),
        ({"num_iterations": 2}, "num_iterations=2 with loss_type='online_dpo'"),
        ({"backend": "trl"}, "loss_type=online_dpo is not available with backend=trl"),
    ):
        with pytest.raises(forge.SettingsError, match=said):
            forge.grpo(**given | changes, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided over two ranks the pairs and their steps are those of one."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert_two_ranks_as_one("grpo", given | {"strategy": strategy}, tmp_path, ("loss", "grad_norm", "reward"))
