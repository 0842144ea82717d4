"""Defaults of LLaMA-Factory and Axolotl, read from their sources, beside the recipes made of their files.

tools/library_defaults.py compares the table with newer releases. Where Axolotl's own default is null, it is that of the release
of TRL or transformers that it asks for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.settings._elsewhere import ALSO, RENAMED
from forge.settings._settings import flat_fields
from forge.settings.convert._adapter import WITHOUT_DROPOUT
from forge.settings.convert._convert import convert
from forge.settings.convert._run import GENERATIONS
from forge.verbs._registry import task_of

TABLE = json.loads((Path(__file__).parent / "library_defaults.json").read_text())
FACTORY, AXOLOTL = "LLaMA-Factory", "Axolotl"
HF = {FACTORY: "transformers 5.6.0", AXOLOTL: "transformers 5.16.1"}
OFF = {"neftune_noise_alpha": 0.0, "loraplus_lr_ratio": 1.0, "center_rewards_coefficient": 0.0, "warmup_steps": 0}
"""Their null → the same here."""
NO_SETTING = {
    *("stage", "finetuning_type", "use_dora", "use_rslora", "use_muon", "pissa_init", "use_dft_loss"),  # which is asked below
    *("train_on_prompt", "mask_history", "train_on_inputs"),  # train_on=assistant
    *("packing", "neat_packing", "enable_thinking", "ppo_target", "pref_ftx", "ld_alpha"),
    *("gradient_accumulation_steps", "max_steps", "warmup_ratio", "excess_length_strategy", "disable_dropout"),
    *("epsilon", "epsilon_high", "scale_rewards", "importance_sampling_level"),  # by loss_type, as there
    *("lora_r", "lora_alpha", "max_completion_length"),
}
"""Names that are off, are read beside another, have no default there, or are tested by themselves."""


def rows(library: str, *classes: str) -> dict[str, Any]:
    """Fields of classes of a library, and of what it is built on, with their defaults."""
    releases = {FACTORY: ("llamafactory", "trl 0.9.6"), AXOLOTL: ("axolotl", "trl 1.9.0")}[library]
    files = [files for release, files in TABLE.items() if release.startswith(releases) or release == HF[library]]
    known = {name: found for each in files for classes_ in each.values() for name, found in classes_.items()}
    merged: dict[str, Any] = {}
    for name in classes:  # a null leaves what an earlier class has
        merged |= {field: value for field, value in known[name].items() if value is not None or field not in merged}
    return merged


def recipe(library: str, text: str) -> tuple[str, dict[str, Any]]:
    """Settings of the recipe of a file, and of forge where it says nothing."""
    found = convert(yaml.safe_load(f"model_name_or_path: m\n{text}"), library, fields)
    plain = {name: field.default for name, field in fields(found.verb).items()}
    return found.verb, {**plain, **found.settings}


def fields(verb: str) -> dict[str, Any]:
    return {field.name: field for _, field in flat_fields(task_of(verb).settings)}


PPO = {"kl_weight": "init_kl_coef", "gamma": "gamma", "lam": "lam", "value_clip": "cliprange_value", "value_weight": "vf_coef"}
LLAMA_FACTORY = ("TrainingArguments", "LoraArguments", "QuantizationArguments")
AXOLOTLS = ("TrainingArguments", "HyperparametersConfig", "LoraConfig", "AxolotlInputConfig")


@pytest.mark.parametrize(
    ("library", "text", "classes"),
    [
        (FACTORY, "stage: sft", (*LLAMA_FACTORY, "DataArguments", "FinetuningArguments")),
        (FACTORY, "stage: pt", (*LLAMA_FACTORY, "DataArguments")),
        (FACTORY, "stage: rm", (*LLAMA_FACTORY, "DataArguments")),
        (FACTORY, "stage: dpo", (*LLAMA_FACTORY, "DataArguments", "RLHFArguments")),
        (FACTORY, "{stage: dpo, pref_loss: orpo}", (*LLAMA_FACTORY, "DataArguments", "RLHFArguments")),
        (FACTORY, "{stage: dpo, pref_loss: simpo}", (*LLAMA_FACTORY, "DataArguments", "RLHFArguments")),
        (FACTORY, "stage: kto", (*LLAMA_FACTORY, "DataArguments", "RLHFArguments")),
        (FACTORY, "{stage: ppo, reward_model: r}", (*LLAMA_FACTORY, "GeneratingArguments", "RLHFArguments")),
        (AXOLOTL, "adapter: lora", AXOLOTLS),
        (AXOLOTL, "rl: dpo", (*AXOLOTLS, "DPOConfig")),
        (AXOLOTL, "rl: kto", (*AXOLOTLS, "KTOConfig")),
        (AXOLOTL, "rl: orpo", (*AXOLOTLS, "ORPOConfig")),
        (AXOLOTL, "rl: simpo", (*AXOLOTLS, "CPOConfig")),
        (AXOLOTL, "reward_model: true", (*AXOLOTLS, "RewardConfig")),
        (AXOLOTL, "rl: grpo", (*AXOLOTLS, "GRPOConfig", "TRLConfig")),
    ],
)
def test_a_file_without_settings_becomes_the_librarys_defaults(library: str, text: str, classes: tuple[str, ...]) -> None:
    """Whatever a file leaves out, the recipe and forge's defaults together say what its library would do."""
    body = text.strip("{}").replace(", ", "\n")
    verb, settings = recipe(library, body)
    checked = set()
    for theirs, value in rows(library, *classes).items():
        ours = RENAMED.get(theirs, theirs)
        if ours not in settings:
            ours = ALSO.get(ours, ours)
        if theirs == "cutoff_len" and verb == "pretrain":
            ours = "block_size"
        if (verb == "ppo" and theirs in ("pref_beta", "simpo_gamma")) or (library == AXOLOTL and theirs == "simpo_gamma"):
            continue  # preferences alone read these; Axolotl hands its null on, with which TRL does not train
        if verb == "kto" and theirs == "pref_loss":
            continue  # DPO alone reads it
        if theirs in ("per_device_train_batch_size", "micro_batch_size"):
            if verb in GENERATIONS:
                continue  # one GPU's completions are no group: it is asked for
            ours = "effective_batch_size"
        if theirs in NO_SETTING or ours not in settings or (value is None and theirs not in OFF):
            continue
        assert plain(ours, settings[ours]) == plain(ours, OFF[theirs] if value is None else value), theirs
        checked.add(theirs)
    assert {"adam_beta2", "adam_beta1", "max_grad_norm", "weight_decay", "seed"} <= checked
    assert library == AXOLOTL or {"learning_rate", "num_train_epochs", "lora_rank", "lora_target"} <= checked
    assert library == FACTORY or {"num_epochs", "lr_scheduler", "lora_dropout"} <= checked


def plain(setting: str, value: Any) -> Any:
    """Write a value of theirs or ours in one way."""
    if setting == "target_modules":
        return None if value == "all" else value
    if setting == "num_epochs":
        return value or 1
    if setting == "optimizer":
        return "adamw" if str(value).startswith("adamw_torch") else value
    if isinstance(value, tuple | list):
        return list(value) if len(value) != 1 else value[0]
    return value


def test_ppo_is_that_of_the_trl_that_llama_factory_asks_for() -> None:
    """The last release of TRL with a PPO of mini-batches, whose defaults LLaMA-Factory leaves alone."""
    settings = recipe(FACTORY, "stage: ppo\nreward_model: r")[1]
    theirs = rows(FACTORY, "PPOConfig")
    assert {ours: settings[ours] for ours in PPO} == {ours: theirs[name] for ours, name in PPO.items()}
    assert settings["num_iterations"] == theirs["ppo_epochs"]


@pytest.mark.parametrize("verb", ["dpo", "kto", "reward", "orpo", "simpo", "grpo"])
def test_dropout_is_off_where_their_trainer_switches_it_off(verb: str) -> None:
    """Axolotl's trainers are TRL's, whose disable_dropout is on by default in preferences."""
    config = {"simpo": "CPOConfig", "reward": "RewardConfig"}.get(verb, f"{verb.upper()}Config")
    assert rows(AXOLOTL, config)["disable_dropout"] == (verb in WITHOUT_DROPOUT[AXOLOTL])


def test_the_alpha_of_lora_is_twice_the_rank() -> None:
    """LLaMA-Factory computes it where the file has none; Axolotl has no default of rank and alpha."""
    assert rows(FACTORY, "LoraArguments")["lora_alpha"] is None
    assert recipe(FACTORY, "stage: sft")[1]["lora_alpha"] == 2 * rows(FACTORY, "LoraArguments")["lora_rank"]
    assert rows(AXOLOTL, "LoraConfig") == {"lora_r": None, "lora_alpha": None, "lora_dropout": 0.0}


def test_what_cannot_be_had_is_said() -> None:
    """A default of theirs that no setting has: completions without an end, a KL that is steered."""
    for library, text, key in (
        (AXOLOTL, "rl: grpo", "max_completion_length"),
        (FACTORY, "stage: ppo\nreward_model: r", "ppo_target"),
    ):
        lost = convert(yaml.safe_load(f"model_name_or_path: m\n{text}"), library, fields).lost
        assert any(line.startswith(f"{key}:") for line in lost)
