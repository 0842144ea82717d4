"""A nested configuration of torchtune → a recipe, section by section."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from forge._errors import RecipeError
from forge.settings.convert._draft import Fields, checked, plain

_SOURCES = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
}
"""Builder of a data set → its `source` where a file gives none."""
_LEARN_PROMPTS = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Builders whose `train_on_input` is true where a file gives none."""
_OPTIMIZERS = {
    "AdamW": "adamw",
    "PagedAdamW": "adamw",
    "AdamW8bit": "adamw_8bit",
    "PagedAdamW8bit": "adamw_8bit",
    "Adam": "adamw",
}
_SECTIONS = "model tokenizer checkpointer dataset dataset_val optimizer lr_scheduler loss metric_logger".split()
_PLAIN = {
    "output_dir": "ckpt_output_dir",
    "epochs": "num_epochs",
    "seed": "seed",
    "shuffle": "shuffle",
    "log_every_n_steps": "logging_steps",
    "enable_activation_checkpointing": "activation_checkpointing",
    "enable_activation_offloading": "activation_offloading",
    "tensor_parallel_dim": "tp_size",
    "context_parallel_dim": "cp_size",
    "fsdp_cpu_offload": "cpu_offload",
    "run_val_every_n_steps": "eval_every_steps",
}
"""Key at the top → setting of the same meaning."""
_NOTHING = re.compile(
    r"profiler|device|log_level|log_peak_memory_stats|resume_from_checkpoint|save_adapter_weights_only|batch_size_val|optimizer_in_bwd"
    r"|custom_sharded_layers|fsdp_reshard_after_forward|cudnn_deterministic_mode|enable_async_checkpointing|base_dir|task_type"
    r"|activation_checkpointing_mode|save_last_epoch_only|epochs_to_save|use_output_dir"
)
"""Keys at the top that change no number, or ask for what forge does anyway."""
_OTHER_RECIPES = {
    "quantizer": "quantization-aware training to torchao's types; `qat` rounds to those of GGUF files here",
    "grpo_samples": "GRPO, whose rewards are written in Python there: `forge grpo`",
    "orchestration": "asynchronous GRPO, whose rewards are written in Python there: `forge grpo`",
    "ppo_epochs": "PPO: `forge ppo`",
    "tasks": "an evaluation: `forge eval`",
    "prompt": "a generation: `forge generate`",
}
"""Key → the recipe of torchtune that has it, of which none is made here."""


def torchtune(
    values: Mapping[str, Any], settings_of: Callable[[str], Fields], verb: str | None
) -> tuple[str, dict[str, object], list[str], dict[str, str]]:
    """Return the verb, its settings, `key: reason` of what is lost, and comments.

    Raises:
        RecipeError: the file is of a recipe that trains otherwise.
    """
    values = {key: _filled(value, values) for key, value in values.items()}
    for key, what in _OTHER_RECIPES.items() if verb is None else ():
        if values.get(key) is not None:
            raise RecipeError(f"{key}: this file is of {what}; with --verb the rest of it is read for another method.")
    parts: dict[str, Mapping[str, Any]] = {}
    for name in _SECTIONS:
        section = values.get(name)
        parts[name] = section if isinstance(section, Mapping) else {}
    loss = _component(parts["loss"])
    of_pairs = loss in _LOSSES_OF_PAIRS or _component(parts["dataset"]) in _PAIRS
    verb = verb or ("dpo" if of_pairs else "distill" if "teacher_model" in values else "sft")
    found: dict[str, object] = {}
    lost: list[str] = []
    comments: dict[str, str] = {}
    for key, setting in _PLAIN.items():
        found[setting] = values.get(key)
    found["model_path"] = parts["checkpointer"].get("checkpoint_dir")
    _adapter(parts["model"], found, lost)
    for key, setting in (("dataset", "data_path"), ("dataset_val", "eval_data_path")):
        _data(key, values.get(key), setting, found, lost)
    if parts["tokenizer"].get("max_seq_len"):
        found |= {"max_seq_len": parts["tokenizer"]["max_seq_len"], "on_overflow": "truncate"}
    _steps(values, found, lost)
    _optimizer(parts, values, found, lost, comments)
    _rest(parts, values, found, lost)
    _unread(parts, values, lost)
    if verb == "dpo":
        found |= {"beta": parts["loss"].get("beta"), "label_smoothing": parts["loss"].get("label_smoothing") or None}
    known = {*_PLAIN, *_SECTIONS, *_READ}
    lost += [
        f"{key}: {value!r}: forge has nothing of the kind"
        for key, value in values.items()
        if key not in known and value not in (None, False, [], {}) and not _NOTHING.fullmatch(key)
    ]
    return verb, checked(found, settings_of(verb), lost), lost, comments


_LOSSES_OF_PAIRS = ("DPOLoss", "RSOLoss", "SimPOLoss")
_PAIRS = ("preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset")
"""Builders whose rows have a chosen and a rejected answer."""
_READ_OF = {
    "tokenizer": "path max_seq_len merges_file vocab_path merges_path special_tokens_path",
    "checkpointer": "checkpoint_dir checkpoint_files output_dir model_type recipe_checkpoint keep_last_n_checkpoints",
    "model": """lora_rank lora_alpha lora_dropout lora_attn_modules apply_lora_to_mlp apply_lora_to_output quantize_base
        use_dora""",
    "optimizer": "lr betas eps weight_decay fused foreach",
    "lr_scheduler": "num_warmup_steps num_training_steps",
    "loss": "beta label_smoothing ignore_index num_output_chunks",
    "dataset": """source data_files split name subset train_on_input column_map new_system_prompt prompt_template packed
        split_across_pack conversation_style""",
}
"""Section → its keys that are read, or that change no number here."""
_AS_ANYWAY: dict[str, tuple[object, ...]] = {
    "conversation_column": ("conversations", "messages"),
    "column": ("text",),
    "num_cycles": (0.5,),
}
"""Key of a section → values that ask for what forge does anyway."""
_PARTS = "freeze_vision_tower, freeze_multi_modal_projector and freeze_language_model say which parts train"
_INSTEAD = {
    "prompt_template": "rows carry their prompt: make it with preprocess, or choose chat_template",
    "conversation_column": "name it in rename_columns: {THEIRS: messages}",
    "column": "name it in rename_columns: {THEIRS: text}",
    **dict.fromkeys(("encoder_trainable", "fusion_trainable", "decoder_trainable"), _PARTS),
    **dict.fromkeys(
        ("image_size", "max_num_tiles"), "the model's own processor is taken, whose files say how large images are"
    ),
    "filter_fn": "preprocess leaves out a row for which it returns None",
}
"""Key of a section → what there is instead."""


def _unread(parts: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any], lost: list[str]) -> None:
    """List what of the sections nothing here reads."""
    sections = [(name, parts[name]) for name in _READ_OF if name != "dataset"]
    for name, section in [*sections, *(("dataset", entry) for entry in _entries(values.get("dataset")))]:
        lost += [
            f"{name}.{key}: {value!r}: {_INSTEAD.get(key, 'forge has nothing of the kind')}"
            for key, value in section.items()
            if key not in ("_component_", *_READ_OF[name].split())
            and value not in (None, False, [], {}, *_AS_ANYWAY.get(key, ()))
        ]
        if name == "dataset" and section.get("data_files") is not None and section.get("split") not in (None, "train"):
            lost.append(f"dataset.split: {section['split']!r}: a file is read whole: shorten it, or set max_samples")
    if (loss := _component(parts["loss"])) in _LOSSES_OF_PAIRS[1:]:
        lost.append(f"loss: {loss}: choose loss_type, or forge simpo")
    if values.get("dtype") not in (None, "bf16", "fp32"):
        lost.append(f"dtype: {values['dtype']!r}: choose dtype, bfloat16 or float32")


_READ = """batch_size gradient_accumulation_steps max_steps_per_epoch clip_grad_norm compile dtype tensor_parallel_plan
    data_parallel_shard_dim data_parallel_replicate_dim ref_checkpointer teacher_model teacher_checkpointer""".split()


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Put the values in that `${key}` and `${section.key}` name."""
    if isinstance(value, Mapping):
        return {str(key): _filled(each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    for _ in range(8) if isinstance(value, str) else ():
        named = re.search(r"\$\{([\w.]+)\}", value)
        if named is None:
            break
        inner: Any = values
        for name in named[1].split("."):
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if inner is None or isinstance(inner, (Mapping, list)):
            break
        value = inner if value == named[0] and not isinstance(inner, str) else value.replace(named[0], str(inner))
        if not isinstance(value, str):
            break
    return plain(value)


def _component(section: Mapping[str, Any]) -> str:
    """Return the last part of a component's name."""
    return str(section.get("_component_", "")).rpartition(".")[2]


def _adapter(model: Mapping[str, Any], found: dict[str, object], lost: list[str]) -> None:
    """Read the adapter from the builder's name, and the layers that have one."""
    builder = _component(model)
    if "lora" not in builder:
        return
    found["adapter"] = "qlora" if "qlora" in builder or model.get("quantize_base") else "lora"
    if model.get("use_dora"):
        found["adapter"] = "dora"
    found |= {
        "lora_r": model.get("lora_rank"),
        "lora_alpha": model.get("lora_alpha"),
        "lora_dropout": model.get("lora_dropout"),
    }
    given = model.get("lora_attn_modules")
    layers = ["o_proj" if name == "output_proj" else str(name) for name in given] if isinstance(given, list) else []
    if model.get("apply_lora_to_mlp"):
        layers += ["gate_proj", "up_proj", "down_proj"]
    found["target_modules"] = layers or None
    if model.get("apply_lora_to_output"):
        lost.append("model.apply_lora_to_output: True: the head is named in target_modules (lm_head), where it is not tied")


_OF_AN_ENTRY = {
    "prompt_template": "rows carry their prompt: make it with preprocess",
    **dict.fromkeys(("conversation_column", "column"), "name the column in rename_columns, with messages or text"),
    "masking_strategy": "choose train_on",
    "image_dir": "paths of images begin in the folder of their file",
    "filter_fn": "preprocess can leave rows out",
}
"""Key of a data set → what there is instead."""
_READ_OF_AN_ENTRY = """_component_ source data_files split name subset train_on_input column_map packed split_across_pack
    conversation_style new_system_prompt""".split()
_AS_ANYWAY = {"conversation_column": ("messages", "conversations"), "column": ("text",)}
"""Key of a data set → values that ask for what is read here anyway."""


def _data(key: str, given: Any, setting: str, found: dict[str, object], lost: list[str]) -> None:
    """Read data sets: where they lie, names of columns, and what is learned of their rows."""
    paths, renamed = list[str](), dict[str, str]()
    for entry in given if isinstance(given, list) else [given] if given else []:
        own = dict(entry) if isinstance(entry, Mapping) else {"source": entry}
        builder = _component(own)
        source, files, split = (own.get(name) for name in ("source", "data_files", "split"))
        source = source or _SOURCES.get(builder)
        if files is not None:
            paths += [str(file) for file in (files if isinstance(files, list) else [files])]
            if split not in (None, "train"):
                lost.append(f"{key}.split: {split!r}: is of a data set of the hub; of a file max_samples takes the first rows")
        elif source is None:
            lost.append(f"{key}: {builder}: give its rows in {setting}")
        else:
            part = own.get("name") or own.get("subset")
            paths.append(":".join([str(source), *([str(part)] if part else []), str(split or "train")]))
        lost += [
            f"{key}.{name}: {value!r}: {_OF_AN_ENTRY.get(name, 'forge has nothing of the kind')}"
            for name, value in own.items()
            if name not in _READ_OF_AN_ENTRY and value not in (None, False, [], {}, *_AS_ANYWAY.get(name, ()))
        ]
        if system := own.get("new_system_prompt"):
            one = found.setdefault("system_prompt", system) == system
            why = "it replaces the rows' own system messages there, which stay here: take them out with preprocess"
            if not one or key != "dataset_val":
                lost.append(f"{key}.new_system_prompt: {system!r}: {why if one else 'one system_prompt is that of all rows'}")
        if key == "dataset_val":
            continue
        if own.get("train_on_input", builder in _LEARN_PROMPTS):
            found["train_on"] = "all"
        if isinstance(own.get("column_map"), Mapping):
            renamed |= {str(theirs): str(ours) for ours, theirs in own["column_map"].items() if theirs != ours}
        if builder.startswith(("alpaca", "grammar", "samsum")):
            lost.append(f"{key}: {builder}: writes its rows in a prompt of its own; here they are learned in the chat template")
    if renamed:
        found["rename_columns"] = renamed
    found[setting] = paths[0] if len(paths) == 1 else paths or None


def _steps(values: Mapping[str, Any], found: dict[str, object], lost: list[str]) -> None:
    """Read the batch and the number of steps."""
    size, times = values.get("batch_size") or 1, values.get("gradient_accumulation_steps") or 1
    most, epochs = values.get("max_steps_per_epoch"), values.get("epochs") or 1
    if all(isinstance(each, int) for each in (size, times)):
        found["effective_batch_size"] = size * times
        lost.append(
            f"effective_batch_size: {size * times} is that of one GPU: multiply it by the number of GPUs that it was trained on"
        )
    else:
        lost.append(f"batch_size: {size!r} times gradient_accumulation_steps: {times!r}: give it as effective_batch_size")
    if isinstance(most, int) and isinstance(epochs, int):
        found["max_steps"], found["num_epochs"] = most * epochs, None
        lost.append(
            f"max_steps_per_epoch: {most}: times epochs: {epochs} is max_steps, in which each row is taken before any again"
        )


def _optimizer(
    parts: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Any],
    found: dict[str, object],
    lost: list[str],
    comments: dict[str, str],
) -> None:
    """Read optimizer and schedule; what is left out is torch's default, or a constant rate."""
    own, schedule = parts["optimizer"], parts["lr_scheduler"]
    name = _component(own)
    if name and name not in _OPTIMIZERS:
        lost.append(f"optimizer: {name}: choose optimizer")
    found["optimizer"] = _OPTIMIZERS.get(name)
    betas = own.get("betas")
    betas = betas if isinstance(betas, list) and len(betas) == 2 else [None, 0.999]
    found |= {"learning_rate": own.get("lr"), "beta1": betas[0], "beta2": betas[1], "eps": own.get("eps")}
    found["weight_decay"] = own.get("weight_decay", 0.0 if name == "Adam" else 0.01)
    found["max_grad_norm"] = values.get("clip_grad_norm") or 0.0
    kind = _component(schedule)
    found["lr_scheduler"] = "cosine" if "cosine" in kind else "constant"
    if schedule and "cosine" not in kind:
        lost.append(f"lr_scheduler: {kind}: choose lr_scheduler")
    found["warmup_steps"] = schedule.get("num_warmup_steps")
    comments |= {} if "betas" in own else {"beta2": "torch's default"}
    comments |= {} if values.get("clip_grad_norm") else {"max_grad_norm": "no clipping, torchtune's default"}
    comments |= {} if "weight_decay" in own else {"weight_decay": "torch's default"}
    comments |= {} if schedule else {"lr_scheduler": "torchtune's without a schedule"}


def _rest(parts: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any], found: dict[str, object], lost: list[str]) -> None:
    """Read number format, compilation, ranks and trackers."""
    found["dtype"] = {"bf16": "bfloat16", "fp32": "float32"}.get(str(values.get("dtype")))
    if values.get("dtype") == "bf16" and "adapter" not in found:
        lost.append("dtype: bf16: the weights are bfloat16 there too; here they are float32, and products bfloat16")
    if values.get("compile") is True:
        found["compile"] = "blocks"
    shards, copies = values.get("data_parallel_shard_dim"), values.get("data_parallel_replicate_dim")
    if isinstance(copies, int) and copies > 1:
        found |= {"strategy": "hsdp", "shard_size": shards} if isinstance(shards, int) and shards > 1 else {"strategy": "ddp"}
    logger = parts["metric_logger"]
    tracker = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(_component(logger))
    found["trackers"] = [tracker] if tracker else None
    found["wandb_project"] = logger.get("project") if tracker == "wandb" else None
    teacher = values.get("teacher_checkpointer")
    reference = values.get("ref_checkpointer")
    found["reference_path"] = reference.get("checkpoint_dir") if isinstance(reference, Mapping) else None
    found["teacher_path"] = teacher.get("checkpoint_dir") if isinstance(teacher, Mapping) else None
    packed = [entry for entry in _entries(values.get("dataset")) if entry.get("packed")]
    if packed:
        lost.append(
            "dataset.packed: True: rows are packed here too; but a batch counts packed rows there, and samples in "
            "effective_batch_size: multiply it by the samples that fill such a row"
        )


def _entries(given: Any) -> list[Mapping[str, Any]]:
    """Return the data sets of a section, one or several."""
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, Mapping)]
