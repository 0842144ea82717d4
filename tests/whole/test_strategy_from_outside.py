"""A strategy of another package, in whole runs: its ranks are pairs, and the two of a pair share a data shard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics
from .verbs import run_verb, settings_of

pytestmark = pytest.mark.slow


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as pip leaves it: the other package's module, and the metadata with its entry point."""
    shutil.copy(Path(__file__).parents[1] / "forge-dist" / "outside_strategy.py", tmp_path)
    metadata = tmp_path / "outside_strategy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-strategy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[forge.strategies]\npairs = outside_strategy:SPEC\n")
    return tmp_path


def steps(run: Path, name: str) -> list[float]:
    """A figure of every step."""
    return [line[name] for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize("verb", ci_keeps(["sft"], ["sft", "dpo", "grpo"]))
def test_four_ranks_on_two_data_shards_train_as_one_process(verb: str, model_dir: Path, installed: Path) -> None:
    """Rows, reference log-probabilities and rollouts are divided over data shards: each is there once, and counts once."""
    settings: dict[str, Any] = settings_of(verb, model_dir, installed) | {"logging_steps": 1}
    one, four = (str(installed / name) for name in ("one", "four"))
    expected = run_verb(verb, settings | {"ckpt_output_dir": one}, str(installed))
    divided = settings | {"ckpt_output_dir": four, "strategy": "pairs"}
    found = run_on_ranks(run_verb, 4, verb, divided, str(installed), joined=False)
    assert expected["steps"] == len(steps(Path(one), "loss")) == 4
    # The loss of a rollout's first step is zero but for rounding, and the gradient is not.
    for name, least in (("loss", 1e-6), ("grad_norm", 0.0)):
        assert steps(Path(four), name) == pytest.approx(steps(Path(one), name), rel=1e-3, abs=least), name
    for rank in found:
        assert rank["eval_after"] == pytest.approx(expected["eval_after"], rel=1e-4)
