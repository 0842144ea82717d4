"""Options of GRPO's and KTO's losses: a resume is invisible, and two ranks with small micro-batches train the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import forge

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics, untimed, weights
from .verbs import assert_two_ranks_as_one, run_verb, run_verb_killed, settings_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CASES: list[tuple[str, dict[str, Any]]] = [
    ("kto", {"loss_type": "apo_zero_unpaired", "reference": "stored", "reference_path": None}),
    ("grpo", {"multi_objective_aggregation": "normalize_then_sum", "missing_eos_penalty": 1.0, "entropy_coef": 0.5}),
    ("grpo", {"loss_type": "luspo", "off_policy_mask_threshold": 1e-3}),
    ("grpo", {"top_entropy_quantile": 0.3, "entropy_coef": 0.5}),
    ("grpo", {"loss_type": "vespo"}),
    ("grpo", {"loss_type": "gmpo"}),
    ("grpo", {"loss_type": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -1.0, "learning_rate": 1e-2}),
    ("grpo", {"loss_type": "kl_cov", "kl_cov_ratio": 0.3, "learning_rate": 1e-2}),
    ("grpo", {"kl_weight": 0.5, "kl_in_reward": True, "kl_target": 1e-3, "kl_horizon": 40}),
    ("grpo", {"baseline": "optimal_token", "mask_truncated": True}),
    ("grpo", {"baseline": "greedy", "num_generations": 1, "kl_in_reward": True}),
    ("grpo", {"baseline": "none", "whiten": True, "kl_in_reward": True}),
    ("grpo", {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.3, "top_entropy_quantile": 0.5}),
]


def figures(run: Path) -> list[float]:
    """Loss and gradient norm of each step."""
    return [line[name] for line in metrics(run) for name in ("loss", "grad_norm") if name in line]


@pytest.mark.parametrize(("verb", "more"), ci_keeps(CASES[:1], CASES))
def test_a_resume_and_another_cut_are_invisible(verb: str, more: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """Killed after step 3 and started again: the same bits. Two ranks, and half the tokens at a time: the same losses."""
    given = settings_of(verb, model_dir, tmp_path) | {"max_steps": 4, "learning_rate": 2e-2, "lr_scheduler": "constant"}
    given |= more | ({"num_iterations": 2, "updates_per_pass": 1} if verb == "grpo" else {})

    def run(name: str, ranks: int = 1, function: Any = run_verb, *further: Any, **changed: Any) -> Path:
        into = {**given, **changed, "ckpt_output_dir": str(tmp_path / name)}
        run_on_ranks(function, ranks, verb, into, str(tmp_path), *further, joined=False)
        return tmp_path / name

    alone = run("alone")
    with pytest.raises(RuntimeError, match="status -9"):
        run("killed", 1, run_verb_killed, 3, full_state_every_steps=3)
    killed = run("killed", full_state_every_steps=3)
    assert "resuming after step 3" in (killed / "log.txt").read_text()
    assert untimed(killed) == untimed(alone)
    assert weights(killed) == weights(alone)
    other = run("other", 2, max_tokens_per_gpu=100)
    figures = [
        [line[name] for line in metrics(each) for name in ("loss", "grad_norm") if name in line] for each in (alone, other)
    ]
    np.testing.assert_allclose(figures[1], figures[0], rtol=1e-3, atol=1e-5)


def test_one_step_on_each_rollout_warns_of_what_it_leaves_without_effect(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kl_cov trains as dapo, to the bit, and says so."""
    monkeypatch.syspath_prepend(tmp_path)
    given = settings_of("grpo", model_dir, tmp_path) | {"max_steps": 2, "learning_rate": 1e-2, "validation_split": 0.0}

    def run(kind: str, **more: Any) -> tuple[dict[str, bytes], str]:
        into = tmp_path / kind
        forge.grpo(**{**given, "num_iterations": 1, "loss_type": kind, **more}, ckpt_output_dir=into)
        return weights(into), (into / "log.txt").read_text()

    (plain, quiet), (alike, said) = run("dapo"), run("kl_cov", kl_cov_ratio=0.3)
    assert alike == plain
    warning = "WARNING: loss_type=kl_cov (the gradients are those of dapo), kl_cov_ratio=0.3 have no effect: each rollout is"
    assert warning in said
    assert "have no effect" not in quiet


@pytest.mark.lane
@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_alike_where_the_weights_are_divided(
    kind: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under fsdp2 on two ranks, with gathered weights in the forward that chooses."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    own = {"loss_type": kind, f"{kind}_ratio": 0.3, "num_iterations": 2, "learning_rate": 1e-2, "lr_scheduler": "constant"}
    own |= {"clip_cov_lb": -1.0} if kind == "clip_cov" else {}
    given = settings_of("grpo", model_dir, tmp_path) | own | {"strategy": "fsdp2", "validation_split": 0.0}
    # Losses near 0: advantages add up to nothing in a first update.
    assert_two_ranks_as_one("grpo", given, tmp_path, ("loss", "grad_norm", "reward"), absolute=1e-6)


def test_answers_without_a_kl_are_scored_alone(model_dir: Path, tmp_path: Path) -> None:
    """loss_type=apo_zero_unpaired reads no mismatched answers: the reference scores none."""
    verb, more = CASES[0]
    given = settings_of(verb, model_dir, tmp_path) | more | {"max_steps": 1, "ckpt_output_dir": str(tmp_path / "run")}
    run_verb(verb, given, str(tmp_path))
    assert load_file(tmp_path / "run" / "data" / "train.reference.safetensors")["logps"].shape[1] == 1
