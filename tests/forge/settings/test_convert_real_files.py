"""What files as people have them say, of Axolotl, LLaMA-Factory and TRL → recipes that can be run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge
from forge.cli._config import convert as convert_file
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

from .test_convert import AXOLOTL, FACTORY, TRL, about, converted, given

HELD_OUT = ("eval_every_steps", "eval_at_epoch")


@pytest.mark.parametrize("keys", ["evals_per_epoch: 4", "evals_per_epoch: 1", "eval_steps: 10", "eval_strategy: epoch"])
def test_measurements_without_held_out_rows_are_nothing_there(keys: str) -> None:
    """Half of Axolotl's own examples ask for them beside `val_set_size: 0`; the recipe was refused."""
    found = converted(f"{AXOLOTL}val_set_size: 0.0\n{keys}\n")
    assert not set(HELD_OUT) & found.settings.keys()
    assert about(found) == set()
    for rows in ("val_set_size: 0.1", "test_datasets: [{path: b.jsonl}]"):
        assert set(HELD_OUT) & converted(f"{AXOLOTL}{rows}\n{keys}\n").settings.keys()


@pytest.mark.parametrize(("size", "held_out"), [("500", 500), ("20.5", 20), ("0.05", 0.05), ("0", None), ("0.0", None)])
def test_held_out_rows(size: str, held_out: float | None) -> None:
    """A size above 1 is a number of rows, and its fraction is dropped.

    Axolotl 0.18 `utils/data/sft.py` and LLaMA-Factory 0.9.5 `data/data_utils.py`: `int(size) if size > 1`.
    """
    for text, key in ((AXOLOTL, "val_set_size"), (FACTORY.format(stage="sft"), "val_size")):
        found = converted(f"{text}{key}: {size}\n")
        assert found.settings.get("validation_split") == held_out
        assert not [line for line in found.lost if line.startswith(key)]


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (AXOLOTL + "optimizer: adamw_torch_8bit\n", {"optimizer": "adamw_8bit"}),
        (AXOLOTL + "lr_scheduler: cosine\ncosine_min_lr_ratio: 1.0\n", {"lr_scheduler": "constant"}),
        (AXOLOTL + "noisy_embedding_alpha: 5\nneftune_noise_alpha: 5\n", {"neftune_alpha": 5.0}),
        (AXOLOTL + "bfloat16: true\n", {"dtype": "bfloat16"}),
        (AXOLOTL + "evaluation_strategy: 'no'\n", {}),
        (AXOLOTL + "dataset_processes: 8\n", {"num_proc": 8}),
        (
            AXOLOTL + "gradient_checkpointing: true\nactivation_offloading: legacy\n",
            {"activation_checkpointing": True, "activation_offloading": True},
        ),
        (AXOLOTL + "reward_model: true\nnum_labels: 1\n", {}),
        (
            AXOLOTL + "rl: gdpo\nmicro_batch_size: 2\ntrl: {num_generations: 2, max_completion_length: 9}\n",
            {"multi_objective_aggregation": "normalize_then_sum", "num_generations": 2, "max_new_tokens": 9},
        ),
        (
            AXOLOTL + "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin, a.liger.LigerPlugin]\n",
            {},
        ),
        (FACTORY.format(stage="sft") + "disable_gradient_checkpointing: true\n", {}),
        (FACTORY.format(stage="sft") + "disable_gradient_checkpointing: false\n", {}),
    ],
)
def test_is_carried_over(text: str, settings: dict[str, Any]) -> None:
    """Each is the same here under another name, or has no effect there: nothing is to be looked at."""
    found = converted(text)
    own = {name: value for name, value in given(found).items() if name not in ("model_path", "effective_batch_size")}
    assert own == settings
    assert about(found) == set()
    resolve(
        task_of(found.verb).settings,
        (
            "recipe",
            {**found.settings, "data_path": "d", "ckpt_output_dir": "o", "reward": "r:f"}
            if found.verb == "grpo"
            else {**found.settings, "data_path": "d", "ckpt_output_dir": "o"},
        ),
    )


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (AXOLOTL + "datasets: [{path: a, type: chat_template, field_messages: turns}]\n", {"turns": "messages"}),
        (AXOLOTL + "datasets: [{path: a, type: completion, field: chapter}]\n", {"chapter": "text"}),
        (
            AXOLOTL + "rl: dpo\ndatasets: [{path: a, field_messages: x, field_chosen: good, field_rejected: bad}]\n",
            {"x": "messages", "good": "chosen", "bad": "rejected"},
        ),
        (AXOLOTL + "pretraining_dataset: [{path: a, text_column: page}]\n", {"page": "text"}),
        (TRL + "dataset_text_field: page\n", {"page": "text"}),
        (TRL + "dataset_text_field: text\n", None),
    ],
)
def test_names_of_columns(text: str, columns: dict[str, str] | None) -> None:
    """Columns of other names are renamed; they were only listed."""
    found = converted(text)
    assert found.settings.get("rename_columns") == columns
    assert not [line for line in found.lost if "field" in line or "text_column" in line]


@pytest.mark.parametrize(
    ("text", "train_on"),
    [
        ("datasets: [{path: a, type: chat_template, roles_to_train: [assistant, user]}]\n", "assistant,user"),
        ("datasets: [{path: a, type: chat_template, roles_to_train: [gpt, human]}]\n", "assistant,user"),
        ("datasets: [{path: a, type: chat_template, roles_to_train: [gpt]}]\n", None),
        ("train_on_inputs: true\ndatasets: [{path: a, type: chat_template}]\n", "user,assistant,system,tool"),
        ("train_on_inputs: true\ndatasets: [{path: a, type: alpaca}]\n", "all"),
        ("train_on_inputs: false\ndatasets: [{path: a, type: chat_template}]\n", None),
    ],
)
def test_whose_messages_are_learned(text: str, train_on: str | None) -> None:
    """Roles are named in train_on; what train_on_inputs learns of a conversation is every message, and no header."""
    found = converted(AXOLOTL + text)
    assert found.settings.get("train_on") == train_on
    assert about(found) == set()


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("datasets: [{path: a, type: chat_template, train_on_eos: last}]\n", "last"),
        ("datasets: [{path: a, type: chat_template, train_on_eot: none, train_on_eos: none}]\n", "none"),
        ("datasets: [{path: a, type: chat_template, train_on_eot: all}]\n", "all"),
        ("datasets: [{path: a, type: chat_template, train_on_eos: turn}]\n", None),
        # Of text the EOS is learned there, whatever this says.
        ("datasets: [{path: a, type: alpaca, train_on_eos: none}]\n", None),
        ("train_on_eos: all\n", "all"),
    ],
)
def test_which_ends_are_learned(text: str, which: str | None) -> None:
    """What train_on_eos and train_on_eot of a conversation's type say is train_on_turn_end."""
    found = converted(AXOLOTL + text)
    assert found.settings.get("train_on_turn_end") == which
    assert not [line for line in found.lost if "train_on_eo" in line]


def test_a_column_that_is_two_things() -> None:
    """Two data sets may read one column as two things; of one that does the recipe takes the first, and says so."""
    found = converted(AXOLOTL + "datasets: [{path: a, field_messages: x}, {path: b, field: x}]\n")
    own = {"a:train": {"rename_columns": {"x": "messages"}}, "b:train": {"rename_columns": {"x": "text"}}}
    assert (found.settings["data_path"], about(found)) == (own, set())
    found = converted(AXOLOTL + "datasets: [{path: a, field_messages: x, field_tools: x}]\n")
    assert found.settings["rename_columns"] == {"x": "messages"}
    assert "datasets[]: the column 'x' is messages of a data set, and tools too" in found.lost


@pytest.mark.parametrize("pattern", [r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj", r".*\.(q|v)_proj", "^.*q_proj$"])
@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "adapter: lora\nlora_target_modules: {}\n",
        TRL + "use_peft: true\nlora_target_modules: {}\n",
    ],
)
def test_a_regular_expression_of_layers(text: str, pattern: str) -> None:
    """PEFT reads a text as one, of whole names; 27 of Axolotl's examples have one."""
    found = converted(text.format(json.dumps(pattern)))
    assert found.settings["target_modules"] == (f"re:{pattern}",)
    assert not [line for line in found.lost if line.startswith("lora_target")]
    lost = converted(f"stage: sft\nmodel_name_or_path: m\nlora_target: {json.dumps(pattern)}\n")
    assert "target_modules" not in lost.settings
    assert any("lora_target: " in line and "parts of names there too" in line for line in lost.lost)


def test_names_of_layers_are_no_regular_expression() -> None:
    """One name, several between commas, and patterns that are read here."""
    assert converted(AXOLOTL + "adapter: lora\nlora_target_modules: [q_proj, mlp.up_proj]\n").settings["target_modules"] == (
        "q_proj",
        "mlp.up_proj",
    )
    assert converted("stage: sft\nmodel_name_or_path: m\nlora_target: q_proj,v_proj\n").settings["target_modules"] == (
        "q_proj",
        "v_proj",
    )


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("", ("last:2",)),
        ("freeze_trainable_layers: 8\nfreeze_trainable_modules: all\n", ("last:8",)),
        ("freeze_trainable_layers: -3\nfreeze_trainable_modules: mlp,self_attn\n", ("first:3.mlp", "first:3.self_attn")),
    ],
)
def test_layers_that_train(text: str, parameters: tuple[str, ...]) -> None:
    """LLaMA-Factory's `freeze` trains the last layers, or the first for a number below 0."""
    found = converted(f"model_name_or_path: m\nstage: sft\nfinetuning_type: freeze\n{text}")
    assert found.settings["unfrozen_parameters"] == parameters
    assert about(found) == set()
    resolve(task_of("sft").settings, ("recipe", {**found.settings, "data_path": "d", "ckpt_output_dir": "o"}))


@pytest.mark.parametrize(
    ("text", "paths", "lost"),
    [
        ("mix_strategy: interleave_under\ninterleave_probs: 0.7,0.3\n", {"a": 0.7, "b": 0.3}, {"mix_strategy"}),
        ("mix_strategy: interleave_over\n", {"a": 1.0, "b": 1.0}, {"mix_strategy"}),
        ("mix_strategy: concat\n", ["a", "b"], set()),
        ("mix_strategy: interleave_under\ninterleave_probs: '0.7'\n", ["a", "b"], {"mix_strategy", "interleave_probs"}),
    ],
)
def test_shares_of_data_sets(text: str, paths: object, lost: set[str]) -> None:
    """LLaMA-Factory draws from data sets by `interleave_probs`, evenly where it is not given."""
    found = converted(FACTORY.format(stage="sft") + f"dataset: a,b\n{text}")
    named = {f"data/dataset_info.json:{name}": share for name, share in paths.items()} if isinstance(paths, dict) else None
    assert found.settings["data_path"] == (named or [f"data/dataset_info.json:{name}" for name in ("a", "b")])
    assert about(found) == lost


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("lora_target_modules: [q_proj]\nlora_target_parameters: [experts.down_proj]\n", ("q_proj", "experts.down_proj")),
        ("lora_target_modules: .*_proj\nlora_target_parameters: [experts.down_proj]\n", ("re:.*_proj", "experts.down_proj")),
    ],
)
def test_matrices_of_experts(text: str, settings: tuple[str, ...]) -> None:
    """PEFT's `target_parameters` are targets here."""
    found = converted(f"{AXOLOTL}adapter: lora\n{text}")
    assert found.settings["target_modules"] == settings
    assert about(found) == set()


@pytest.mark.parametrize(
    "text",
    [
        "attn_implementation: flex_attention\n",
        "xformers_attention: false\nattn_implementation: xformers\n",
        "model_config: {output_router_logits: true}\n",
        "datasets: [{path: a, type: chat_template, field_thinking: thinking, template_thinking_key: thinking}]\n",
    ],
)
def test_what_asks_for_what_is_done_anyway(text: str) -> None:
    """Kernels of attention change no number, the routers' loss is trained, and reasoning is read under its names."""
    assert about(converted(AXOLOTL + text)) == set()


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("warmup_steps: 1\n", 2),
        ("warmup_steps: 3\n", 3),
        ("warmup_steps: 0\n", 0),
        ("max_steps: 40\n", 2),
        ("max_steps: 30\n", 0),
        ("max_steps: 200\n", 6),
        ("max_steps: 9000\n", 100),
        ("max_steps: 15\nwarmup_ratio: 0.1\n", 2),
        ("max_steps: 25\nwarmup_ratio: 0.1\n", 2),
        ("max_steps: 39\nwarmup_ratio: 0.1\n", 3),
    ],
)
def test_steps_of_warm_up(text: str, steps: int) -> None:
    """As `_configure_warmup_and_logging` of Axolotl 0.18 (`core/builders/base.py`) has them: rounded down, and two for one."""
    assert converted(AXOLOTL + text).settings["warmup_steps"] == steps


def test_drawing_rows_by_their_lengths() -> None:
    """It changes which rows share a step, so it is to be looked at."""
    assert "group_by_length" in "".join(
        converted(AXOLOTL + "group_by_length: true\n").groups["not carried over, to be looked at"]
    )
    assert about(converted(AXOLOTL + "group_by_length: false\n")) == set()


def test_weights_that_train_beside_an_adapter() -> None:
    """Both were in the recipe, which was refused."""
    found = converted(AXOLOTL + "adapter: qlora\nunfrozen_parameters: [^lm_head.*]\n")
    assert "unfrozen_parameters" not in found.settings
    assert about(found) == {"unfrozen_parameters"}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dp_shard_size: 4\n", {"strategy": "fsdp2"}),
        ("dp_shard_size: 1\nfsdp_version: 2\nfsdp_config: {offload_params: false}\n", {"strategy": "fsdp2"}),
        (
            "dp_shard_size: 4\ntensor_parallel_size: 2\nfsdp_config: {reshard_after_forward: true}\n",
            {"strategy": "fsdp2", "tp_size": 2},
        ),
        (
            "dp_shard_size: 4\ndp_replicate_size: 2\nfsdp_config: {reshard_after_forward: true}\n",
            {"strategy": "hsdp", "shard_size": 4},
        ),
        ("dp_replicate_size: 1\n", {}),
        (
            "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}\n",
            {"strategy": "zero2", "cpu_offload": True},
        ),
        (
            "deepspeed: {zero_optimization: {stage: 3, offload_param: {device: none}}, bf16: {enabled: true}}\n",
            {"strategy": "zero3"},
        ),
        ("deepspeed: {gradient_clipping: auto}\n", {"strategy": "ddp"}),
    ],
)
def test_over_how_many_ranks(text: str, settings: dict[str, Any]) -> None:
    """All ranks divide the weights unless there are several copies; a mapping of DeepSpeed's says its stage."""
    found = converted(AXOLOTL + text)
    own = {name: value for name, value in given(found).items() if name not in ("model_path", "effective_batch_size")}
    assert own == settings
    assert about(found) == set()
    resolve(task_of("sft").settings, ("recipe", {**found.settings, "data_path": "d", "ckpt_output_dir": "o"}))


def test_what_deepspeed_changes_is_listed(tmp_path: Path) -> None:
    """A JSON of any name that lies beside the file is read: its stage, and each number that is set otherwise here."""
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    more = {"optimizer": {"type": "Adam"}, "gradient_clipping": 0.5, "scheduler": {"type": "W"}, "fp16": {"enabled": True}}
    (tmp_path / "ours.json").write_text(json.dumps({"zero_optimization": zero, **more}))
    (tmp_path / "c.yaml").write_text(f"{AXOLOTL}deepspeed: ours.json\n")
    text = convert_file(tmp_path / "c.yaml")
    recipe = yaml.safe_load(text)
    assert (recipe["strategy"], recipe["cpu_offload"]) == ("zero3", True)
    for key in (
        "zero_optimization: offloads to nvme",
        "optimizer:",
        "gradient_clipping: 0.5: give max_grad",
        "scheduler:",
        "fp16:",
    ):
        assert f"#   deepspeed.{key}" in text
    (tmp_path / "ours.json").write_text("{")
    with pytest.raises(forge.RecipeError, match=r"deepspeed: .*ours\.json"):
        convert_file(tmp_path / "c.yaml")
    (tmp_path / "ours.json").unlink()
    assert "deepspeed: 'ours.json': choose strategy" in convert_file(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rope_scaling: {type: yarn}\n", "config.json of a copy of the model"),
        ("overrides_of_model_config: {rope_scaling: {type: linear}}\n", "config.json of a copy of the model"),
        ("eot_tokens: [<end>]\n", "the token that ends a turn is the template's own"),
        ("default_system_message: hi\n", "leave system_prompt out to train as it did"),
        (
            "datasets: [{path: a, type: chat_template, train_on_eos: all, train_on_eot: last}]\n",
            "train_on_eos: 'all': a turn has one end, of which train_on_eot says whether it is learned",
        ),
        (
            "datasets: [{path: a, message_field_training_detail: d}]\n",
            "or which stretches are; of another name",
        ),
        ("datasets: [{path: a, split_thinking: true}]\n", "change the messages with preprocess"),
        ("datasets: [{path: a, weight: 0.3}]\n", "shares of data sets are a mapping"),
        ("datasets: [{path: a, moon: full}]\n", "datasets[].moon: 'full': forge has nothing of the kind"),
    ],
)
def test_what_there_is_instead(text: str, part: str) -> None:
    """Keys that forge has not are listed with what to do, in words that are of them."""
    (line,) = [line for line in converted(AXOLOTL + text).lost if part in line]
    assert "rename_columns" not in line


def test_kernels_are_not_to_be_looked_at() -> None:
    """What makes there faster and changes no number is in the second group."""
    text = "liger_rope: true\nuse_kernels: true\nfsdp_config: {fsdp_use_orig_params: false}\nflex_attn_compile_kwargs: {a: 1}"
    look, beside = converted(AXOLOTL + text).groups.values()
    assert [line.partition(":")[0] for line in look] == ["effective_batch_size"]
    assert len(beside) == 4


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("model_name_or_path: m\nadapter_name_or_path: a\nexport_dir: d\n", "forge export RUN --merge"),
        ("model_name_or_path: m\ninfer_backend: vllm\ntemplate: qwen\n", "forge chat RUN"),
        ("model_name_or_path: m\nstage: sft\ndo_predict: true\neval_dataset: a\n", "forge generate RUN"),
    ],
)
def test_a_file_that_trains_nothing(text: str, instead: str) -> None:
    """LLaMA-Factory's other commands have files of the same keys; a recipe of forge sft was made of them."""
    with pytest.raises(forge.RecipeError, match=f"trains nothing.*{instead}"):
        converted(text, "LLaMA-Factory")
    assert converted(f"{text}dataset: a\n", "LLaMA-Factory").verb == "sft"


def test_a_file_of_another_library_with_keys_of_several() -> None:
    """torchtune's qwen3B_async_grpo.yaml was read as one of LLaMA-Factory, for its data set."""
    text = "dataset: {_component_: torchtune.dev.grpo.gsm8k.gsm8k_dataset}\norchestration: {num_steps: 250}\nshuffle: false\n"
    with pytest.raises(forge.RecipeError, match=r"orchestration: this file is of asynchronous GRPO.*`forge grpo`"):
        converted(text)


def test_the_second_generation_of_llama_factory() -> None:
    """Its files have other keys, and were read as Axolotl's."""
    with pytest.raises(forge.RecipeError, match=r"second generation \(v1\), whose files are not converted"):
        converted("model: m\npeft_config: {name: lora}\ntrain_dataset: d.yaml\nmicro_batch_size: 1\n")
