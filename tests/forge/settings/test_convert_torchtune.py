"""Nested files of torchtune → recipes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import forge
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

from ...whole.repository import ROOT
from .test_convert import converted

THEIRS, OURS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "migrating" / "torchtune.md").read_text(), re.DOTALL)
BASE = yaml.safe_load(THEIRS)


def of(**more: Any) -> Any:
    """What the page's file becomes with other values; None takes a key out."""
    return converted(yaml.safe_dump({key: value for key, value in {**BASE, **more}.items() if value is not None}))


def lost(found: Any) -> set[str]:
    """Keys that are listed, but for what is said of every file."""
    return {line.partition(":")[0] for line in found.lost} - {"effective_batch_size"}


def test_the_system_prompt() -> None:
    """Is that of rows that have none, which is said, for torchtune replaces others; two of them are listed."""
    data = {"source": "a", "new_system_prompt": "Be brief."}
    found = of(dataset=data, dataset_val=data)
    assert found.settings["system_prompt"] == "Be brief."
    (said,) = [line for line in found.lost if "new_system_prompt" in line]
    assert "it replaces the rows' own system messages there" in said
    (said,) = [line for line in of(dataset=data, dataset_val={**data, "new_system_prompt": "x"}).lost if "'x'" in line]
    assert "one system_prompt is that of all rows" in said


def test_the_pages_example() -> None:
    """The file of the page becomes the recipe below it, and nothing of it is lost."""
    found, wanted = converted(THEIRS), yaml.safe_load(OURS)
    assert (found.library, found.verb) == ("torchtune", "sft")
    wanted = {**wanted, "learning_rate": 3e-4, "target_modules": tuple(wanted["target_modules"])}
    assert found.settings == wanted
    assert lost(found) == set()


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"max_steps_per_epoch": 5, "epochs": 2}, {"max_steps": 10, "num_epochs": None}),
        ({"clip_grad_norm": 2.0}, {"max_grad_norm": 2.0}),
        ({"lr_scheduler": None}, {"lr_scheduler": "constant", "warmup_steps": None}),
        ({"compile": True, "dtype": "fp32"}, {"compile": "blocks", "dtype": "float32"}),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1e-5}}, {"optimizer": "adamw_8bit"}),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "betas": [0.8, 0.9]}}, {"beta1": 0.8, "beta2": 0.9}),
        ({"data_parallel_shard_dim": 4, "data_parallel_replicate_dim": 2}, {"strategy": "hsdp", "shard_size": 4}),
        ({"data_parallel_shard_dim": 4, "data_parallel_replicate_dim": 1}, {"shard_size": None}),
        ({"tensor_parallel_dim": 2, "fsdp_cpu_offload": True, "strategy": None}, {"tp_size": 2, "cpu_offload": True}),
        (
            {"metric_logger": {"_component_": "torchtune.training.metric_logging.WandBLogger", "project": "p"}},
            {"wandb_project": "p"},
        ),
        ({"metric_logger": {"_component_": "a.TensorBoardLogger", "log_dir": "x"}}, {"trackers": ("tensorboard",)}),
        (
            {"model": {"_component_": "torchtune.models.llama3.qlora_llama3_8b", "lora_rank": 4}},
            {"adapter": "qlora", "lora_r": 4},
        ),
        ({"model": {"_component_": "a.lora_b", "use_dora": True}}, {"adapter": "dora", "target_modules": None}),
        ({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}}, {"adapter": None, "target_modules": None}),
        (
            {
                "dataset": {"source": "org/a", "split": "train[:95%]", "column_map": {"input": "question", "output": "output"}},
                "dataset_val": {"source": "org/a", "split": "train[95%:]"},
                "run_val_every_n_steps": 9,
            },
            {
                "data_path": "org/a:train[:95%]",
                "eval_data_path": "org/a:train[95%:]",
                "rename_columns": {"question": "input"},
                "eval_every_steps": 9,
            },
        ),
        (
            {"dataset": [{"source": "org/a"}, {"source": "json", "data_files": ["b", "c"]}]},
            {"data_path": ("org/a:train", "b", "c")},
        ),
        (
            {"dataset": [{"source": "a", "column_map": {"input": "q"}}, {"source": "b", "column_map": {"input": "input"}}]},
            {"rename_columns": {"q": "input"}},
        ),
        (
            {"dataset": {"source": "org/a", "name": "b", "train_on_input": True}},
            {"train_on": "all", "data_path": "org/a:b:train"},
        ),
        ({"batch_size_val": "${batch_size}", "seed": 7, "profiler": {"enabled": False}, "device": "cuda"}, {"seed": 7}),
    ],
)
def test_is_carried_over(more: dict[str, Any], settings: dict[str, Any]) -> None:
    """Each key becomes what it is here, and the recipe can be run."""
    found = of(**more)
    assert {name: found.settings.get(name) for name in settings} == settings
    assert not lost(found) - {"max_steps_per_epoch", "dtype"}
    warm = {"warmup_steps": 1} if "max_steps" in found.settings else {}
    strategy = {"strategy": "fsdp2"} if found.settings.get("cpu_offload") else {}
    resolve(task_of("sft").settings, ("recipe", {**found.settings, **warm, **strategy}))


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}}, "dataset"),
        ({"dataset": {"_component_": "mine.rows"}}, "dataset"),
        ({"dataset": {"source": "a", "packed": True}}, "dataset.packed"),
        ({"dataset": {"source": "a", "new_system_prompt": "x"}}, "dataset.new_system_prompt"),
        ({"dataset": {"source": "json", "data_files": "a", "split": "train[:5%]"}}, "dataset.split"),
        ({"dataset_val": {"source": "json", "data_files": "a", "split": "train[:5%]"}}, "dataset_val.split"),
        ({"dataset": {"source": "a", "conversation_column": "talk"}}, "dataset.conversation_column"),
        ({"dataset": {"source": "a", "filter_fn": "mine"}}, "dataset.filter_fn"),
        ({"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}, "optimizer"),
        ({"lr_scheduler": {"_component_": "mine.steps"}}, "lr_scheduler"),
        ({"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}}, "dtype"),
        ({"model": {"_component_": "a.lora_b", "apply_lora_to_output": True}}, "model.apply_lora_to_output"),
        ({"dataset": {"source": "a", "conversation_column": "dialogue"}}, "dataset.conversation_column"),
        ({"dataset": {"source": "a", "filter_fn": "b.c"}}, "dataset.filter_fn"),
        ({"dataset": {"source": "json", "data_files": "b", "split": "train[:5%]"}}, "dataset.split"),
        ({"tokenizer": {"path": "t", "prompt_template": "a.B"}}, "tokenizer.prompt_template"),
        ({"checkpointer": {"checkpoint_dir": "a", "adapter_checkpoint": "b"}}, "checkpointer.adapter_checkpoint"),
        ({"model": {"_component_": "a.lora_b", "attn_dropout": 0.1}}, "model.attn_dropout"),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "amsgrad": True}}, "optimizer.amsgrad"),
        ({"lr_scheduler": {"_component_": "a.get_cosine_schedule_with_warmup", "num_cycles": 3}}, "lr_scheduler.num_cycles"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}}, "loss"),
        ({"dtype": "fp16"}, "dtype"),
        ({"batch_size": "${nothing}"}, "batch_size"),
        ({"moon": 3}, "moon"),
        ({"epochs": "many"}, "num_epochs"),
    ],
)
def test_what_is_lost_is_listed(more: dict[str, Any], key: str) -> None:
    """What has no like here, or changes numbers by itself, is listed by its key."""
    assert lost(of(**more)) == {key}


@pytest.mark.parametrize(
    ("more", "verb", "settings"),
    [
        (
            {"loss": {"_component_": "a.DPOLoss"}, "ref_checkpointer": {"checkpoint_dir": "r"}},
            "dpo",
            {"reference_path": "r"},
        ),
        ({"dataset": {"_component_": "torchtune.datasets.hh_rlhf_helpful_dataset"}}, "dpo", {}),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2, "label_smoothing": 0}}, "dpo", {"beta": 0.2}),
        (
            {"teacher_model": {"_component_": "a.b"}, "teacher_checkpointer": {"checkpoint_dir": "t"}},
            "distill",
            {"teacher_path": "t"},
        ),
    ],
)
def test_the_method(more: dict[str, Any], verb: str, settings: dict[str, Any]) -> None:
    """The loss or a teacher tells the recipe of torchtune, which its file does not name."""
    found = of(**more)
    assert found.verb == verb
    assert settings.items() <= found.settings.items()
    assert not lost(found)


@pytest.mark.parametrize("key", ["quantizer", "grpo_samples", "ppo_epochs", "tasks", "prompt"])
def test_another_recipe_is_refused(key: str) -> None:
    """Files of recipes that train otherwise, or not at all, become no recipe of forge sft."""
    with pytest.raises(forge.RecipeError, match=f"{key}: this file is of .*--verb"):
        of(**{key: {"a": 1}})
    assert converted(yaml.safe_dump({**BASE, key: 1}), verb="sft").verb == "sft"


@pytest.mark.parametrize("value", [3, "x", ["a"], {"b": [1]}, [{"_component_": 5}], True, float("nan")])
def test_values_of_any_kind(value: object) -> None:
    """No value of any key or section ends the conversion in anything but a list."""
    for key in {*BASE, "metric_logger", "dataset_val", "loss", "max_steps_per_epoch", "data_parallel_replicate_dim"}:
        assert of(**{key: value}).verb == "sft"
        if isinstance(BASE.get(key), dict):
            for name in (*BASE[key], "betas", "column_map", "data_files"):
                assert of(**{key: {**BASE[key], name: value}}).verb == "sft"
