"""The backend `trl`: forge's rows and settings, TRL's trainers, forge's run directory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli._app import main

from ..lanes import ci_keeps
from .starts import metrics
from .verbs import settings_of

pytest.importorskip("trl", reason="TRL is not installed here: forge-llm[trl]")
# What TRL, accelerate and their dependencies warn about; none of it is about the rows.
pytestmark = pytest.mark.filterwarnings("ignore")


def settings(verb: str, model_dir: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Settings of four short steps."""
    given = settings_of(verb, model_dir, folder)
    del given["validation_split"]
    return {**given, **more}


def losses(run: Path) -> list[float]:
    """Loss of each step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["sft"], ["sft", "dpo", "kto", "reward"]))
def test_both_backends_make_the_same_steps(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """Same rows, same settings: losses, gradient norms and rates of every step agree; so do the exports' losses."""
    given = settings(verb, model_dir, tmp_path)
    found = {}
    for backend in ("forge", "trl"):
        found[backend] = getattr(forge, verb)(**given, backend=backend, ckpt_output_dir=tmp_path / backend)
    ours, theirs = (metrics(tmp_path / backend) for backend in ("forge", "trl"))
    assert [line["step"] for line in theirs] == [1, 2, 3, 4]
    assert theirs[0]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-5)
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("lr", 1e-9), ("samples", 0), ("epoch", 0)):
        assert [line[name] for line in theirs] == pytest.approx([line[name] for line in ours], rel=tolerance), name
    assert (found["trl"].steps, found["trl"].samples) == (found["forge"].steps, found["forge"].samples)
    assert (tmp_path / "trl" / "hf_format" / "samples_16" / "config.json").is_file()
    log = (tmp_path / "trl" / "log.txt").read_text()
    assert "backend: TRL makes the steps. Not promised with it" in log
    assert "loaded back" in log


@pytest.mark.slow
def test_the_export_stops_where_a_named_template_ends_a_turn(model_dir: Path, tmp_path: Path) -> None:
    """As with forge's own loop: generation_config.json names the template's token, and the log says so."""
    from transformers import GenerationConfig

    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    GenerationConfig(eos_token_id=0).save_pretrained(base)
    result = forge.sft(
        **settings("sft", base, tmp_path, backend="trl", max_steps=1, chat_template="chatml", ckpt_output_dir=tmp_path / "run")
    )
    assert GenerationConfig.from_pretrained(result.model_dir).eos_token_id == [0, 2]
    assert "chat_template: <|im_end|> ends a turn and was no EOS" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.lane
def test_what_accelerate_left_in_the_environment_changes_nothing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of another shell neither wrap the model nor choose its dtype."""
    given = settings("sft", model_dir, tmp_path, max_steps=2)
    plain = forge.sft(**given, backend="trl", ckpt_output_dir=tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    odd = forge.sft(**given, backend="trl", ckpt_output_dir=tmp_path / "odd")
    assert losses(odd.output_dir) == losses(plain.output_dir)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    forge.sft(**given, backend="trl", ckpt_output_dir=tmp_path / "fsdp")
    assert losses(tmp_path / "fsdp") == losses(plain.output_dir)


@pytest.mark.slow
def test_grpo_learns_from_the_same_reward_functions(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward functions get prompts, completions and the rows' fields; every optimizer step on a rollout is a line."""
    monkeypatch.syspath_prepend(tmp_path)
    # Another test's module of this name may be loaded.
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    forge.grpo(**settings("grpo", model_dir, tmp_path, backend="trl", ckpt_output_dir=tmp_path / "run"))
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert [line["samples"] for line in found] == [2, 2, 4, 4]
    # TRL tells a rollout's rewards with the first of its steps.
    assert [line["step"] for line in found if line.get("reward", 0.0) < 0] == [1, 3]
    assert (tmp_path / "run" / "hf_format" / "samples_4" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["dpo"])
def test_an_adapter_is_exported_alone(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """LoRA trains with the same losses, and TRL's copy of the adapter is not part of the export."""
    given = settings(verb, model_dir, tmp_path, adapter="lora")
    for backend in ("forge", "trl"):
        result = getattr(forge, verb)(**given, backend=backend, ckpt_output_dir=tmp_path / backend)
    assert losses(tmp_path / "trl") == pytest.approx(losses(tmp_path / "forge"), rel=1e-4)
    assert sorted(each.name for each in result.model_dir.iterdir()) == sorted(
        each.name for each in (tmp_path / "forge" / "hf_format" / "samples_16").iterdir()
    )


@pytest.mark.lane
@pytest.mark.slow
def test_two_ranks_train_as_one(model_dir: Path, tmp_path: Path) -> None:
    """Under forge's own launcher each rank has its share of a step; the token means are those of the whole step."""
    given = settings("sft", model_dir, tmp_path, backend="trl")
    for ranks in (1, 2):
        forge.sft(**given, nproc_per_node=ranks, ckpt_output_dir=tmp_path / str(ranks))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-4)
    assert (tmp_path / "2" / "result.json").is_file()


@pytest.mark.lane
def test_the_own_settings_take_effect(model_dir: Path, tmp_path: Path) -> None:
    """How a step is cut and DPO's length weight change the run; padding changes no figure."""
    given = settings("dpo", model_dir, tmp_path, backend="trl", max_steps=2)
    runs = {
        "plain": {},
        "cut": {"gradient_accumulation_steps": 4},
        "padded": {"pad_to_multiple_of": 64},
        "lengths": {"ld_alpha": 0.0, "learning_rate": 1e-2},
    }
    for name, more in runs.items():
        forge.dpo(**{**given, **more}, ckpt_output_dir=tmp_path / name)
    logs = {name: (tmp_path / name / "log.txt").read_text() for name in runs}
    assert "into 1 micro-batch " in logs["plain"]
    assert "into 4 micro-batches" in logs["cut"]
    assert losses(tmp_path / "padded") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    assert metrics(tmp_path / "lengths")[0]["rejected_logp"] > metrics(tmp_path / "plain")[0]["rejected_logp"]


@pytest.mark.slow
def test_a_stopped_run_begins_anew_and_a_finished_one_is_not_repeated(model_dir: Path, tmp_path: Path) -> None:
    """There are no full states: without a result the same call makes all steps again; another backend is refused."""
    given = settings("sft", model_dir, tmp_path, backend="trl", ckpt_output_dir=tmp_path / "run")
    first = forge.sft(**given)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert forge.sft(**given) == first
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    with pytest.raises(forge.SettingsError, match="holds a run with backend=trl, and now `backend` is forge"):
        forge.sft(**{**given, "backend": "forge"})
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "hf_format")
    forge.sft(**given)
    assert losses(tmp_path / "run") == [json.loads(line)["loss"] for line in before.splitlines()]


def test_a_dry_run_lists_what_trl_would_be_given(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows, steps and arguments, and nothing left behind."""
    given = settings("kto", model_dir, tmp_path, backend="trl", ckpt_output_dir=tmp_path / "run")
    text = forge.dry_run(forge.kto, **given)
    assert "by KTOTrainer of TRL" in text
    assert "  desirable_weight=1.0" in text
    assert "  per_device_train_batch_size=4" in text
    assert "  steps: 4, each in 1 micro-batch a rank, of at most 4 rows" in text
    assert "fill  " not in capsys.readouterr().err, "forge's own micro-batches are not TRL's"
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["kto", *words, "--dry-run", "--for", "24GB"]) == 2
    assert "--for is not available with --backend trl" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rows_in_memory_and_callbacks(model_dir: Path, tmp_path: Path) -> None:
    """Rows may be objects, and callbacks get every step and the result."""
    seen: list[Any] = []

    class Watch:
        def on_step(self, record: Any) -> None:
            """Note the step."""
            seen.append(record["step"])

        def on_end(self, result: Any) -> None:
            """Note the result."""
            seen.append(result.steps)

    rows = [{"prompt": "ab", "completion": f"c {n}"} for n in range(4)]
    given = settings("sft", model_dir, tmp_path, backend="trl", max_steps=2, effective_batch_size=2, lint="off")
    forge.sft(**{**given, "data_path": rows}, ckpt_output_dir=tmp_path / "run", callbacks=[Watch()])
    assert seen == [1, 2, 2]


@pytest.mark.parametrize("verb", ci_keeps(["grpo"], ["sft", "grpo"]))
def test_nothing_is_sent_to_anybody(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL tells its makers what is trained, whenever a trainer is made: here it is told not to."""
    import trl.trainer.base_trainer as base
    from huggingface_hub import constants

    allowed: list[bool] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(base, "send_telemetry", lambda **_: allowed.append(not constants.HF_HUB_DISABLE_TELEMETRY))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forge_test_rewards", raising=False)
    getattr(forge, verb)(**settings(verb, model_dir, tmp_path, backend="trl", max_steps=1), ckpt_output_dir=tmp_path / "run")
    assert allowed == [False]
    assert constants.HF_HUB_DISABLE_TELEMETRY is False


@pytest.mark.slow
def test_compare_shows_the_backends_side_by_side(model_dir: Path, tmp_path: Path) -> None:
    """`forge compare` names the backend of each run, and lays their losses over each other."""
    from forge.reports._compare import compare

    given = settings("sft", model_dir, tmp_path, max_steps=2)
    for backend in ("forge", "trl"):
        forge.sft(**given, backend=backend, ckpt_output_dir=tmp_path / f"run-{backend}")
    text = compare([tmp_path / "run-forge", tmp_path / "run-trl"], output=tmp_path / "page.html")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["backend"] == ["forge", "trl"]
    assert rows["loss"][0] == rows["loss"][1]
