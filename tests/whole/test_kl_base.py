"""`kl_base`: the divergence from the base at each measurement, under any adapter and ranks; `stop_at_kl` ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge
import forge_data
from forge._errors import SettingsError
from forge._result import read_result

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .starts import metrics, sft
from .verbs import run_verb, settings_of

pytestmark = pytest.mark.slow

SEED = 5
ASKED: dict[str, Any] = {"seed": SEED, "kl_base": True, "eval_every_steps": 2, "learning_rate": 1e-2}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": "lora", "lora_r": 4},
    "osft": {"adapter": "osft", "unfreeze_rank_ratio": 0.5},
    "paper": {"adapter": "osft", "osft_rule": "paper"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows."""
    return tmp_path_factory.mktemp("kl")


def curve(run: Path) -> list[float]:
    """The figure of each measurement."""
    return [line["eval_kl_base"] for line in metrics(run) if "eval_kl_base" in line]


def naive(run: Path, base: str, export: Path) -> float:
    """KL(base ‖ exported model), one sample and one token at a time, over the whole vocabulary in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (export, base))
    found = []
    store = forge_data.TokenStore.open(run / "data" / "train")
    for example in store.split(0.25, seed=SEED)[1]:
        ids = torch.tensor(example.input_ids, dtype=torch.int64)[None]
        with torch.no_grad():
            p, q = (model(input_ids=ids).logits[0].double().log_softmax(-1) for model in (theirs, ours))
        for at, label in enumerate(example.labels[1:]):
            if label != -100:
                found.append(float((p[at].exp() * (p[at] - q[at])).sum()))
    return sum(found) / len(found)


@pytest.mark.parametrize("adapter", ci_keeps(["full", "paper"], list(ADAPTERS)))
def test_every_measurement_has_it(adapter: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """It is 0 before training, grows with it, and at the end is that of the exported model, computed naively."""
    given = settings_of("sft", model_dir, folder) | ASKED | ADAPTERS[adapter]
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    found = curve(tmp_path / "run")
    assert len(found) == 3
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[0] < found[1] < found[2]
    assert result.eval_after is not None
    assert result.eval_after["eval_kl_base"] == found[2]
    if adapter != "lora":
        assert found[2] == pytest.approx(naive(tmp_path / "run", str(model_dir), result.model_dir), rel=1e-4)


@pytest.mark.parametrize("verb", ci_keeps(["dpo", "grpo"], ["pretrain", "dpo", "kto", "grpo"]))
def test_every_kind_of_rows_has_it(verb: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Documents, pairs, single answers and completions of prompts are measured alike; one run for each kind."""
    given = settings_of(verb, model_dir, folder) | ASKED | {"adapter": "lora", "lora_r": 4, "max_steps": 2}
    run_verb(verb, given | {"ckpt_output_dir": str(tmp_path / "run")}, str(folder))
    found = curve(tmp_path / "run")
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[-1] > 1e-6


@pytest.mark.parametrize("adapter", ci_keeps(["full"], ["full", "lora"]))
def test_ranks_do_not_change_it(adapter: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Two ranks under fsdp2 find the same figures as one process."""
    given = settings_of("sft", model_dir, folder) | ASKED | ADAPTERS[adapter]
    forge.sft(**given, ckpt_output_dir=tmp_path / "one")
    two = {**given, "strategy": "fsdp2", "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(sft, 2, two, joined=False)
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-4, abs=1e-6)


def test_stop_at_kl_ends_a_run(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A run ends at the first measurement at the limit, its export whole; the result says so, and a restart changes nothing."""
    given = settings_of("sft", model_dir, folder) | ASKED | {"max_steps": 8, "eval_every_steps": 1, "lr_scheduler": "constant"}
    forge.sft(**given, ckpt_output_dir=tmp_path / "whole")
    whole = curve(tmp_path / "whole")
    limit = (whole[2] + whole[3]) / 2
    stopped = given | {"stop_at_kl": limit, "keep_full_state": True, "ckpt_output_dir": tmp_path / "run"}
    result = forge.sft(**stopped)
    assert (result.steps, result.stopped_by) == (3, "stop_at_kl")
    assert curve(tmp_path / "run") == whole[:4]
    assert (result.model_dir / "model.safetensors").exists()
    assert f"stop_at_kl={limit:g}" in (tmp_path / "run" / "log.txt").read_text()
    assert read_result(tmp_path / "run") == result
    # Killed between the state of its last step and its result, it ends there too.
    (tmp_path / "run" / "result.json").unlink()
    again = forge.sft(**stopped)
    assert (again.steps, again.stopped_by) == (3, "stop_at_kl")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"validation_split": None, "kl_base": True}, "kl_base has no effect without held-out data"),
        ({"stop_at_kl": 0.1}, "stop_at_kl has no effect without kl_base"),
        ({"stop_at_kl": 0.1, "kl_base": True}, "stop_at_kl has no effect without eval_every_steps or eval_at_epoch"),
        ({"stop_at_kl": -1.0, "kl_base": True}, "above 0"),
    ],
)
def test_what_has_no_effect_is_refused(more: dict[str, Any], message: str, model_dir: Path, folder: Path) -> None:
    """Nothing to measure on, no measurement, or a limit that is none are refused by name."""
    given = {name: value for name, value in (settings_of("sft", model_dir, folder) | more).items() if value is not None}
    with pytest.raises(SettingsError, match=message):
        forge.sft(**given, ckpt_output_dir=folder / "never")
    assert not (folder / "never").exists()


def test_a_reward_model_has_none(model_dir: Path, folder: Path) -> None:
    """A reward model predicts no tokens, so that nothing of it can diverge."""
    with pytest.raises(SettingsError, match="a reward model makes none"):
        forge.reward(**settings_of("reward", model_dir, folder), kl_base=True, ckpt_output_dir=folder / "never")
