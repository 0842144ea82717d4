"""The migration pages beside the libraries themselves: what stands in their column are settings that those have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from forge.backends._trl_arguments import OBJECTIVE
from forge.settings._settings import flat_fields
from forge.settings.convert._adapter import WITHOUT_DROPOUT
from forge.settings.convert._convert import convert
from forge.settings.convert._run import GENERATIONS
from forge.verbs._registry import task_of

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrating"


def first_column(page: str, section: str = "") -> set[str]:
    """Names in the first column of the tables of a page, or of one section of it."""
    text = (PAGES / page).read_text()
    if section:
        text = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert names, section
    return names


def test_instructlab_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of instructlab-training names fields of its arguments, and its example makes them."""
    theirs = pytest.importorskip(
        "instructlab.training", reason="instructlab-training is missing here: `hatch run peers:test`", exc_type=ImportError
    )
    known = {*theirs.TrainingArgs.model_fields, *theirs.TorchrunArgs.model_fields}
    assert first_column("instructlab-training.md") <= known
    given: list[object] = []
    monkeypatch.setattr(theirs, "run_training", lambda *arguments: given.extend(arguments))
    (code,) = re.findall(r"```python\n(from instructlab.*?)```", (PAGES / "instructlab-training.md").read_text(), re.DOTALL)
    exec(code, {})
    assert given[1].max_batch_len == 25000


def fields(*classes: type) -> set[str]:
    return {field.name for each in classes for field in dataclasses.fields(each)}


def test_trl() -> None:
    """The page of TRL names fields of its configurations, arguments of its trainers, and PEFT's."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
    from peft import LoraConfig

    trainer = {"model", "train_dataset", "eval_dataset", "ref_model", "reward_funcs", "callbacks"}
    assert first_column("trl.md", "SFTConfig and TrainingArguments") <= fields(trl.SFTConfig) | trainer
    assert first_column("trl.md", "LoraConfig") <= fields(LoraConfig) | {"BitsAndBytesConfig", "model"}
    preferences = fields(trl.DPOConfig, trl.KTOConfig, trl.RewardConfig)
    assert first_column("trl.md", "DPOConfig, KTOConfig, RewardConfig") <= preferences | trainer
    assert first_column("trl.md", "GRPOConfig, RLOOConfig") <= fields(trl.GRPOConfig, trl.RLOOConfig) | trainer
    assert all(hasattr(trl, name) for name in first_column("trl.md", "Trainers"))


COMMON = {
    "effective_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "seed": "seed",
    "learning_rate": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_steps": "warmup_steps",
    "weight_decay": "weight_decay",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "max_grad_norm": "max_grad_norm",
    "max_seq_len": "max_length",
}
"""Setting → argument of every configuration of TRL that has it."""
OWN = {"clip", "kl_estimator", "scale_rewards", "centering", "neftune_alpha", "min_p", "importance_sampling_level"}
"""Settings whose default is written otherwise there, or is read beside another alone."""


def fields_of(verb: str) -> dict[str, Any]:
    return {field.name: field for _, field in flat_fields(task_of(verb).settings)}


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto", "reward", "grpo", "rloo", "distill"])
def test_a_file_without_settings_becomes_trls_defaults(verb: str) -> None:
    """Whatever a file for TRL leaves out, the recipe and forge's defaults together say what TRL would do."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
    config = getattr(trl, f"{ ({'reward': 'Reward', 'distill': 'Distillation'}.get(verb, verb.upper())) }Config")
    theirs = {field.name: field for field in dataclasses.fields(config)}
    settings = fields_of(verb)
    found = convert({"model_name_or_path": "m"}, "TRL", fields_of, verb).settings
    sampled = {"num_generations": "num_generations", "max_new_tokens": "max_completion_length"}
    distilled = {"beta": "beta", "temperature": "temperature"} if verb == "distill" else {}
    pairs = {**COMMON, **OBJECTIVE.get(verb, sampled), **distilled}
    checked = set()
    for ours, name in pairs.items():
        if ours not in settings or name not in theirs or ours in OWN:
            continue
        default = theirs[name].default
        wanted = theirs[name].default_factory() if default is dataclasses.MISSING else default
        value = found.get(ours, settings[ours].default)
        if ours == "effective_batch_size":
            value *= GENERATIONS.get(verb, 1)
        assert (list(value) if isinstance(value, tuple) else value) == wanted, ours
        checked.add(ours)
    assert {"effective_batch_size", "num_epochs", "learning_rate", "lr_scheduler", "beta2"} <= checked
    assert theirs["gradient_accumulation_steps"].default == 1
    assert ("max_seq_len" in checked) == ("max_length" in theirs)
    drawn = "shuffle_dataset" if verb in ("grpo", "rloo", "distill") else "train_sampling_strategy"
    assert (theirs[drawn].default in (True, "random")) == found.get("shuffle", True)


def test_trls_lora() -> None:
    """LoRA of `trl sft --use_peft` has the rank, dropout and layers that the recipe says."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as LAYERS

    theirs = trl.ModelConfig(use_peft=True)
    values = {"model_name_or_path": "m", "use_peft": True, "load_in_4bit": True}
    found, settings = convert(values, "TRL", fields_of, "sft").settings, fields_of("sft")
    assert theirs.lora_target_modules is None
    for model in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"):
        assert tuple(LAYERS[model]) == found["target_modules"]
    assert found["lora_dropout"] == theirs.lora_dropout
    assert found["double_quant"] == theirs.use_bnb_nested_quant
    for name in ("lora_r", "lora_alpha"):
        assert settings[name].default == getattr(theirs, name)


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto", "reward", "grpo", "rloo"])
def test_trls_dropout(verb: str) -> None:
    """LoRA's dropout is left out of recipes where TRL switches dropout off by default."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
    config = getattr(trl, f"{verb.upper() if verb != 'reward' else 'Reward'}Config")
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    assert theirs.get("disable_dropout", False) == (verb in WITHOUT_DROPOUT["TRL"])


def test_mini_trainer() -> None:
    """The page of mini-trainer names fields of its arguments."""
    theirs = pytest.importorskip(
        "mini_trainer.training_types", reason="mini-trainer is not installed here: `hatch run peers:test`", exc_type=ImportError
    )
    known = fields(theirs.TrainingArgs, theirs.TorchrunArgs, theirs.PretrainingConfig)
    assert first_column("mini-trainer.md") <= known
