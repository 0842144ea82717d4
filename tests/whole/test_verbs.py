"""Every verb end to end: rows, run directory, figures, and a model that plain transformers loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import forge
import forge_algos
from forge import _progress
from forge.verbs._registry import VERBS as TABLE

from ..lanes import ci_keeps
from .starts import metrics
from .verbs import KINDS, VERBS, settings_of

PREFERENCES = ("dpo", "orpo", "simpo", "reward")
ONLINE = ("ppo", "grpo", "rloo")

QUICK = ["sft", "dpo", "grpo"]
"""Verbs of which a quick run tries a run."""
TWINS = ["orpo", "simpo", "rloo"]
"""Verbs that have everything but an objective from another: dpo without a reference, grpo."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows and reward functions."""
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def _importable(folder: Path) -> Any:
    """The reward functions can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def test_every_verb_is_tried() -> None:
    """A verb that is added to forge must be added here."""
    assert set(VERBS) == set(KINDS) == set(TABLE)


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize(
    "verb",
    ci_keeps(
        [verb for verb in VERBS if verb not in TWINS],
        QUICK + [pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS if verb not in QUICK],
    ),
)
def test_a_run(verb: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """It ends with a model that loads, a line of finite figures for each step, and a config.yaml that repeats it to the bit."""
    given = settings_of(verb, model_dir, folder)
    result = getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(isinstance(value, int | float | bool) for line in lines for name, value in line.items() if name != "time")
    assert all(line["grad_norm"] > 0 for line in lines)
    if getattr(forge, verb).task.samples_are is None:
        # Pairs, blocks, texts: those of the steps, which exports and save_samples count too.
        assert [line["samples"] for line in lines] == [given["effective_batch_size"] * line["step"] for line in lines]
    assert result.eval_before is not None
    assert result.eval_after is not None
    assert result.eval_before != result.eval_after
    _loads(verb, result.model_dir)

    recipe = tmp_path / "again.yaml"
    values = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    recipe.write_text(yaml.safe_dump({**values, "ckpt_output_dir": str(tmp_path / "again")}))
    getattr(forge, verb)(recipe)
    assert _untimed(tmp_path / "again") == _untimed(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("verb", ci_keeps(["dpo", "kto"], ["dpo", "orpo", "simpo", "kto", "reward"]))
def test_preferences_are_learned(verb: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Where one rule decides which answer is better, held-out pairs are distinguished and the loss falls."""
    given = settings_of(verb, model_dir, folder)
    given |= {"max_steps": 20, "learning_rate": 1e-2, "effective_batch_size": 8}
    result = getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    assert result.eval_before is not None
    assert result.eval_after is not None
    assert result.eval_after["eval_loss"] < result.eval_before["eval_loss"]
    if verb == "kto":
        assert result.eval_after["eval_margin"] > 0.1
    else:
        assert result.eval_after["eval_accuracy"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("verb", ci_keeps(["dpo", "grpo"], ["dpo", "kto", "reward", "grpo"]))
def test_with_lora(verb: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The base is frozen, an adapter is exported, and a reference by switching it off gives the losses of a stored one."""
    given = settings_of(verb, model_dir, folder) | {"adapter": "lora", "lora_r": 4}
    first = getattr(forge, verb)(**given, ckpt_output_dir=tmp_path / "run")
    assert (first.model_dir / "adapter_model.safetensors").exists()
    _loads(verb, first.model_dir)
    if verb in ("dpo", "kto"):
        getattr(forge, verb)(**given, reference="adapter_off", ckpt_output_dir=tmp_path / "off")
        stored, off = ([line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "off"))
        assert stored == pytest.approx(off, rel=1e-5)


@pytest.mark.slow
def test_rewards_that_teach_nothing(
    model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rewards that are no numbers end a run at its first rollout; those that are all alike are said, once."""
    functions = {"mute": "None", "lost": "float('nan')", "same": "1.0", "tiny": "1e-7 * i", "rounded": "1.0 + 1e-6 * i"}
    functions["tied"] = "float(i % 4 < 2)"
    body = "".join(
        f"def {name}(completions, **_):\n    return [{value} for i, _ in enumerate(completions)]\n\n\n"
        for name, value in functions.items()
    )
    (tmp_path / "forge_test_mute.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    given = settings_of("grpo", model_dir, folder)
    for name in ("mute", "lost"):
        given["reward"] = (f"forge_test_mute:{name}",)
        with pytest.raises(
            forge_algos.RewardError, match=rf"forge_test_mute:{name} gave no number .* completions of .*:\d"
        ) as got:
            forge.grpo(**given, ckpt_output_dir=tmp_path / name)
        assert got.value.exit_status == 2
        assert not (tmp_path / name / "hf_format").exists()
    capfd.readouterr()
    forge.grpo(**given | {"reward": ("forge_test_mute:same",)}, ckpt_output_dir=tmp_path / "same")
    assert capfd.readouterr().err.count("same reward, for every prompt; nothing but the KL is learned") == 1
    forge.grpo(
        **given | {"reward": ("forge_test_mute:tied",), "max_steps": 1, "baseline": "second_best", "num_generations": 4},
        ckpt_output_dir=tmp_path / "tied",
    )
    said = capfd.readouterr().err
    assert said.count("several completions share the best reward of forge_test_mute:tied") == 1
    assert "same reward" not in said
    for name, why in (("tiny", "less than the 0.0001 that is added"), ("rounded", "float32 has seven digits")):
        forge.grpo(**given | {"reward": (f"forge_test_mute:{name}",), "max_steps": 1}, ckpt_output_dir=tmp_path / name)
        assert len(re.findall(f"rewards of a prompt's completions differ by .*{why}", capfd.readouterr().err)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_importable")
def test_cut_off_completions_are_said(model_dir: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The step line has length and spread of the rollout and the share without an end; a warning, once, what to set."""
    given = settings_of("grpo", model_dir, folder) | {"logging_steps": 1, "max_new_tokens": 2, "validation_split": 0}
    forge.grpo(**given, ckpt_output_dir=tmp_path / "run")
    shown = capfd.readouterr().err
    rollout = next(line for line in metrics(tmp_path / "run") if "rollout_cut_off" in line)
    share = rollout["rollout_cut_off"] / rollout["rollout_completions"]
    assert share > 0.5
    figures = f"reward_std {rollout['rollout_reward_std']:.3g}  length {rollout['rollout_length']:,.1f}  cut_off {share:.0%}"
    assert re.search(rf"step 1/4  loss .*  {figures}  lr ", shown)
    assert len(re.findall(r"completions were cut off at max_new_tokens=2, .* Raise max_new_tokens, ask", shown)) == 1
    # PPO's too: what is left out teaches nothing, and that is the reason given.
    masked = settings_of("ppo", model_dir, folder) | {"max_new_tokens": 2, "validation_split": 0, "mask_truncated": True}
    forge.ppo(**masked | {"max_steps": 2}, ckpt_output_dir=tmp_path / "masked")
    shown = capfd.readouterr().err
    assert shown.count("mask_truncated leaves those out; nothing") == 1
    assert "same reward" not in shown
    assert "or mask_truncated" not in shown


@pytest.mark.slow
def test_dpo_begins_at_ln_2(
    model_dir: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before the first step the held-out loss is ln 2, with a stored and with a live reference; how far scoring is is said."""
    monkeypatch.setattr(_progress, "_PATIENCE_SECONDS", 0.0)
    for reference in ("stored", "live"):
        given = settings_of("dpo", model_dir, folder) | {"max_steps": 1, "reference": reference}
        result = forge.dpo(**given, ckpt_output_dir=tmp_path / reference)
        assert result.eval_before is not None
        assert result.eval_before["eval_loss"] == pytest.approx(0.6931472, abs=1e-4)
        scored = re.findall(r"scoring pairs with the reference: (\d+) of (\d+)", capfd.readouterr().err)
        assert bool(scored) is (reference == "stored")
        assert all(done == number for done, number in scored[-1:])


@pytest.mark.lane
@pytest.mark.slow
def test_a_run_stands_for_its_model(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A run directory serves as reward model and as model_path; a reward model generates no text."""
    for adapter in ("none", "lora"):
        reward = tmp_path / f"reward {adapter}"
        forge.reward(**settings_of("reward", model_dir, folder), adapter=adapter, ckpt_output_dir=reward)
        given = settings_of("grpo", model_dir, folder) | {"reward": (), "reward_model_path": str(reward), "max_steps": 1}
        forge.grpo(**given, ckpt_output_dir=tmp_path / f"grpo {adapter}")
        (line,) = (line for line in metrics(tmp_path / f"grpo {adapter}") if "rollout_reward/reward_model" in line)
        assert line["rollout_reward_std"] > 0
        with pytest.raises(forge.SettingsError, match="is a reward model or a classifier"):
            forge.generate(reward, "hello")
    given = settings_of("sft", model_dir, folder) | {"model_path": str(tmp_path / "grpo none"), "max_steps": 1}
    assert "hf_format" in _config(forge.sft(**given, ckpt_output_dir=tmp_path / "sft").output_dir)["model_path"]


@pytest.mark.slow
def test_only_what_the_run_comes_to_is_scored(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Only completions that the run uses are scored by the reference; a longer run scores the rest."""
    import numpy as np
    from safetensors.numpy import load_file

    given = settings_of("dpo", model_dir, folder) | {"lr_scheduler": "constant", "keep_full_state": True}
    given["ckpt_output_dir"] = tmp_path / "run"
    scored = []
    for steps in (2, 3):
        forge.dpo(**{**given, "max_steps": steps})
        scored.append(load_file(tmp_path / "run" / "data" / "train.reference.safetensors")["logps"])
    known = [~np.isnan(logps).any(1) for logps in scored]
    assert [int(found.sum()) for found in known] == [8, 12]
    assert np.array_equal(scored[0][known[0]], scored[1][known[0]])


@pytest.mark.slow
def test_another_verb_is_refused(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A run of one verb is not resumed by another."""
    forge.orpo(**settings_of("orpo", model_dir, folder), ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="holds a run of forge orpo, and this is forge simpo"):
        forge.simpo(**settings_of("simpo", model_dir, folder), ckpt_output_dir=tmp_path / "run")


@pytest.mark.parametrize(("verb", "rows", "other"), [("sft", "pairs", "dpo"), ("dpo", "chats", "sft"), ("kto", "pairs", "dpo")])
def test_rows_of_another_kind_are_refused(
    verb: str,
    rows: str,
    other: str,
    model_dir: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was found, what is wanted and the verb for such rows are named, before anything is counted; nothing is left."""
    from .conftest import write_rows
    from .verbs import rows_of

    data = write_rows(tmp_path / "rows.jsonl", rows_of(rows))
    with pytest.raises(forge.SettingsError, match=rf"forge {verb} takes .*`forge {other}`"):
        getattr(forge, verb)(
            **{**settings_of(verb, model_dir, folder), "data_path": str(data)}, ckpt_output_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    said = "".join(capsys.readouterr())
    assert "read " in said
    assert "training on" not in said


def _config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text())


def _untimed(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in ("time", "tokens_per_second", "memory")}
        for line in metrics(run)
    ]


def _loads(verb: str, directory: Path) -> None:
    """Plain transformers, or plain PEFT, loads an export and runs it."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    kind: Any = {
        **dict.fromkeys(("reward", "classify"), AutoModelForSequenceClassification),
        "embed": AutoModel,
    }.get(verb, AutoModelForCausalLM)
    ids = torch.tensor([AutoTokenizer.from_pretrained(directory)("the pear is red").input_ids])
    if (directory / "adapter_config.json").exists():
        from peft import PeftModel

        base = json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"]
        options = {"num_labels": 1} if verb == "reward" else {}
        loaded: Any = PeftModel.from_pretrained(kind.from_pretrained(base, **options), directory)
    else:
        loaded, report = kind.from_pretrained(directory, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    assert loaded(input_ids=ids)[0].isfinite().all()
