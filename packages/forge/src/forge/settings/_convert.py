"""YAML of Axolotl, LLaMA-Factory or TRL → a recipe, and what was not carried over.

Names of the same meaning come from the table in `_elsewhere`; here is what takes more than a name: which library a file is
for, its method, its batch size in two factors, its data sets, its data types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
import yaml

from forge._errors import RecipeError, SettingsError
from forge.settings._elsewhere import RENAMED, SWITCHES, TOLD, hint
from forge.settings._settings import converted

LIBRARIES = {
    "Axolotl": "base_model datasets sequence_len micro_batch_size val_set_size sample_packing pretraining_dataset rl".split(),
    "LLaMA-Factory": "stage finetuning_type cutoff_len dataset template lora_rank lora_target do_train val_size".split(),
    "TRL": "model_name_or_path dataset_name max_length use_peft num_train_epochs lora_target_modules dataset_num_proc".split(),
}
"""Library → keys that tell its files from the others'."""

_METHODS = {
    **{name: name for name in ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "ppo", "rloo", "reward")},
    "pt": "pretrain",
    "rm": "reward",
    "ipo": "dpo",
}
_METHOD_KEYS = ("rl", "stage", "pref_loss", "reward_model", "pretraining_dataset")
_BATCH = ("per_device_train_batch_size", "micro_batch_size")
_CHOICES = {
    "optimizer": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        **dict.fromkeys(("schedule_free_adamw", "schedule_free"), "schedule_free"),
        "adafactor": "adafactor",
        "muon": "muon",
    },
    "lr_scheduler": {
        **{name: name for name in ("cosine", "linear", "constant", "cosine_with_min_lr", "cosine_with_restarts", "polynomial")},
        "constant_with_warmup": "constant",
        "inverse_sqrt": "inverse_sqrt",
        "warmup_stable_decay": "warmup_stable_decay",
    },
    "attention": {"sdpa": "sdpa", "eager": "eager"},
    "resume": {True: "auto", "auto": "auto"},
    "data_format": {
        "chat_template": "messages",
        "alpaca": "alpaca",
        "sharegpt": "sharegpt",
        "completion": "text",
        "input_output": "auto",
        "chat_template.default": "auto",
    },
}
"""Setting → their values and ours, where both have other words."""

_NOTHING = (None, False, "", [], {})
"""Values under which a key has no effect in any of the libraries."""
_SINGLE = ("adapter", "finetuning_type", "lora_rank", "num_train_epochs", "num_epochs", *_METHOD_KEYS)
"""Keys that are read here, and hold a single value in every library; so do those of `_CHOICES`."""


class Converted(NamedTuple):
    """A recipe made of another library's configuration."""

    library: str
    verb: str
    settings: dict[str, object]
    lost: list[str]
    """`key: reason` of each key that was not carried over."""


def read_foreign(text: str, name: str) -> dict[str, Any]:
    """Read a configuration as a flat mapping. Raises RecipeError where it is none."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{name}: cannot be read as YAML: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise RecipeError(f"{name}: is no configuration: a mapping from names to values is wanted.")
    return found


def library_of(values: Mapping[str, Any], name: str) -> str:
    """Return the library of which a configuration has most keys. Raises RecipeError."""
    marks = {library: sum(key in values for key in keys) for library, keys in LIBRARIES.items()}
    best = max(marks, key=lambda library: marks[library])
    if not marks[best]:
        raise RecipeError(
            f"{name}: has no key by which a file of {', '.join(LIBRARIES)} is known (such as base_model, stage, "
            "model_name_or_path). A recipe of forge is checked by `forge config validate`."
        )
    return best


def convert(
    values: Mapping[str, Any],
    library: str,
    settings_of: Callable[[str], Mapping[str, attrs.Attribute[Any]]],
    verb: str | None = None,
) -> Converted:
    """Carry over what a configuration says, key by key.

    Args:
        values: the configuration.
        library: whose it is.
        settings_of: verb → the fields of its settings by name.
        verb: the training verb; by default the one that the configuration asks for.

    """
    lost: list[str] = []
    left = _readable(values, lost)
    verb = verb or _verb(left)
    known = settings_of(verb)
    found: dict[str, object] = {}
    for take in (_batch, _dtype, _adapter, _data, _strategy, _length_of_run):
        found |= take(left, library, lost)
    for key in _METHOD_KEYS:
        if key in left and isinstance(left[key], (str, bool)) and (left[key] in _METHODS or isinstance(left[key], bool)):
            if verb == "dpo" and (key == "pref_loss" or left[key] == "ipo"):
                found["loss_type"] = (str(left[key]),)
            del left[key]
    for key, value in left.items():
        setting, given = RENAMED.get(key, key), value
        if key in SWITCHES and value is True:
            setting, _, given = SWITCHES[key].partition("=")
        if setting in known and key not in TOLD:
            _carry(key, known[setting], given, found, lost)
        elif not any(value is nothing or value == nothing for nothing in _NOTHING):
            lost.append(f"{key}: {value!r}: {hint(key, known) or 'forge has nothing of the kind'}")
    return Converted(library, verb, {name: found[name] for name in known if name in found}, lost)


def _readable(values: Mapping[str, Any], lost: list[str]) -> dict[str, Any]:
    """Drop numbers that are not finite, and lists where one value belongs."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        single = (key in _SINGLE or RENAMED.get(key, key) in _CHOICES) and key != "pretraining_dataset"
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(f"{key}: {value!r}: is no finite number")
        elif single and isinstance(value, (list, dict)) and value:
            lost.append(f"{key}: {value!r}: a single value belongs here")
        else:
            found[key] = value
    return found


def _carry(key: str, field: attrs.Attribute[Any], value: Any, found: dict[str, object], lost: list[str]) -> None:
    """Carry one value over, in our words and type, or say why it cannot be."""
    setting = field.name
    if value is None or setting in found:
        return
    if setting in _CHOICES:
        if value not in _CHOICES[setting]:
            lost.append(f"{key}: {value!r}: {setting} has no such value")
            return
        value = _CHOICES[setting][value]
        if value == "auto":
            return
    if field.type is bool and value == "unsloth":
        value = True
    try:
        found[setting] = converted(field, value, "recipe")
    except SettingsError as error:
        lost.append(f"{key}: {value!r}: {str(error).replace(' (recipe)', '')}")


def _verb(left: Mapping[str, Any]) -> str:
    """Return the training verb that a configuration asks for."""
    if left.get("reward_model") is True:
        return "reward"
    if left.get("pretraining_dataset"):
        return "pretrain"
    loss = left.get("pref_loss")
    for method in (loss if loss in ("orpo", "simpo") else None, left.get("rl"), left.get("stage")):
        if method in _METHODS:
            return _METHODS[str(method)]
    if any(key in left for key in ("reward_funcs", "num_generations")):
        return "grpo"
    if any(key in left for key in ("precompute_ref_log_probs", "ref_model", "f_divergence_type")):
        return "dpo"
    return "kto" if "desirable_weight" in left else "sft"


def _batch(left: dict[str, Any], _library: str, lost: list[str]) -> dict[str, object]:
    """Multiply the batch of one GPU by the steps that gradients are summed over."""
    factors = [left.pop(key) for key in (*_BATCH, "gradient_accumulation_steps") if key in left]
    if not factors or not all(isinstance(factor, int) for factor in factors):
        return {}
    size = 1
    for factor in factors:
        size *= factor
    lost.append(f"effective_batch_size: {size} is that of one GPU: multiply it by the number of GPUs that it was trained on")
    return {"effective_batch_size": size}


def _dtype(left: dict[str, Any], _library: str, lost: list[str]) -> dict[str, object]:
    """Read the number format from switches; `auto` and what is off are left open."""
    flags = {key: left.pop(key) for key in ("bf16", "fp16", "pure_bf16", "tf32", "fp8", "torch_dtype", "dtype") if key in left}
    on = {key for key, value in flags.items() if value is True} | {str(value) for value in flags.values()}
    if on & {"bf16", "pure_bf16", "bfloat16"}:
        return {"dtype": "bfloat16"}
    lost += [f"{key}: true: dtype is float32 or bfloat16" for key in ("fp16", "fp8") if key in on]
    return {"dtype": "float32"} if "float32" in on else {}


def _adapter(left: dict[str, Any], library: str, lost: list[str]) -> dict[str, object]:
    """Read which weights are trained; LLaMA-Factory trains LoRA unless it is told otherwise."""
    four = left.pop("load_in_4bit", False) is True
    if left.get("quantization_bit") == 4:
        four = bool(left.pop("quantization_bit"))
    kind = left.pop("adapter", None) or left.pop("finetuning_type", "lora" if library == "LLaMA-Factory" else None)
    if left.pop("use_peft", False) is True:
        kind = "lora"
    kind = {"full": "none", None: "none"}.get(kind, kind)
    for key in ("use_dora", "peft_use_dora", "use_rslora", "peft_use_rslora"):
        if left.pop(key, False) is True:
            kind = "dora" if "dora" in key else "rslora"
    if four and kind in ("lora", "qlora"):
        kind = "qlora"
    elif four:
        lost.append(f"load_in_4bit: true: a base in 4 bits is adapter=qlora, and this trains {kind}")
    if kind == "none":
        for key in [key for key in left if key.startswith("lora_") or key == "peft_layers_to_transform"]:
            del left[key]
    if left.get("lora_target") == "all" or left.get("lora_target_modules") in ("all-linear", ["all-linear"]):
        left.pop("lora_target", None)
        left.pop("lora_target_modules", None)
    if isinstance(left.get("lora_target"), str):
        left["lora_target"] = [name.strip() for name in left["lora_target"].split(",")]
    left.pop("lora_target_linear", None)
    if kind not in ("none", "lora", "qlora", "dora", "rslora"):
        lost.append(f"{kind}: forge has no such way of training: choose adapter")
        kind = "none"
    found: dict[str, object] = {} if kind == "none" else {"adapter": kind}
    if found and library == "LLaMA-Factory" and "lora_alpha" not in left:
        rank = left["lora_rank"] = 8 if left.get("lora_rank") is None else left["lora_rank"]
        if isinstance(rank, int):
            found["lora_alpha"] = 2 * rank
    return found


def _data(left: dict[str, Any], library: str, lost: list[str]) -> dict[str, object]:
    """Read the paths of data sets, and what becomes of long rows."""
    found: dict[str, object] = {}
    for key, setting in (("datasets", "data_path"), ("pretraining_dataset", "data_path"), ("test_datasets", "eval_data_path")):
        given = left.pop(key, None)
        if not given:
            continue
        paths: list[str] = []
        for each in given if isinstance(given, list) else [given]:
            paths += _paths(each, key, found, lost)
        found[setting] = paths[0] if len(paths) == 1 else paths
    for key, setting in (("dataset", "data_path"), ("eval_dataset", "eval_data_path")):
        if isinstance(left.get(key), str):
            names = [name.strip() for name in left.pop(key).split(",")]
            found[setting] = names[0] if len(names) == 1 else names
            if library == "LLaMA-Factory":
                lost.append(f"{key}: {', '.join(names)}: names of dataset_info.json; give the files that they stand for")
    if library == "TRL" and "dataset_name" in left:
        found["data_path"] = f"{left.pop('dataset_name')}:{left.pop('dataset_train_split', 'train')}"
    share = left.get("val_set_size", left.get("val_size"))
    if isinstance(share, (int, float)) and not 0 < share < 1:
        left.pop("val_set_size", None)
        left.pop("val_size", None)
        if share:
            lost.append(f"val_size: {share}: validation_split is a share of the rows, below 1")
    if library != "Axolotl" and {"max_length", "cutoff_len"} & left.keys():
        found["on_overflow"] = "truncate"  # they cut long rows, as Axolotl does not
    return found


def _paths(each: Any, key: str, found: dict[str, object], lost: list[str]) -> list[str]:
    """Return the paths of one entry of `datasets`."""
    if not isinstance(each, Mapping):
        return [str(each)]
    own = dict(each)
    path, split, files = own.pop("path", None), own.pop("split", None), own.pop("data_files", None)
    kind = own.pop("type", None)
    own.pop("ds_type", None)
    if kind is not None and key == "datasets":
        ours = _CHOICES["data_format"].get(str(kind))
        if ours is None:
            here = "the format is recognised from the rows; or choose data_format"
            if isinstance(kind, Mapping):
                here += "; columns of other names are read with rename_columns ({question: prompt, answer: completion})"
            lost.append(f"{key}[].type: {kind!r}: {here}")
        elif ours != "auto" and found.get("data_format", ours) == ours:
            found["data_format"] = ours
    lost += [f"{key}[].{name}: {value!r}: rename columns with rename_columns" for name, value in own.items()]
    if files is not None:
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    if path is None:
        lost.append(f"{key}[]: has no path")
        return []
    is_file = re.search(r"\.(jsonl?|parquet|csv|arrow)(\.\w+)?$", str(path))
    return [str(path) if is_file else f"{path}:{split or 'train'}"]


def _strategy(left: dict[str, Any], _library: str, lost: list[str]) -> dict[str, object]:
    """Read the sharding: any FSDP is fsdp2, and DeepSpeed's stage stands in its file's name."""
    fsdp = [left.pop(key, None) for key in ("fsdp", "fsdp_config", "fsdp_version")]
    deepspeed = left.pop("deepspeed", None)
    if deepspeed:
        stage = re.search(r"z(?:ero)?[-_]?(?:stage)?[-_]?([123])", str(deepspeed).lower())
        if stage:
            return {"strategy": f"zero{stage[1]}"}
        lost.append(f"deepspeed: {deepspeed!r}: choose strategy=zero1, zero2 or zero3")
    return {"strategy": "fsdp2"} if any(fsdp) else {}


def _length_of_run(left: dict[str, Any], _library: str, lost: list[str]) -> dict[str, object]:
    """Read epochs and steps: whole epochs, and no steps where there they are -1."""
    if isinstance(left.get("max_steps"), int) and left["max_steps"] <= 0:
        del left["max_steps"]
    if left.get("report_to") in ("none", "all", ["none"], ["all"]):
        del left["report_to"]  # no tracker, or whichever is installed
    for key in ("num_train_epochs", "num_epochs"):
        epochs = left.get(key)
        if isinstance(epochs, float):
            left[key] = max(1, round(epochs))
            if left[key] != epochs:
                lost.append(f"{key}: {epochs}: epochs are whole here; {left[key]} was taken")
    return {}
