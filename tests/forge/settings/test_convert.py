"""Configurations of other libraries → recipes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from forge import RecipeError
from forge.settings._convert import convert, library_of, read_foreign
from forge.settings._settings import flat_fields
from forge.verbs._registry import task_of

from ...whole.repository import ROOT


def fields(verb: str) -> dict[str, Any]:
    """Settings of a verb."""
    return {field.name: field for _, field in flat_fields(task_of(verb).settings)}


def converted(text: str, library: str | None = None, **more: Any) -> Any:
    """What a configuration becomes."""
    values = read_foreign(text, "c.yaml")
    return convert(values, library or library_of(values, "c.yaml"), fields, **more)


@pytest.mark.parametrize(("page", "library"), [("axolotl", "Axolotl"), ("llama-factory", "LLaMA-Factory")])
def test_the_pages_example(page: str, library: str) -> None:
    """The configuration at the top of a migration page becomes the recipe that stands below it."""
    theirs, ours = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "migrating" / f"{page}.md").read_text(), re.DOTALL)[:2]
    found = converted(theirs)
    wanted = yaml.safe_load(ours)
    wanted["learning_rate"] = float(wanted["learning_rate"])
    # Its data format follows from the type of its data set; long rows were cut, and the name of a data set is no path.
    extra = {"data_format": "messages"} if page == "axolotl" else {"on_overflow": "truncate"}
    if page == "llama-factory":
        wanted["data_path"] = "my_data"
    assert found.library == library
    assert found.verb == "sft"
    assert found.settings == {**wanted, **extra}


def test_trl() -> None:
    """A file for `trl sft --config`, with LoRA in 4 bits."""
    found = converted(
        "model_name_or_path: org/model\ndataset_name: org/data\nuse_peft: true\nload_in_4bit: true\nlora_r: 8\n"
        "lora_target_modules: [q_proj, v_proj]\nmax_length: 1024\nnum_train_epochs: 3.0\nmax_steps: -1\nbf16: true\n"
        "optim: adamw_torch_fused\nlr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\neval_strategy: 'no'\n"
    )
    assert (found.library, found.verb) == ("TRL", "sft")
    assert found.settings == {
        "model_path": "org/model",
        "data_path": "org/data:train",
        "num_epochs": 3,
        "optimizer": "adamw",
        "lr_scheduler": "constant",
        "warmup_steps": 5,
        "adapter": "qlora",
        "target_modules": ("q_proj", "v_proj"),
        "lora_r": 8,
        "dtype": "bfloat16",
        "max_seq_len": 1024,
        "on_overflow": "truncate",
    }
    assert [line.partition(":")[0] for line in found.lost] == ["eval_strategy"]


@pytest.mark.parametrize(
    ("text", "verb", "settings"),
    [
        ("base_model: m\nrl: ipo\nrl_beta: 0.2\n", "dpo", {"loss_type": ("ipo",), "beta": 0.2}),
        ("base_model: m\nrl: kto\nkto_desirable_weight: 0.5\n", "kto", {"desirable_weight": 0.5}),
        ("base_model: m\nreward_model: true\n", "reward", {}),
        ("base_model: m\npretraining_dataset: docs.jsonl\n", "pretrain", {"data_path": "docs.jsonl"}),
        ("model_name_or_path: m\nstage: rm\nfinetuning_type: full\n", "reward", {}),
        ("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\npref_loss: orpo\npref_beta: 0.1\n", "orpo", {"beta": 0.1}),
        ("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\npref_loss: hinge\n", "dpo", {"loss_type": ("hinge",)}),
        ("base_model: m\nval_set_size: 0\ndeepspeed: ds/zero3_bf16.json\n", "sft", {"strategy": "zero3"}),
        ("base_model: m\nval_set_size: 0\nfsdp_config: {offload_params: true}\n", "sft", {"strategy": "fsdp2"}),
    ],
)
def test_methods_and_strategies(text: str, verb: str, settings: dict[str, Any]) -> None:
    """The method that a key asks for becomes the verb, and FSDP and DeepSpeed a strategy."""
    found = converted(text)
    assert found.verb == verb
    assert found.settings == {"model_path": "m", **settings}


def test_what_is_lost_is_listed() -> None:
    """A value of the wrong kind, a switch that forge has not, a share of rows that is a number; what is off is not."""
    found = converted(
        "base_model: m\nnum_epochs: 1.5\nval_set_size: 200\nfp16: true\nload_in_8bit: false\nwarmup_ratio: 0.1\n"
        "optimizer: lion\nlearning_rate: fast\nsave_steps: 0.5\nplugins: []\nmerges_per_moon: 3\n"
    )
    assert found.settings == {"model_path": "m", "num_epochs": 2}
    assert {line.partition(":")[0] for line in found.lost} == {
        *("num_epochs", "val_size", "fp16", "warmup_ratio", "optimizer", "learning_rate", "save_steps", "merges_per_moon"),
    }


def test_columns_of_other_names_are_given_with_rename_columns() -> None:
    """Axolotl names columns in the type of a data set; the line about what is lost says how to name them here."""
    found = converted("base_model: m\ndatasets: [{path: a.csv, type: {field_instruction: question, field_output: answer}}]\n")
    assert any("read with rename_columns" in line for line in found.lost)


@pytest.mark.parametrize("text", ["a: [", "- a\n- b\n", "3: 4\n", "colour: red\n"])
def test_what_is_no_configuration(text: str) -> None:
    """Broken YAML, a list, keys that are no names, and keys of no library."""
    with pytest.raises(RecipeError, match=r"c\.yaml"):
        converted(text)


@pytest.mark.parametrize(
    "line",
    [
        "rl: [dpo]",
        "adapter: {a: lora}",
        "num_epochs: .nan",
        "num_epochs: .inf",
        "lr_scheduler: [cosine]",
        "optimizer: {a: b}",
        "val_set_size: .nan",
    ],
)
def test_a_value_of_another_kind_is_listed(line: str) -> None:
    """It is not carried over, and ends nothing."""
    found = converted(f"base_model: org/model\n{line}\n")
    assert found.settings == {"model_path": "org/model"}
    assert [each.partition(":")[0] for each in found.lost] == [line.partition(":")[0]]


@pytest.mark.parametrize(
    ("rank", "wanted"), [("null", {"lora_r": 8, "lora_alpha": 16}), ("abc", {}), ("[8]", {"lora_r": 8, "lora_alpha": 16})]
)
def test_a_rank_that_is_no_number(rank: str, wanted: dict[str, int]) -> None:
    """What LLaMA-Factory takes by default stands for none; a word is listed."""
    found = converted(f"stage: sft\ntemplate: x\nmodel_name_or_path: m\nlora_rank: {rank}\n").settings
    assert {name: value for name, value in found.items() if name.startswith("lora")} == wanted
