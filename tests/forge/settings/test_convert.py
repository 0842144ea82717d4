"""Configurations of other libraries → recipes."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from forge import RecipeError
from forge.settings._elsewhere import RENAMED, SWITCHES, TOLD
from forge.settings._settings import flat_fields, resolve
from forge.settings.convert._convert import convert, library_of, read_foreign
from forge.verbs._registry import task_of

from ...whole.repository import ROOT

TRL = "model_name_or_path: m\n"
TEACHER = TRL + "teacher_model_name_or_path: t\n"
FACTORY = "model_name_or_path: m\nstage: {stage}\nfinetuning_type: full\n"
AXOLOTL = "base_model: m\n"


def fields(verb: str) -> dict[str, Any]:
    """Settings of a verb."""
    return {field.name: field for _, field in flat_fields(task_of(verb).settings)}


def converted(text: str, library: str | None = None, **more: Any) -> Any:
    """What a configuration becomes."""
    values = read_foreign(text, "c.yaml")
    return convert(values, library or library_of(values, "c.yaml"), fields, **more)


def given(found: Any) -> dict[str, Any]:
    """Settings that the configuration itself gives."""
    return {name: value for name, value in found.settings.items() if name not in found.comments}


def about(found: Any) -> set[str]:
    """Names of what is listed, without what is said of every file of Axolotl."""
    return {line.partition(":")[0] for line in found.lost} - {"effective_batch_size", "warmup_steps"}


@pytest.mark.parametrize(("page", "library"), [("axolotl", "Axolotl"), ("llama-factory", "LLaMA-Factory")])
def test_the_pages_example(page: str, library: str) -> None:
    """The configuration at the top of a migration page becomes the recipe that stands below it."""
    theirs, ours = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "migrating" / f"{page}.md").read_text(), re.DOTALL)[:2]
    found = converted(theirs)
    wanted = yaml.safe_load(ours)
    wanted["learning_rate"] = float(wanted["learning_rate"])
    assert found.library == library
    assert found.verb == "sft"
    assert found.settings == wanted


@pytest.mark.parametrize(
    ("text", "path", "lost"),
    [
        ("dataset: a", "data/dataset_info.json:a", 0),
        ("dataset: a, b\ndataset_dir: sets/", ["sets/dataset_info.json:a", "sets/dataset_info.json:b"], 0),
        ("dataset: org/name\ndataset_dir: ONLINE", "org/name:train", 0),
        ("dataset: a\ndataset_dir: 'REMOTE:org/name'", "a", 1),
    ],
)
def test_data_sets_that_llama_factory_describes(text: str, path: object, lost: int) -> None:
    """A name of dataset_info.json is one of `data_path`, which reads its columns and tags; held-out rows as well."""
    found = converted(f"stage: dpo\nmodel_name_or_path: m\n{text}\neval_{text}")
    assert found.settings["data_path"] == found.settings["eval_data_path"] == path
    assert len([line for line in found.lost if "dataset" in line]) == 2 * lost


def test_quantization_aware_training() -> None:
    """Axolotl's rounds to torchao's types: left out with the setting that is nearest; an empty one is nothing."""
    found = converted(AXOLOTL + "qat:\n  weight_dtype: int4\n  group_size: 32\n")
    assert "qat" not in found.settings
    assert any(line.startswith("qat: {'weight_dtype': 'int4'") and "qat=q4_0 has 4 bits" in line for line in found.lost)
    assert "qat" not in about(converted(AXOLOTL + "qat:\n"))


def test_system_prompts() -> None:
    """LLaMA-Factory's is of rows that have none, as here; pre-training has no conversations."""
    factory = "model_name_or_path: m\ndefault_system: Be brief.\nstage: "
    for stage, wanted in (("sft", "Be brief."), ("dpo", "Be brief."), ("pt", None)):
        assert converted(factory + stage).settings.get("system_prompt") == wanted
    assert converted(AXOLOTL + "default_system_message: Be brief.\n").settings["system_prompt"] == "Be brief."


def test_templates_by_name() -> None:
    """A template that the library writes over the tokenizer's own, in the same words here, is carried over."""
    found = converted(AXOLOTL + "chat_template: chatml\nspecial_tokens: {eos_token: <|im_end|>}\ntokens: [<|im_start|>]\n")
    assert found.settings["chat_template"] == "chatml"
    assert not [line for line in found.lost if "chat_template" in line or "special_tokens" in line]
    factory = "stage: sft\nmodel_name_or_path: m\ntemplate: "
    assert converted(factory + "alpaca").settings["chat_template"] == "alpaca"
    other = converted(factory + "llama3")
    assert "chat_template" not in other.settings
    assert any(line.startswith("template: 'llama3'") and "chat_template=llama3 is one" in line for line in other.lost)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("chatlm", "chatml"),
        ("ChatML", "chatml"),
        ("lama3", "llama3"),
        ("gema", "gemma"),
        ("tokeniser_default", "tokenizer_default"),
    ],
)
def test_a_misspelt_template(name: str, meant: str) -> None:
    """It is answered with the one that is meant; it was said to be one of the library's own."""
    (line,) = [line for line in converted(f"{AXOLOTL}chat_template: {name}\n").lost if "chat_template" in line]
    assert line == f"chat_template: '{name}': did you mean `{meant}`? As it is, the tokenizer's own template is taken"


@pytest.mark.parametrize(
    "name",
    """llama2 llama4 llama3_2_vision gemma2 gemma3 gemma3n qwen qwen3 qwen_25 phi_4 mistral_v7_tekken chatml_de chatglm3 default
    tokenizer_default_fallback_chatml metharme exaone4 command_a jamba falcon_h1 deepseek_v3 empty fewshot vicuna""".split(),
)
def test_another_template_is_no_misspelling(name: str) -> None:
    """A template that another library has and forge has not is said to be one."""
    for text, library in (
        (f"{AXOLOTL}chat_template: ", "Axolotl"),
        ("stage: sft\nmodel_name_or_path: m\ntemplate: ", "LLaMA-Factory"),
    ):
        (line,) = [line for line in converted(text + name).lost if "template" in line]
        assert f"template: '{name}': a template of {library}'s by name" in line


def test_what_is_lost_is_in_two_groups() -> None:
    """What may change what is trained is apart from trackers, logs, uploads and saving; what is unknown may."""
    text = "base_model: m\nwandb_watch: all\npush_to_hub: true\nsave_strategy: best\nlogging_dir: x\nplugins: [y]\n"
    text += "foo_bar: 8\n"
    (look, lost), (beside, kept) = converted(text).groups.items()
    assert look == "not carried over, to be looked at"
    assert [line.partition(":")[0] for line in lost] == ["effective_batch_size", "plugins", "foo_bar"]
    assert beside == "not carried over, without effect on what is trained"
    assert {line.partition(":")[0] for line in kept} == {"wandb_watch", "push_to_hub", "save_strategy", "logging_dir"}
    assert list(converted(AXOLOTL).groups) == ["not carried over, to be looked at"]


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("stage: sft\nmodel_name_or_path: m\nuse_apollo: true\napollo_rank: 4\n", "is refused beside LoRA there"),
        ("base_model: m\nadapter: qlora\noptimizer: apollo_adamw\noptim_args: rank=4\n", "moves the adapter's matrices"),
        ("model_name_or_path: m\nuse_peft: true\noptim: apollo_adamw\noptim_args: rank=4\n", "moves the adapter's matrices"),
    ],
)
def test_apollo_beside_an_adapter(text: str, there: str) -> None:
    """It is left out with what it has there, and the recipe can be run; without the adapter it is carried over."""
    found = converted(text)
    (line,) = [line for line in found.lost if "apollo" in line]
    assert line.startswith(f"optimizer: 'apollo': {there}")
    assert not [name for name in found.settings if "apollo" in name or name == "optimizer"]
    resolve(task_of("sft").settings, ("recipe", {**found.settings, "data_path": "d", "ckpt_output_dir": "o"}))
    alone = re.sub("adapter: qlora|use_peft: true", "", text) + ("finetuning_type: full\n" if "stage" in text else "")
    assert converted(alone).settings["apollo_rank"] == 4


@pytest.mark.parametrize(
    "text",
    [
        """
stage: sft
model_name_or_path: '2024'
dataset: '7'
quantization_bit: 8
lora_rank: 4
num_train_epochs: 2.0
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 0.0001
warmup_ratio: 0.1
use_rslora: true
bf16: true
val_size: 0.1
save_steps: 10
flash_attn: disabled
""",
        """
model_name_or_path: m
dataset_name: org/name
dataset_config: '007'
use_peft: true
load_in_4bit: true
sync_ref_model: true
ref_model_mixup_alpha: 0.5
num_train_epochs: 2
warmup_steps: 3
max_length: 64
beta: 0.2
loss_type: ipo
gradient_checkpointing: true
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.5}
eval_strategy: steps
eval_steps: 5
""",
        """
base_model: m
datasets: [{path: a.jsonl}]
adapter: lora
load_in_8bit: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_8bit
val_set_size: 0.2
saves_per_epoch: 2
sample_packing: false
trl: {beta: 0.5, num_generations: 2}
rl: grpo
""",
        "model_name_or_path: m\nreward_model: true\nlr_scheduler_type: linear\nmax_steps: 8\nuse_peft: false\n",
    ],
    ids=["LLaMA-Factory", "TRL", "Axolotl", "Axolotl's reward model"],
)
def test_numbers_and_truth_values_as_texts(text: str) -> None:
    """A quoted number or truth value is read as the bare one, whatever the key; names stay texts."""

    def quoted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: quoted(each) for name, each in value.items()}
        return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value

    values = yaml.safe_load(text)
    library = "Axolotl" if values.get("reward_model") else None
    bare, found = converted(text, library), converted(yaml.safe_dump(quoted(values)), library)
    assert found == bare


@pytest.mark.parametrize(
    "text",
    [
        "base_model: m\nadapter: lora\nload_in_8bit: true\n",
        "stage: sft\nmodel_name_or_path: m\nquantization_bit: 8\n",
        "model_name_or_path: m\nuse_peft: true\nload_in_8bit: true\n",
    ],
)
def test_8_bits(text: str) -> None:
    """Axolotl's, LLaMA-Factory's and TRL's base in 8 bits; what is of 4 bits alone is named, and 8 bits without LoRA."""
    found = converted(text)
    assert (found.settings["adapter"], found.settings["quant_type"]) == ("qlora", "int8")
    assert "double_quant" not in found.settings
    assert not {"load_in_8bit", "quantization_bit"} & about(found)
    assert "bnb_4bit_quant_type" in about(converted(f"{text}bnb_4bit_quant_type: nf4\n"))
    assert any("this trains none" in line for line in converted("base_model: m\nload_in_8bit: true\n").lost)


def test_trl() -> None:
    """A file for `trl sft --config`, with LoRA in 4 bits."""
    found = converted(
        "model_name_or_path: org/model\ndataset_name: org/data\nuse_peft: true\nload_in_4bit: true\nlora_r: 8\n"
        "lora_target_modules: [q_proj, v_proj]\nmax_length: 1024\nnum_train_epochs: 3.0\nmax_steps: -1\nbf16: true\n"
        "optim: adamw_torch_fused\nlr_scheduler_type: constant_with_warmup\nwarmup_steps: 5\neval_strategy: 'no'\n"
    )
    assert (found.library, found.verb) == ("TRL", "sft")
    assert given(found) == {
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
    assert {name: found.settings[name] for name in found.comments} == {
        "effective_batch_size": 8,
        "learning_rate": 2e-5,
        "beta2": 0.999,
        "lora_dropout": 0.05,
        "double_quant": False,
    }
    assert about(found) == {"assistant_only_loss"}


@pytest.mark.parametrize(
    ("text", "verb", "settings"),
    [
        ("base_model: m\nrl: ipo\nrl_beta: 0.2\n", "dpo", {"loss_type": ("ipo",), "beta": 0.2}),
        ("base_model: m\nrl: kto\nkto_desirable_weight: 0.5\n", "kto", {"desirable_weight": 0.5}),
        ("model_name_or_path: m\nstage: kto\nfinetuning_type: full\npref_loss: sigmoid\n", "kto", {}),
        ("base_model: m\nrl: kto\ndpo_loss_type: [hinge]\n", "kto", {}),
        ("base_model: m\nreward_model: true\n", "reward", {}),
        ("base_model: m\npretraining_dataset: docs.jsonl\n", "pretrain", {"data_path": "docs.jsonl"}),
        ("model_name_or_path: m\nstage: rm\nfinetuning_type: full\n", "reward", {}),
        ("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\npref_loss: orpo\npref_beta: 0.1\n", "orpo", {"beta": 0.1}),
        ("model_name_or_path: m\nstage: dpo\nfinetuning_type: full\npref_loss: hinge\n", "dpo", {"loss_type": ("hinge",)}),
        ("base_model: m\nval_set_size: 0\ndeepspeed: ds/zero3_bf16.json\n", "sft", {"strategy": "zero3"}),
        (
            AXOLOTL + "deepspeed: ds_z3_offload_config.json\n",
            "sft",
            {"strategy": "zero3", "cpu_offload": True},
        ),
        (
            AXOLOTL + "fsdp_config: {offload_params: true, transformer_layer_cls_to_wrap: LlamaDecoderLayer}\n",
            "sft",
            {"strategy": "fsdp2", "cpu_offload": True},
        ),
        (
            AXOLOTL + "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_reshard_after_forward: false}\n",
            "sft",
            {"strategy": "fsdp2", "reshard_after_forward": "never"},
        ),
        (
            AXOLOTL + "fsdp: hybrid_shard auto_wrap offload\n",
            "sft",
            {"strategy": "hsdp", "cpu_offload": True},
        ),
    ],
)
def test_methods_and_strategies(text: str, verb: str, settings: dict[str, Any]) -> None:
    """The method that a key asks for becomes the verb, and FSDP and DeepSpeed a strategy."""
    found = converted(text)
    assert found.verb == verb
    assert given(found) == {"model_path": "m", **settings}


def test_what_is_lost_is_listed() -> None:
    """A value of the wrong kind, a switch that forge has not; what is off is not."""
    found = converted(
        "base_model: m\nnum_epochs: 1.5\nfp16: true\nload_in_8bit: false\nwarmup_ratio: 0.1\n"
        "optimizer: lion\nlearning_rate: fast\nsave_steps: 1.5\nplugins: []\nmerges_per_moon: 3\n"
    )
    assert given(found) == {"model_path": "m", "num_epochs": 2, "warmup_ratio": 0.1}
    assert about(found) == {
        *("num_epochs", "fp16", "optimizer", "learning_rate", "save_steps", "merges_per_moon"),
    }


@pytest.mark.parametrize("text", [TRL, AXOLOTL, FACTORY.format(stage="sft")])
def test_of_two_lengths_of_a_warm_up_the_steps_are_taken(text: str) -> None:
    """As there; both would be a recipe that no run takes."""
    found = converted(text + "warmup_steps: 9\nwarmup_ratio: 0.03\n")
    assert found.settings["warmup_steps"] == 9
    assert "warmup_ratio" not in found.settings
    assert "warmup_ratio: 0.03: without effect there beside warmup_steps" in found.lost


def test_steps_between_measurements_that_nobody_makes_are_left_out() -> None:
    """`eval_steps` is read by nothing there beside `eval_strategy: no`; here it would ask for held-out rows."""
    assert "eval_every_steps" not in converted(TRL + "eval_strategy: 'no'\neval_steps: 10\n").settings


@pytest.mark.parametrize(
    ("text", "at_epoch"),
    [
        (TRL + "eval_strategy: epoch\n", True),
        (AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 1\n", True),
        (AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: true\n", None),
    ],
)
def test_measuring_at_each_epoch_is_carried_over(text: str, at_epoch: bool | None) -> None:
    """Once an epoch; more often is listed as lost."""
    found = converted(text)
    assert found.settings.get("eval_at_epoch") is at_epoch
    assert ("evals_per_epoch" in about(found)) == (at_epoch is None)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        (AXOLOTL + "val_set_size: 0.1\nnum_epochs: 3\nevals_per_epoch: 4\n", 1 / 12),
        (AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 4\nmax_steps: 10\n", 1 / 4),
        (TRL + "eval_strategy: steps\neval_steps: 0.1\n", 0.1),
        (TRL + "eval_steps: 10\n", 10),
    ],
)
def test_measuring_in_parts_of_an_epoch_is_a_share_of_the_run(text: str, share: float) -> None:
    """As the libraries have it: they divide one by epochs and measurements, and transformers takes what is below 1 so."""
    found = converted(text)
    assert found.settings["eval_every_steps"] == pytest.approx(share)
    assert not {"evals_per_epoch", "eval_steps", "eval_strategy"} & about(found)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (AXOLOTL + "num_epochs: 3\nsaves_per_epoch: 4\n", {"full_state_every_steps": 1 / 12}),
        (AXOLOTL + "num_epochs: 2\nsaves_per_epoch: 2\nsave_only_model: true\n", {"save_samples": 1 / 4}),
        (AXOLOTL + "saves_per_epoch: 1\n", {"checkpoint_at_epoch": True}),
        (TRL + "save_strategy: epoch\nsave_steps: 500\n", {"checkpoint_at_epoch": True}),
        (TRL + "save_strategy: 'no'\nsave_steps: 500\n", {}),
        (TRL + "save_strategy: steps\nsave_steps: 0.1\n", {"full_state_every_steps": 0.1}),
        (TRL + "save_steps: 500.0\nsave_only_model: false\n", {"full_state_every_steps": 500}),
        (TRL + "per_device_train_batch_size: 4\nsave_steps: 100\nsave_only_model: true\n", {"save_samples": 400}),
    ],
)
def test_saving_is_carried_over(text: str, settings: dict[str, object]) -> None:
    """What resuming needs as often, or the model alone; in parts of an epoch it is a share of the run."""
    found = converted(text)
    names = ("full_state_every_steps", "save_samples", "checkpoint_at_epoch")
    assert {name: found.settings[name] for name in names if name in found.settings} == pytest.approx(settings)
    assert not {"saves_per_epoch", "save_steps", "save_strategy", "save_only_model"} & about(found)
    if "full_state_every_steps" in settings:
        assert "save_samples=" in found.comments["full_state_every_steps"]


@pytest.mark.parametrize(
    "text", [TRL + "save_steps: 1.5\n", TRL + "save_strategy: best\n", AXOLOTL + "saves_per_epoch: true\n"]
)
def test_saving_in_other_ways_is_listed(text: str) -> None:
    """With what to write instead."""
    assert any("full_state_every_steps saves what resuming needs" in line for line in converted(text).lost)


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        (
            "base_model: m\nadapter: lora\nlora_model_dir: a\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n",
            {"adapter": "lora", "adapter_path": "a"},
            {"lora_r", "lora_alpha"},
        ),
        (
            "model_name_or_path: m\nstage: dpo\nfinetuning_type: lora\nadapter_name_or_path: a\nlora_target: all\n",
            {"adapter": "lora", "adapter_path": "a", "reference": "adapter_off"},
            set(),
        ),
        (
            "model_name_or_path: m\nstage: dpo\nfinetuning_type: lora\nadapter_name_or_path: a\nref_model: r\n",
            {"adapter_path": "a", "reference": None, "reference_path": "r"},
            set(),
        ),
        (
            "base_model: m\nrl: dpo\nadapter: lora\nlora_model_dir: a\n",
            {"adapter_path": "a", "reference": None},
            set(),
        ),
        (
            "model_name_or_path: m\nstage: sft\nfinetuning_type: oft\nadapter_name_or_path: a\noft_block_size: 16\n",
            {"adapter": "oft", "adapter_path": "a"},
            {"oft_block_size"},
        ),
        (
            "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nadapter_name_or_path: a\npissa_init: true\n",
            {"adapter": "lora", "adapter_path": "a"},
            {"pissa_init"},
        ),
        (
            "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nadapter_name_or_path: a,b\n",
            {"adapter": "lora", "adapter_path": None},
            {"adapter_name_or_path"},
        ),
        (
            "model_name_or_path: m\nstage: sft\nfinetuning_type: full\nadapter_name_or_path: a\n",
            {"adapter": None, "adapter_path": None},
            {"adapter_name_or_path"},
        ),
    ],
)
def test_an_adapter_to_go_on_from(text: str, settings: dict[str, Any], lost: set[str]) -> None:
    """Its rank, scale and layers are its own there too; several, and one beside which all is trained, are merged there."""
    found = converted(text)
    assert {name: found.settings.get(name) for name in settings} == settings
    assert not settings["adapter_path"] or not {"lora_r", "lora_alpha", "target_modules"} & found.settings.keys()
    assert lost <= about(found)


def test_a_misspelt_key_is_answered_with_the_nearest() -> None:
    """What is no key of any library may be one of the file's, misspelt."""
    lost = "\n".join(converted("base_model: m\nadapter: lora\nlora_rnk: 8\neval_per_epoch: 4\nneither_of_them: 1\n").lost)
    assert "lora_rnk: 8: forge has nothing of the kind; did you mean `lora_rank`?" in lost
    assert "did you mean `evals_per_epoch`?" in lost
    assert "neither_of_them: 1: forge has nothing of the kind\n" in lost + "\n"


@pytest.mark.parametrize(
    ("kind", "data_format"),
    [
        ("{field_instruction: question, field_output: answer, field_input: null}",
         'axolotl:{"field_instruction": "question", "field_output": "answer"}'),
        ("{format: 'Q: {instruction} {input}', no_input_format: \"Q: {instruction}\\nA:\"}",
         'axolotl:{"format": "Q: {instruction} {input}", "no_input_format": "Q: {instruction}\\nA:"}'),
    ],
)  # fmt: skip
def test_a_type_that_the_file_defines(kind: str, data_format: str) -> None:
    """Fields and texts of its own are a data_format, which the recipe's settings read; one with unknown keys is listed."""
    found = converted(f"base_model: m\ndatasets: [{{path: a.csv, type: {kind}}}]\n")
    assert found.settings["data_format"] == data_format
    assert not [line for line in found.lost if "type" in line]
    lost = converted("base_model: m\ndatasets: [{path: a.csv, type: {field_question: question}}]\n").lost
    assert any("read with rename_columns" in line for line in lost)


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
    assert given(found) == {"model_path": "org/model"}
    assert about(found) == {line.partition(":")[0]}


ODD = [
    None,
    True,
    False,
    0,
    -1,
    3,
    0.5,
    1e30,
    "",
    "1e-4",
    "dpo",
    "cispo",
    [],
    {},
    [1],
    ["a"],
    {"a": 1},
    [{}],
    float("nan"),
    "{{",
]
READ = sorted(
    {*RENAMED, *SWITCHES, *TOLD, "trl", "rl", "stage", "adapter", "num_generations", "loss_type", "eval_strategy", "max_steps"}
)


@hypothesis.given(
    st.dictionaries(st.sampled_from(READ), st.sampled_from(ODD), max_size=8),
    st.sampled_from(["TRL", "Axolotl", "LLaMA-Factory"]),
    st.sampled_from([None, "sft", "dpo", "grpo", "pretrain"]),
)
def test_whatever_a_file_says(values: dict[str, Any], library: str, verb: str | None) -> None:
    """It becomes settings of the verb, each of which is one, or a refusal of forge's."""
    try:
        found = convert(values, library, fields, verb)
    except RecipeError:
        return
    assert found.settings.keys() <= fields(found.verb).keys()
    assert found.comments.keys() <= found.settings.keys()


@pytest.mark.parametrize(
    ("rank", "wanted"), [("null", {"lora_r": 8, "lora_alpha": 16}), ("abc", {}), ("[8]", {"lora_r": 8, "lora_alpha": 16})]
)
def test_a_rank_that_is_no_number(rank: str, wanted: dict[str, int]) -> None:
    """What LLaMA-Factory takes by default stands for none; a word is listed."""
    found = converted(f"stage: sft\ntemplate: x\nmodel_name_or_path: m\nlora_rank: {rank}\n").settings
    assert {name: value for name, value in found.items() if name.startswith("lora")} == wanted


@pytest.mark.parametrize(
    ("text", "size", "comment"),
    [
        (TRL, 8, "8 a GPU is TRL's default"),
        (TRL + "gradient_accumulation_steps: 4\n", 32, "8 a GPU is TRL's default, times gradient_accumulation_steps: 4"),
        (TRL + "per_device_train_batch_size: 2\n", 2, None),
        (FACTORY.format(stage="sft") + "gradient_accumulation_steps: 4\n", 32, "8 a GPU is LLaMA-Factory's default"),
        (AXOLOTL + "gradient_accumulation_steps: 4\n", 4, "1 a GPU is Axolotl's default"),
        (AXOLOTL + "micro_batch_size: 2\nbatch_size: 16\n", 16, None),
    ],
)
def test_the_batch_that_a_file_leaves_out(text: str, size: int, comment: str | None) -> None:
    """Is the library's own, and said to be."""
    found = converted(text)
    assert found.settings["effective_batch_size"] == size
    assert found.comments.get("effective_batch_size", "").startswith(comment or "")
    assert (comment is None) == ("effective_batch_size" not in found.comments)


GRPO = TRL + "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nnum_generations: 8\nbeta: 0.04\n"


@pytest.mark.parametrize("verb", [None, "grpo", "rloo"])
def test_batches_of_completions_become_prompts(verb: str | None) -> None:
    """TRL's 16 completions a step are 2 prompts with 8 each, and its beta the weight of the KL."""
    found = converted(GRPO, verb=verb)
    assert found.verb == (verb or "grpo")
    assert (found.settings["effective_batch_size"], found.settings["kl_weight"]) == (2, 0.04)
    assert found.settings.get("kl_estimator") == (None if verb == "rloo" else "unbiased"), "TRL's default"
    assert "beta" not in about(found)
    assert ("verb" in about(found)) == (verb is None), "a file of trl rloo looks the same"


@pytest.mark.parametrize(
    ("line", "size", "updates"),
    [("steps_per_generation: 8", 8, 4), ("generation_batch_size: 32", 4, 2), ("steps_per_generation: 3", 2, None)],
)
def test_rollouts_that_serve_several_steps(line: str, size: int, updates: int | None) -> None:
    """Their prompts are the batch, and the steps made of one are updates_per_pass; what does not divide is listed."""
    found = converted(GRPO + line + "\n")
    assert found.settings["effective_batch_size"] == size
    assert found.settings.get("updates_per_pass") == updates
    assert (line.partition(":")[0] in about(found)) == (updates is None)


def test_groups_of_several_gpus_are_left_open() -> None:
    """Four completions on a GPU are no group of eight: the batch is asked for."""
    found = converted(TRL + "num_generations: 8\nper_device_train_batch_size: 4\n")
    assert "effective_batch_size" not in found.settings
    assert found.comments.keys() & {"effective_batch_size"} == set()
    assert any("no whole number of groups of 8" in line for line in found.lost)


def test_axolotls_block_for_trl() -> None:
    """Its keys are read as if they stood outside."""
    found = converted(
        AXOLOTL + "rl: grpo\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "trl: {beta: 0.001, num_generations: 4, max_completion_length: 64, reward_funcs: [rewards.right], scale_rewards: yes}\n"
    )
    wanted = {"kl_weight": 0.001, "num_generations": 4, "max_new_tokens": 64, "reward": ("rewards:right",)}
    wanted |= {"scale_rewards": "group", "effective_batch_size": 2}
    assert {name: found.settings[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "verb", "wanted"),
    [
        (TRL, "sft", {"max_seq_len": 1024, "on_overflow": "truncate", "num_epochs": 3, "lr_scheduler": "linear"}),
        (TRL, "dpo", {"learning_rate": 1e-6, "beta2": 0.999, "max_seq_len": 1024}),
        (TRL, "reward", {"learning_rate": 1e-4, "max_seq_len": 1024, "on_overflow": None}),
        (TRL, "grpo", {"max_new_tokens": 512, "kl_estimator": None}),
        (TRL, "kto", {"learning_rate": 1e-6, "shuffle": False}),
        (TRL + "loss_type: luspo\n", "grpo", {"importance_sampling_level": "token", "clip": 0.2}),
        (TRL + "loss_type: dapo\n", "grpo", {"importance_sampling_level": None}),
        (TRL, "rloo", {"num_generations": 2, "effective_batch_size": 4, "shuffle": None}),
        (TEACHER, None, {"on_policy": 1.0, "beta": 1.0, "max_new_tokens": 512, "sample_temperature": None}),
        (TEACHER + "lmbda: 0.3\n", None, {"on_policy": None, "beta": None, "max_new_tokens": 128, "sample_temperature": 0.9}),
        (TEACHER + "lmbda: 0\n", None, {"beta": None, "max_new_tokens": None, "sample_temperature": None}),
        (TRL + "use_peft: true\n", "sft", {"lora_dropout": 0.05, "target_modules": ("q_proj", "v_proj")}),
        (TRL + "use_peft: true\nlora_target_modules: all-linear\n", "sft", {"target_modules": None}),
        (TRL + "max_length: null\nmax_steps: 5\n", "sft", {"max_seq_len": None, "on_overflow": None, "num_epochs": None}),
        (TRL + "optim: adafactor\n", "sft", {"beta2": None}),
        (FACTORY.format(stage="sft"), None, {"max_seq_len": 2048, "learning_rate": 5e-5, "num_epochs": 3}),
        (FACTORY.format(stage="dpo") + "pref_loss: simpo\n", None, {"beta": 0.1, "gamma": 0.5}),
        ("model_name_or_path: m\nstage: sft\nlora_alpha: 32\n", None, {"adapter": "lora", "lora_r": 8, "lora_alpha": None}),
        (AXOLOTL, None, {"max_seq_len": 512, "on_overflow": None, "lr_scheduler": None, "num_epochs": None}),
        (AXOLOTL + "max_steps: 1000\n", None, {"warmup_steps": 30}),
    ],
)
def test_defaults_that_differ_are_written(text: str, verb: str | None, wanted: dict[str, Any]) -> None:
    """What a file leaves to its library stands in the recipe, with a comment; None where forge does the same."""
    found = converted(text, verb=verb)
    written = {name: found.settings[name] for name in found.comments}
    assert {name: written.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("text", "verb", "settings"),
    [
        (TRL + "loss_type: dft\n", "sft", {"loss": "dft"}),
        (
            TEACHER + "temperature: 0.8\nmin_p: 0.1\n",
            "distill",
            {"teacher_path": "t", "temperature": 0.8, "min_p": 0.1},
        ),
        (
            TEACHER + "temperature: 0.8\nmax_completion_length: 9\n",
            "distill",
            {"teacher_path": "t", "temperature": 0.8, "max_new_tokens": 9},
        ),
        (TRL + "loss_type: ipo\n", "dpo", {"loss_type": ("ipo",)}),
        (TRL + "loss_type: apo_zero_unpaired\n", "kto", {"loss_type": "apo_zero_unpaired"}),
        (TRL + "center_rewards_coefficient: 0.01\n", "reward", {"centering": 0.01}),
        (TRL + "completion_only_loss: false\n", "sft", {"train_on": "all"}),
        (TRL + "loss_type: cispo\nepsilon_high: 5.0\n", "grpo", {"loss_type": "cispo", "clip_high": 4.0}),
        (
            TRL + "multi_objective_aggregation: normalize_then_sum\nscale_rewards: none\n",
            "grpo",
            {"multi_objective_aggregation": "normalize_then_sum"},
        ),
        (TRL + "entropy_coef: 0.01\n", "grpo", {"entropy_coef": 0.01}),
        (
            TRL + "num_generations: 4\nimportance_sampling_level: sequence\n",
            "grpo",
            {"num_generations": 4, "importance_sampling_level": "sequence"},
        ),
        (
            TRL + "loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 3e-4\n",
            "grpo",
            {"loss_type": "gspo", "clip": 3e-4},
        ),
        (
            TRL + "loss_type: luspo\nimportance_sampling_level: token\nepsilon: 0.1\n",
            "grpo",
            {"loss_type": "luspo", "importance_sampling_level": "token", "clip": 0.1},
        ),
        (
            TRL + "loss_type: vespo\nimportance_sampling_level: token\nvespo_k_pos: 1.0\n",
            "grpo",
            {"loss_type": "vespo", "vespo_k_pos": 1.0},
        ),
        (
            TRL + "loss_type: vespo\nepsilon: 0.2\nepsilon_high: 0.3\ndelta: 4.0\nsapo_temperature_pos: 1.0\n",
            "grpo",
            {"loss_type": "vespo"},
        ),
        (TRL + "loss_type: cispo\ndelta: 4.0\nvespo_k_pos: 1.0\n", "grpo", {"loss_type": "cispo"}),
        (TRL + "router_aux_loss_coef: 0.02\n", "sft", {"router_aux_loss_coef": 0.02}),
        (TRL + "router_aux_loss_coef: 0.0\n", "sft", {"moe_aux_loss": "off"}),
        (
            TRL + "use_adaptive_entropy: true\nentropy_target: 2.0\nentropy_coef_max: 0.1\n",
            "grpo",
            {"use_adaptive_entropy": True, "entropy_target": 2.0, "entropy_coef_max": 0.1},
        ),
        (TRL + "num_generations: 4\nentropy_target: 2.0\n", "grpo", {"num_generations": 4}),
        (TRL + "top_entropy_quantile: 0.2\n", "grpo", {"top_entropy_quantile": 0.2}),
        (
            TRL + "num_generations: 4\nmin_p: 0.1\nrepetition_penalty: 1.2\n",
            "grpo",
            {"num_generations": 4, "min_p": 0.1, "repetition_penalty": 1.2},
        ),
        (
            TRL + "loss_type: luspo\nimportance_sampling_level: sequence\noff_policy_mask_threshold: 0.1\n",
            "grpo",
            {"loss_type": "luspo", "off_policy_mask_threshold": 0.1},
        ),
        (TRL + "loss_type: sapo\nsapo_temperature_neg: 1.5\n", "grpo", {"loss_type": "sapo", "sapo_temperature_neg": 1.5}),
        (TRL + "dataset_name: d.jsonl\n", "sft", {"data_path": "d.jsonl"}),
        (
            TRL + "dataset_name: o/d\ndataset_config: c\neval_strategy: steps\n",
            "sft",
            {"data_path": "o/d:c:train", "eval_data_path": "o/d:c:test"},
        ),
        (
            TRL + "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
            "sft",
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
        ),
        (
            TRL + "lr_scheduler_type: polynomial\nlearning_rate: 1e-4\nlr_scheduler_kwargs: {lr_end: 1e-5, power: 2.0}\n",
            "sft",
            {"lr_scheduler": "polynomial", "learning_rate": 1e-4, "power": 2.0, "min_lr_ratio": pytest.approx(0.1)},
        ),
        (
            AXOLOTL + "lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n",
            "sft",
            {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.1},
        ),
        (
            AXOLOTL + "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj]\n",
            "sft",
            {"adapter": "lora"},
        ),
        (AXOLOTL + "warmup_ratio: 0.1\nmax_steps: 50\n", "sft", {"max_steps": 50, "warmup_steps": 5}),
        (AXOLOTL + "tokens: ['<a>', '<b>']\n", "sft", {"add_tokens": ("<a>", "<b>")}),
        (
            FACTORY.format(stage="sft") + "add_tokens: <a>, <b>\nadd_special_tokens: <c>\n",
            "sft",
            {"add_tokens": ("<a>", "<b>"), "add_special_tokens": ("<c>",)},
        ),
        (
            FACTORY.format(stage="sft") + "enable_thinking: false\n",
            "sft",
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        (
            AXOLOTL + "datasets: [{path: o/d, name: main, split: 'train[:10%]', type: completion, field: text}]\n",
            "sft",
            {"data_path": "o/d:main:train[:10%]", "data_format": "text", "on_overflow": "split"},
        ),
        (
            AXOLOTL + "gradient_checkpointing: offload\n",
            "sft",
            {"activation_checkpointing": True, "activation_offloading": True},
        ),
        (AXOLOTL + "deepspeed: ds_z0_config.json\n", "sft", {"strategy": "ddp"}),
        (AXOLOTL + "deepspeed: ds_zero2_no_offload.json\n", "sft", {"strategy": "zero2"}),
        (TRL + "lr_scheduler_type: constant\n", "sft", {"lr_scheduler": "constant"}),
        (TRL + "bf16: false\naverage_tokens_across_devices: true\n", "sft", {"dtype": "float32"}),
        (
            TRL + "metric_for_best_model: eval_loss\nload_best_model_at_end: true\n",
            "sft",
            {"metric_for_best": "loss", "keep_best": True},
        ),
        (TRL + "attn_implementation: kernels-community/vllm-flash-attn3\n", "sft", {"attention": "flash3"}),
        (
            TRL + "reward_funcs: [accuracy_reward, mine.right]\nnum_generations: 9\n",
            "grpo",
            {"reward": ("trl.rewards:accuracy_reward", "mine:right"), "num_generations": 9},
        ),
        (AXOLOTL + "sequence_len: 64\nexcess_length_strategy: raise\n", "sft", {"max_seq_len": 64, "on_overflow": "error"}),
        (FACTORY.format(stage="pt") + "cutoff_len: 64\n", "pretrain", {"block_size": 64}),
        (FACTORY.format(stage="sft") + "max_samples: 500\n", "sft", {"max_samples": 500}),
        (
            FACTORY.format(stage="sft") + "additional_target: embed_tokens,lm_head\nfinetuning_type: lora\nlora_rank: 4\n",
            "sft",
            {"adapter": "lora", "lora_r": 4, "modules_to_save": ("embed_tokens", "lm_head")},
        ),
        (
            FACTORY.format(stage="sft") + "finetuning_type: oft\noft_block_size: 16\noft_target: q_proj,v_proj\nlora_rank: 8\n",
            "sft",
            {"adapter": "oft", "oft_block_size": 16, "target_modules": ("q_proj", "v_proj")},
        ),
        (
            FACTORY.format(stage="dpo") + "finetuning_type: oft\noft_target: all\nmodule_dropout: 0.0\noft_rank: 0\n",
            "dpo",
            {"adapter": "oft"},
        ),
        (
            FACTORY.format(stage="sft") + "finetuning_type: oft\nquantization_bit: 4\noft_block_size: 16\n",
            "sft",
            {"adapter": "qoft", "oft_block_size": 16},
        ),
        (
            FACTORY.format(stage="dpo") + "pref_ftx: 0.5\n",
            "dpo",
            {"loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5)},
        ),
        (FACTORY.format(stage="dpo") + "pref_loss: simpo\npref_ftx: 0.5\n", "simpo", {"cpo_alpha": 0.5}),
        (
            FACTORY.format(stage="dpo") + "dpo_label_smoothing: 0.1\n",
            "dpo",
            {"loss_type": ("cdpo",), "label_smoothing": 0.1},
        ),
        (
            TRL + "loss_type: [discopop]\ndiscopop_tau: 0.1\nld_alpha: 0.5\nf_alpha_divergence_coef: 0.2\n",
            "dpo",
            {"loss_type": ("discopop",), "discopop_tau": 0.1, "ld_alpha": 0.5},
        ),
        (TRL + "use_weighting: true\n", "dpo", {"wpo": True}),
        (
            TRL
            + "sync_ref_model: true\nref_model_sync_steps: 64\nref_model_mixup_alpha: 0.5\nprecompute_ref_log_probs: false\n",
            "dpo",
            {"reference": "moving", "reference_sync_steps": 64, "reference_mixup": 0.5},
        ),
        (
            TRL + "desirable_weight: 2.0\nsync_ref_model: true\n",
            "kto",
            {"reference": "moving", "desirable_weight": 2.0},
        ),
        (
            TRL + "scale_rewards: batch\nmax_completion_length: 9\nbeta: 0.1\nsync_ref_model: true\nref_model_sync_steps: 64\n",
            "grpo",
            {
                "scale_rewards": "batch",
                "max_new_tokens": 9,
                "kl_weight": 0.1,
                "reference": "moving",
                "reference_sync_steps": 64,
            },
        ),
        (
            TRL
            + "normalize_advantages: true\nreward_clip_range: [-1, 2.5]\nsync_ref_model: true\nref_model_mixup_alpha: 0.9\n",
            "rloo",
            {
                "normalize_advantages": True,
                "reward_clip_range": (-1.0, 2.5),
                "reference": "moving",
                "reference_mixup": 0.9,
            },
        ),
        (
            AXOLOTL
            + "rl: grpo\ntrl: {beta: 0.1, sync_ref_model: true, ref_model_mixup_alpha: 0.9, max_completion_length: 9}\n",
            "grpo",
            {"kl_weight": 0.1, "reference": "moving", "reference_mixup": 0.9, "max_new_tokens": 9},
        ),
        (
            TRL + "sync_ref_model: false\nref_model_sync_steps: 64\nprecompute_ref_log_probs: true\n",
            "dpo",
            {"reference": "stored"},
        ),
        (
            TRL + "f_divergence_type: alpha_divergence\nf_alpha_divergence_coef: 0.2\ndiscopop_tau: 0.1\n",
            "dpo",
            {"f_divergence": "alpha_divergence", "f_divergence_alpha": 0.2},
        ),
    ],
)
def test_what_another_name_or_form_says(text: str, verb: str, settings: dict[str, Any]) -> None:
    """Settings that are written otherwise there are carried over, and nothing is said to be lost."""
    found = converted(text)
    assert found.verb == verb
    assert {name: value for name, value in given(found).items() if name != "model_path"} == settings
    assert about(found) <= {"assistant_only_loss", "eval_strategy", "verb", "normalize"}


@pytest.mark.parametrize(
    ("text", "verb", "shuffle"),
    [
        (TRL + "shuffle_dataset: false\n", "sft", None),
        (TRL + "train_sampling_strategy: sequential\nshuffle_dataset: true\n", "sft", False),
        (TRL + "train_sampling_strategy: random\n", "dpo", None),
        (TRL + "train_sampling_strategy: random\nloss_type: apo_zero_unpaired\n", "kto", True),
        (TRL + "num_generations: 4\nshuffle_dataset: false\n", "grpo", False),
        (TRL + "shuffle_dataset: true\n", "rloo", None),
        (FACTORY.format(stage="sft") + "disable_shuffling: true\n", "sft", False),
        (FACTORY.format(stage="dpo") + "disable_shuffling: false\n", "dpo", None),
        (AXOLOTL + "shuffle_merged_datasets: false\n", "sft", None),
        (AXOLOTL + "datasets: [{path: a.jsonl}]\ncurriculum_sampling: true\n", "sft", False),
        (
            AXOLOTL + "datasets: [{path: a}, {path: b}]\ncurriculum_sampling: true\nshuffle_merged_datasets: false\n",
            "sft",
            False,
        ),
    ],
)
def test_the_order_of_rows(text: str, verb: str, shuffle: bool | None) -> None:
    """What decides there whether rows are drawn at random is carried over; None where they are, as by default here."""
    found = converted(text, verb=verb)
    assert found.settings.get("shuffle") is shuffle
    assert not {name for name in about(found) if "shuffl" in name or "sampling" in name}


@pytest.mark.parametrize(("alpha", "there"), [("", 1.0), ("cpo_alpha: null\n", 1.0), ("cpo_alpha: 0.0\n", 0.0)])
@pytest.mark.parametrize("text", [TRL + "loss_type: simpo\nuse_peft: true\n", AXOLOTL + "rl: simpo\nadapter: lora\n"])
def test_simpo_has_the_likelihood_that_it_has_there(text: str, alpha: str, there: float) -> None:
    """TRL's CPOConfig, and Axolotl, which hands it on, have a likelihood of weight 1 where a file says nothing of it."""
    found = converted(text + alpha)
    assert found.verb == "simpo"
    assert (found.settings["cpo_alpha"], found.settings["beta"]) == (there, 0.1)
    assert ("normalize" in about(found)) == bool(there)
    assert "loss_type" not in about(found)
    assert "lora_dropout" not in found.settings


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (TRL + "seed: 1\ndata_seed: 2\n", "data_seed: 2: here: one seed is that of all"),
        (TRL + "group_by_length: true\n", "group_by_length: True: here: rows are packed without padding, in random order"),
        (TRL + "num_train_epochs: 3\nmax_steps: 5\n", "num_train_epochs: 3: max_steps alone ends a run there"),
        (TRL + "packing: true\n", "packing: True: rows are packed here too; but a batch counts packed rows"),
        (FACTORY.format(stage="sft") + "packing: true\n", "without neat_packing they see each other there"),
        (AXOLOTL + "chat_template: qwen_25\n", "chat_template: 'qwen_25': a template of Axolotl's by name"),
        (
            AXOLOTL + "chat_template: tokenizer_default_fallback_chatml\n",
            "of a tokenizer that has none, chat_template=chatml is one",
        ),
        (AXOLOTL + "chat_template_jinja: '{{ x }}'\n", "write it to a file"),
        (AXOLOTL + "rl: dpo\ndpo_label_smoothing: 0.1\n", "dpo_label_smoothing: 0.1: loss_type=sigmoid reads none"),
        (FACTORY.format(stage="pt") + "cutoff_len: 64\npacking: false\n", "packing: False: documents are cut into blocks"),
        (
            TRL + "loss_type: simpo\nsync_ref_model: true\n",
            "sync_ref_model: True: here it is reference=moving, a setting of forge dpo, kto, ppo, grpo and rloo",
        ),
        (
            TRL + "num_generations: 4\nsync_ref_model: true\nref_model_sync_steps: 64\n",
            "sync_ref_model: True: without beta there is no reference, there and here",
        ),
        (
            TRL + "num_generations: 4\nuse_vllm: true\nvllm_importance_sampling_correction: false\n",
            "vllm_importance_sampling_correction: False: here a server's completions are weighed where",
        ),
        (
            TRL + "loss_type: [sigmoid, sft]\n",
            "normalize: the likelihood of the wanted answers is a mean over a micro-batch",
        ),
        (AXOLOTL + "rl: orpo\n", "normalize: the likelihood of the wanted answers is a mean over a micro-batch"),
        (
            FACTORY.format(stage="dpo") + "pref_ftx: 0.5\n",
            "normalize: the likelihood of the wanted answers is the mean of",
        ),
        (AXOLOTL + "lr_scheduler: constant\nwarmup_steps: 5\n", "warmup_steps: 5: without effect there"),
        (TRL + "lr_scheduler_type: constant\nwarmup_ratio: 0.03\nmax_steps: 100\n", "warmup_ratio: 0.03: without effect there"),
        (TRL + "warmup_ratio: 1.0\n", "warmup_ratio: 1.0: the whole run is warm-up"),
        (TRL + "fsdp: full_shard\nfsdp_config: f.json\n", "fsdp_config: 'f.json': the file is not read"),
        (
            TRL + "loss_type: dapo\nimportance_sampling_level: sequence\nbeta: 0.1\nuse_bias_correction_kl: true\n",
            "use_bias_correction_kl: True: the KL is weighed by the completion's ratio there",
        ),
        (TRL + "num_generations: 4\nloss_type: bnpo\n", "loss_type: 'bnpo': a mean over a micro-batch's tokens there"),
        (
            TRL + "num_generations: 4\ntrain_sampling_strategy: sequential\n",
            "train_sampling_strategy: 'sequential': read by no trainer there that samples",
        ),
        (TRL + "train_sampling_strategy: batch_rebalance\n", "train_sampling_strategy: 'batch_rebalance': here: shuffle=false"),
        (
            AXOLOTL + "datasets: [{path: a.jsonl}, {path: b.jsonl}]\ncurriculum_sampling: true\n",
            "shuffle_merged_datasets: several data sets are shuffled once there",
        ),
        (AXOLOTL + "rl: simpo\n", "normalize: the likelihood of the wanted answers is a mean over a micro-batch"),
        (
            AXOLOTL + "rl: dpo\ndatasets: [{path: a, roles_to_train: [user]}]\n",
            "roles_to_train: ['user']: here: name the roles in",
        ),
        (AXOLOTL + "datasets: [{path: a, shards: 10, shards_idx: 3}]\n", "shards: 10: a part of the rows"),
        (AXOLOTL + "fsdp_config: {ignored_modules: [x]}\n", "fsdp_config.ignored_modules: ['x']: all weights are divided"),
        (
            AXOLOTL + "special_tokens: {eos_token: <x>}\n",
            "special_tokens: {'eos_token': '<x>'}: here: the token that ends a turn",
        ),
        (AXOLOTL + "pretraining_dataset: d.jsonl\nsequence_len: 64\n", "sequence_len: longer documents are cut off there"),
        (FACTORY.format(stage="ppo") + "cutoff_len: 64\n", "cutoff_len: 64: longer prompts are cut there"),
    ],
)
def test_what_has_no_like_here_is_said(text: str, part: str) -> None:
    """A setting that the recipe cannot hold is listed with the reason, and is not in the recipe."""
    found = converted(text)
    assert any(part in line for line in found.lost)
    assert {"chat_template", "data_format", "label_smoothing", "warmup_steps"} & found.settings.keys() == set()


def test_what_forge_does_anyway_is_not_listed() -> None:
    """Nothing is lost of a setting that asks for forge's default."""
    text = AXOLOTL + (
        "roles_to_train: [assistant]\ntrain_on_eos: turn\nflash_attention: true\nsample_packing: false\nchat_template: "
        "tokenizer_default\npad_to_sequence_len: true\ndo_train: true\ntrain_on_inputs: false\nlora_mlp_kernel: true\n"
        "special_tokens: {pad_token: <pad>}\nmodel_type: LlamaForCausalLM\nval_set_size: 0.1\n"
        "eval_steps: 5\neval_strategy: steps\n"
        "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [assistant], train_on_eos: turn, field_messages: "
        "conversations, message_field_training: train, message_field_training_detail: train_detail, "
        "message_property_mappings: {role: from, content: value}, roles: {assistant: [gpt]}}]\n"
    )
    assert about(converted(text)) == set()
    assert about(converted(TRL + "assistant_only_loss: true\npadding_free: true\ntruncation_mode: keep_start\n")) == set()


@pytest.mark.parametrize("kind", ["alpaca", "alpaca:chat", "context_qa.load_v2", "input_output", "jeopardy"])
def test_prompt_types(kind: str) -> None:
    """Axolotl writes rows of such types in a prompt of its own, and so they are learned; all other verbs read no such rows."""
    found = converted(AXOLOTL + f"datasets: [{{path: a.jsonl, type: {kind}}}]\n")
    assert found.settings["data_format"] == f"axolotl:{kind}"
    assert about(found) == set()
    assert "datasets[].type" in about(converted(AXOLOTL + f"rl: dpo\ndatasets: [{{path: a.jsonl, type: {kind}}}]\n"))


@pytest.mark.parametrize(
    ("text", "data_path"),
    [
        (
            "datasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl, type: completion}]\nsequence_len: 64\n",
            {"a.jsonl": {"data_format": "messages"}, "b.jsonl": {"data_format": "text", "on_overflow": "split"}},
        ),
        (
            "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user]}, {path: a.jsonl, type: alpaca}]\n",
            [
                {"path": "a.jsonl", "data_format": "messages", "train_on": "user"},
                {"path": "a.jsonl", "data_format": "axolotl:alpaca"},
            ],
        ),
        (
            "train_on_inputs: true\ndatasets: [{path: a.jsonl, type: chat_template}, {path: b.jsonl, type: alpaca}]\n",
            {
                "a.jsonl": {"data_format": "messages", "train_on": "user,assistant,system,tool"},
                "b.jsonl": {"data_format": "axolotl:alpaca", "train_on": "all"},
            },
        ),
        (
            "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user], train_on_eos: last},"
            " {path: b.jsonl, type: chat_template, roles_to_train: [gpt], train_on_eos: none}]\n",
            {
                "a.jsonl": {"train_on": "user", "train_on_turn_end": "last"},
                "b.jsonl": {"train_on_turn_end": "none"},
            },
        ),
        (
            "datasets: [{path: a.jsonl, type: chat_template, train_on_eos: none}, {path: b.jsonl, type: alpaca, shards: 10}]\n",
            {
                "a.jsonl": {"data_format": "messages", "train_on_turn_end": "none"},
                "b.jsonl": {"data_format": "axolotl:alpaca", "random_rows": 0.1},
            },
        ),
    ],
)
def test_what_data_sets_have_of_their_own(text: str, data_path: object) -> None:
    """Roles, ends, parts, cut texts and a file that is there twice are an entry's; nothing of them is lost."""
    found = converted(AXOLOTL + text)
    assert found.settings["data_path"] == data_path
    assert not [line for line in found.lost if line.startswith(("datasets", "train_on"))]
    resolve(task_of("sft").settings, ("recipe", {"ckpt_output_dir": "r", **found.settings}))


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        (
            "datasets: [{path: a.jsonl, split: 'train[:50%]'}]\n",
            {"data_path": {"a.jsonl": {"random_rows": 0.5}}},
            ["datasets[].split: 'train[:50%]': the first 50 % of the rows there; here as many, chosen at random"],
        ),
        (
            "datasets: [{path: json, data_files: [a.jsonl], split: 'train[:100]'}]\n",
            {"data_path": {"a.jsonl": {"max_samples": 100}}},
            [],
        ),
        (
            "datasets: [{path: json, data_files: [a.jsonl, b.jsonl], split: 'train[:100]'}]\n",
            {"data_path": {"a.jsonl": {"max_samples": 100}, "b.jsonl": {"max_samples": 100}}},
            ["datasets[].split: 'train[:100]': the first rows of 2 files together"],
        ),
        ("datasets: [{path: a.jsonl, split: 'train[:100%]'}]\n", {"data_path": "a.jsonl"}, []),
        (
            "datasets: [{path: a.jsonl, split: 'train[10:]'}]\n",
            {"data_path": "a.jsonl"},
            ["datasets[].split: 'train[10:]': all rows of a file are read"],
        ),
        (
            "datasets: [{path: a.jsonl, split: 'train[:9]', shards: 2}]\n",
            {"data_path": {"a.jsonl": {"random_rows": 0.5}}},
            ["datasets[].split: 'train[:9]': all rows of a file are read"],
        ),
        ("datasets: [{path: org/a, split: 'train[:50%]'}]\n", {"data_path": "org/a:train[:50%]"}, []),
        (
            "datasets: [{path: a.jsonl}, {path: b.jsonl}, {path: a.jsonl}]\n",
            {"data_path": ["a.jsonl", "b.jsonl"]},
            ["datasets: a.jsonl: is there 2 times, and here once: "],
        ),
        (
            "datasets: [{path: a.jsonl, shards: 4}, {path: a.jsonl}, {path: b.jsonl, shards: 2}, {path: b.jsonl, shards: 4}]\n",
            {"data_path": {"a.jsonl": {}, "b.jsonl": {"random_rows": 0.5}}},
            [
                "datasets: a.jsonl: is there 2 times, and here once: ",
                "datasets: b.jsonl: is there 2 times, and here once, random_r",
            ],
        ),
        (
            "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user]}]\n"
            "test_datasets: [{path: b.jsonl, type: chat_template}]\n",
            {"data_path": {"a.jsonl": {"train_on": "user"}}, "eval_data_path": "b.jsonl", "train_on": None},
            [],
        ),
        (
            "datasets: [{path: a.jsonl, type: chat_template, roles_to_train: [user], train_on_eos: last}]\n"
            "test_datasets: [{path: b.jsonl}]\n",
            {"data_path": "a.jsonl", "eval_data_path": "b.jsonl", "train_on": "user", "train_on_turn_end": "last"},
            [],
        ),
    ],
)
def test_parts_of_files_and_files_that_are_there_twice(text: str, settings: dict[str, Any], lost: list[str]) -> None:
    """Rows that the file leaves out, or sees twice, are an entry's, or are listed; the recipe is one that forge reads."""
    found = converted(AXOLOTL + text)
    assert {name: found.settings.get(name) for name in settings} == settings
    listed = [line for line in found.lost if "datasets" in line]
    assert [line.startswith(part) for line, part in zip(listed, lost, strict=True)] == [True] * len(lost)
    resolve(task_of("sft").settings, ("recipe", {"ckpt_output_dir": "r", **found.settings}))


def test_a_part_of_a_file_for_trl() -> None:
    """The slice of a file's split is its first rows, as of a data set on the Hub."""
    found = converted(TRL + "dataset_name: d.jsonl\ndataset_train_split: train[:5]\n")
    assert found.settings["data_path"] == {"d.jsonl": {"max_samples": 5}}
    found = converted(TRL + "dataset_name: org/d\ndataset_train_split: train[:5]\n")
    assert found.settings["data_path"] == "org/d:train[:5]"


def test_a_data_set_that_llama_factory_names_twice() -> None:
    """Its rows are seen twice an epoch there: shares are added up, and without shares it is listed."""
    found = converted("stage: sft\nmodel_name_or_path: m\ndataset: a,b,a\n")
    assert found.settings["data_path"] == ["data/dataset_info.json:a", "data/dataset_info.json:b"]
    assert "dataset: data/dataset_info.json:a: is there 2 times" in "\n".join(found.lost)
    shares = "mix_strategy: interleave_under\ninterleave_probs: 0.2,0.5,0.3\n"
    found = converted("stage: sft\nmodel_name_or_path: m\ndataset: a,b,a\n" + shares)
    assert found.settings["data_path"] == {"data/dataset_info.json:a": 0.5, "data/dataset_info.json:b": 0.5}


@pytest.mark.parametrize(
    ("data_sets", "settings"),
    [
        (
            "datasets: [{path: a, type: alpaca}, {path: b, type: 'alpaca:phi', field_messages: x}, {path: c, type: new}]",
            {
                "data_path": {
                    "a:train": {"data_format": "axolotl:alpaca"},
                    "b:train": {"data_format": "axolotl:alpaca:phi", "rename_columns": {"x": "messages"}},
                    "c:train": {},
                }
            },
        ),
        (
            "datasets: [{path: a, type: completion, field: x}, {path: b, type: completion, field: y}]",
            {
                "data_path": {"a:train": {"rename_columns": {"x": "text"}}, "b:train": {"rename_columns": {"y": "text"}}},
                "data_format": "text",
                "on_overflow": "split",
            },
        ),
        (
            "datasets: [{path: a.jsonl, type: alpaca}]\ntest_datasets: [{path: b.jsonl, type: chat_template}, {path: c.jsonl}]",
            {
                "data_path": {"a.jsonl": {"data_format": "axolotl:alpaca"}},
                "eval_data_path": {"b.jsonl": {"data_format": "messages"}, "c.jsonl": {}},
            },
        ),
        (
            "datasets: [{path: a.jsonl, type: alpaca}]\ntest_datasets: [{path: b.jsonl}]",
            {"data_path": "a.jsonl", "eval_data_path": "b.jsonl", "data_format": "axolotl:alpaca"},
        ),
        (
            "rl: grpo\ndatasets: [{path: a, type: completion, field: x}, {path: b, type: chat_template}]",
            {"data_path": {"a:train": {"rename_columns": {"x": "text"}}, "b:train": {}}},
        ),
    ],
)
def test_several_types(data_sets: str, settings: dict[str, Any]) -> None:
    """What data sets have in common is the run's, the rest their own; the recipe that is written is one that is read."""
    found = converted(AXOLOTL + data_sets + "\n")
    names = ("data_path", "eval_data_path", "data_format", "rename_columns", "on_overflow")
    assert {name: found.settings[name] for name in names if name in found.settings} == settings
    assert not [line for line in found.lost if "type" in line and "'new'" not in line and "completion" not in line]
    needed = {"reward": "a.b:c"} if found.verb == "grpo" else {}
    resolve(task_of(found.verb).settings, ("recipe r.yaml", {**needed, **found.settings, "ckpt_output_dir": "o"}))


def test_a_type_that_is_none_here() -> None:
    """It is listed."""
    assert "datasets[].type" in about(converted(AXOLOTL + "datasets: [{path: a, type: reflection}]\n"))


LORA = "adapter: lora\nlora_dropout: 0.1\n"


@pytest.mark.parametrize(
    ("text", "verb", "dropout", "said"),
    [
        (AXOLOTL + LORA, None, 0.1, False),
        (AXOLOTL + LORA + "rl: grpo\n", None, 0.1, False),
        (AXOLOTL + LORA + "rl: simpo\n", None, None, True),
        ("model_name_or_path: m\nstage: kto\nlora_dropout: 0.1\n", None, None, True),
        ("model_name_or_path: m\nstage: rm\nlora_dropout: 0.1\n", None, 0.1, False),
        (TRL + "use_peft: true\n", "dpo", None, False),
        (TRL + "use_peft: true\nlora_dropout: 0.1\n", "dpo", None, True),
        (TRL + "use_peft: true\nlora_dropout: 0.1\ndisable_dropout: false\n", "dpo", 0.1, False),
        (TRL + "use_peft: true\nlora_dropout: 0.1\ndisable_dropout: true\n", "grpo", None, True),
    ],
)
def test_dropout_that_does_nothing_there(text: str, verb: str | None, dropout: float | None, said: bool) -> None:
    """Trainers of preferences switch LoRA's dropout off: it is left out, and a rate that was given is listed."""
    found = converted(text, verb=verb)
    assert found.settings.get("lora_dropout") == dropout
    assert ("lora_dropout" in about(found)) == said


def test_a_file_for_ppo_has_prompts() -> None:
    """The length of LLaMA-Factory's rows is that of prompts, which are not cut; the rows of Axolotl's GRPO have none."""
    found = converted(FACTORY.format(stage="ppo") + "cutoff_len: 64\nreward_model: r\n").settings
    assert {name: found.get(name) for name in ("max_prompt_len", "on_overflow", "top_p")} == {
        "max_prompt_len": 64,
        "on_overflow": None,
        "top_p": 0.7,
    }
    found = converted(TRL + "max_prompt_length: 64\n", verb="grpo")
    assert found.settings["max_prompt_len"] == 64
    assert "max_prompt_length: 64: longer prompts are cut there" in "\n".join(found.lost)
    found = converted(AXOLOTL + "rl: grpo\nsequence_len: 64\n")
    assert "max_prompt_len" not in found.settings
    assert "sequence_len" not in about(found)


def test_documents_of_llama_factory_see_each_other() -> None:
    """Its pretraining concatenates documents, and masks none from another."""
    assert converted(FACTORY.format(stage="pt")).settings["cross_documents"] is True
    assert "cross_documents" not in converted(AXOLOTL + "pretraining_dataset: d.jsonl\n").settings


@pytest.mark.parametrize("line", ["rl: ebft", "process_reward_model: true"])
def test_a_method_that_forge_has_not_is_refused(line: str) -> None:
    """No recipe of another method is made of its file, unless a verb is asked for."""
    with pytest.raises(RecipeError, match="forge has no such method"):
        converted(AXOLOTL + line + "\n")
    assert converted(AXOLOTL + line + "\n", verb="sft").verb == "sft"


def test_a_method_that_the_file_does_not_say_is_asked_for() -> None:
    """TRL's beta belongs to four methods."""
    with pytest.raises(RecipeError, match="--verb dpo, kto, grpo or rloo"):
        converted(TRL + "beta: 0.1\n")
    assert converted(TRL + "beta: 0.1\n", verb="kto").settings["beta"] == 0.1


APOLLO = FACTORY.format(stage="sft") + "use_apollo: true\n"


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        (APOLLO, {"optimizer": "apollo", "apollo_rank": 16, "apollo_scale": 32.0}, set()),
        (
            APOLLO + "apollo_rank: 8\napollo_scale: 4.0\napollo_update_interval: 50\napollo_scale_type: tensor\n"
            "apollo_target: all\napollo_proj: random\napollo_proj_type: std\napollo_layerwise: true\n"
            "apollo_scale_front: true\n",
            {"optimizer": "apollo_mini", "apollo_rank": 8, "apollo_scale": 4.0, "apollo_update_interval": 50},
            set(),
        ),
        (
            APOLLO + "apollo_proj: svd\napollo_target: [mlp]\n",
            {"optimizer": "apollo", "apollo_rank": 16, "apollo_scale": 32.0},
            {"apollo_proj", "apollo_target"},
        ),
        (FACTORY.format(stage="sft") + "use_apollo: false\napollo_rank: 8\n", {}, set()),
        (
            TRL + "optim: apollo_adamw\noptim_target_modules: all-linear\n",
            {"optimizer": "apollo", "apollo_rank": 128, "apollo_scale": 1.0},
            set(),
        ),
        (
            TRL + "optim: apollo_adamw\noptim_args: 'rank=1, scale=128, scale_type=tensor, norm=3'\n",
            {"optimizer": "apollo_mini", "apollo_rank": 1, "apollo_scale": 128.0},
            {"norm"},
        ),
        (
            AXOLOTL
            + "optimizer: apollo_adamw_layerwise\noptim_args: {rank: 64, update_proj_gap: 20}\noptim_target_modules: [mlp]\n",
            {"optimizer": "apollo", "apollo_rank": 64, "apollo_update_interval": 20, "apollo_scale": 1.0},
            {"apollo_target"},
        ),
        (AXOLOTL + "optimizer: galore_adamw\noptim_args: {rank: 64}\n", {}, {"optimizer", "optim_args"}),
    ],
)
def test_apollo(text: str, settings: dict[str, Any], lost: set[str]) -> None:
    """A switch with settings of its own, or `optim` with `optim_args`: the same settings here; what differs is listed."""
    found = converted(text)
    assert {name: value for name, value in found.settings.items() if "apollo" in name or name == "optimizer"} == settings
    assert about(found) - {"assistant_only_loss"} == lost
    resolve(task_of(found.verb).settings, ("argument", {**found.settings, "data_path": "d", "ckpt_output_dir": "o"}))


def test_settings_of_images() -> None:
    """What is so anyway is nothing to look at; the sizes of images are listed with what is here."""
    factory = FACTORY.format(stage="sft") + "freeze_vision_tower: {}\nfreeze_language_model: false\nimage_max_pixels: {}\n"
    assert about(converted(factory.format("true", "null"))) == set()
    found = converted(factory.format("false", "262144"))
    assert found.settings["freeze_vision_tower"] is False
    assert any("whose files say how large images are" in line for line in found.lost)
    assert about(converted(AXOLOTL + "processor_type: AutoProcessor\nremove_unused_columns: false\n")) == set()


@pytest.mark.parametrize(
    ("text", "settings", "lost"),
    [
        (
            FACTORY.format(stage="sft") + "freeze_multi_modal_projector: false\nfreeze_language_model: true\n",
            {"freeze_multi_modal_projector": False, "freeze_language_model": True},
            set(),
        ),
        (
            FACTORY.format(stage="sft").replace("full", "lora") + "freeze_multi_modal_projector: false\n",
            {},
            {"freeze_multi_modal_projector"},
        ),
        (FACTORY.format(stage="kto") + "freeze_vision_tower: false\n", {"freeze_vision_tower": False}, set()),
        (FACTORY.format(stage="pt") + "freeze_vision_tower: false\n", {}, {"freeze_vision_tower"}),
        (
            AXOLOTL + "processor_type: AutoProcessor\n",
            {"freeze_vision_tower": False, "freeze_multi_modal_projector": False},
            set(),
        ),
        (AXOLOTL + "processor_type: AutoProcessor\nfreeze_mm_modules: true\n", {}, set()),
        (AXOLOTL + "processor_type: AutoProcessor\nadapter: lora\n", {}, set()),
        (AXOLOTL + "freeze_mm_modules: true\n", {}, set()),
    ],
)
def test_parts_that_train(text: str, settings: dict[str, Any], lost: set[str]) -> None:
    """LLaMA-Factory's freezing by its own names; Axolotl's full training of a model with a processor is of all parts."""
    found = converted(text)
    assert {name: value for name, value in found.settings.items() if name.startswith("freeze_")} == settings
    assert about(found) - {"pref_beta", "pref_loss"} == lost
    resolve(task_of(found.verb).settings, ("argument", {**found.settings, "data_path": "d", "ckpt_output_dir": "o"}))
