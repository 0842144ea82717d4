"""A flat mapping of another library's settings → a recipe, key by key."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import attrs
import yaml

from forge._errors import RecipeError, SettingsError
from forge.settings._converted import converted
from forge.settings._elsewhere import ALSO, CHOICES, NOT_NEEDED, RENAMED, SO_ANYWAY, SWITCHES, TOLD, hint
from forge.settings._yaml_fault import fault_of
from forge.settings.convert._adapter import adapter
from forge.settings.convert._commands import CALLED, VERL, command_values, nested
from forge.settings.convert._data import data, rows
from forge.settings.convert._defaults import add_defaults
from forge.settings.convert._distillation import NEMO, distillation, nemo_rl
from forge.settings.convert._draft import BESIDE, Draft, plain
from forge.settings.convert._objective import METHOD_KEYS, methods, online, preferences, verb_of
from forge.settings.convert._openrlhf import openrlhf
from forge.settings.convert._run import batch, dtype, length, optimizer, schedule
from forge.settings.convert._sharding import strategy
from forge.settings.convert._swift import MARKS, swift_draft
from forge.settings.convert._swift_arguments import DEFAULTS
from forge.settings.convert._torchtune import torchtune
from forge.settings.convert._verl import verl

LIBRARIES = {
    "Axolotl": "base_model datasets sequence_len micro_batch_size val_set_size sample_packing pretraining_dataset rl".split(),
    "LLaMA-Factory": "stage finetuning_type cutoff_len dataset template lora_rank lora_target do_train val_size".split(),
    "torchtune": "checkpointer metric_logger epochs max_steps_per_epoch clip_grad_norm enable_activation_checkpointing".split(),
    "TRL": "model_name_or_path dataset_name max_length use_peft num_train_epochs lora_target_modules dataset_num_proc".split(),
}
"""Library → keys that tell its files from the others'."""
SWIFT = "ms-swift"
_DOTTED = {"torchtune": torchtune, "verl": verl, "OpenRLHF": openrlhf, "NeMo-RL": nemo_rl}
"""Library whose settings stand in sections → its converter."""

_NO_LIMIT = ("max_length", "cutoff_len")
"""Keys under which null is a value: none."""
_NOTHING = (None, False, "", [], {})
"""Values under which a key has no effect in any of the libraries."""
_BESIDE = re.compile(
    r"(wandb|mlflow|comet|swanlab|trackio|clearml|hub|log|logging|profiler?)_.*|use_(wandb|mlflow|comet|tensorboard|swanlab|ray)"
    r"|push_to_hub|run_name|debug|local_rank|save_(strategy|steps|only_model|first_step|on_each_node)|saves_per_epoch"
    r"|overwrite_output_dir|data_output_dir|dataset_prepared_path|cache_dir|(per_device_)?eval_batch_size|trust_remote_code"
    r"|liger_.*|cut_cross_entropy|use_kernels|(fused|flex|flash)_attn_.*|torch_compile_.*|ddp_.*|otel_.*|use_otel_metrics|ray_.*"
    r"|fsdp_config\.(fsdp_)?(use_orig_params|cpu_ram_efficient_loading)|accelerator_config|low_cpu_mem_usage|device_map"
    r"|sample_packing_(bin|group)_size|multipack_real_batches|pretrain_multipack_attn|streaming|streaming_.*|auto_find_batch_size"
    r"|dataset_keep_in_memory|gc_steps|lora_on_cpu|include_tokens_per_second|experts_implementation|hf_use_auth_token"
    r"|resize_token_embeddings_to_32x|tokenizer_use_fast|use_(scattermoe|sonicmoe|dsv4_kernels|glm_dsa_kernels)"
    r"|use_v1_kernels|(gemma4_hybrid_attn_impl|experimental_skip_move_to_device|llama4_linearized_experts|tiled_mlp.*)"
    r"|(fsdp_config\.)?fsdp_transformer_layer_cls_to_wrap|flash_optimum|eval_table_size|eval_causal_lm_metrics|do_causal_lm_eval"
    r"|num_completions_to_print|badam_verbose|use_distributed_optimizer|(bias_activation|apply_rope)_fusion"
    r"|overlap_(param_gather|grad_reduce)|moe_(grouped_gemm|token_dispatcher_type)|recompute_(granularity|method|num_layers)"
    r"|eot_tokens|base_model_ignore_patterns|skip_prepare_dataset"
    r"|load_from_cache_file|lazy_tokenize|dataset_num_proc|dataloader_.*|experts_impl|vit_gradient_checkpointing|tuner_backend"
    r"|vllm_(mode|server_(host|port|timeout|group_port|base_url|pass_dataset)|gpu_memory_utilization|max_.*|tensor_parallel_size"
    r"|pipeline_parallel_size|data_parallel_size|enable_.*|use_async_engine|engine_kwargs|limit_mm_per_prompt|enforce_eager)"
    r"|sleep_level|offload_(optimizer|model|teacher_model)|move_model_batches|teacher_deepspeed|bnb_4bit_quant_storage|device_groups"
    r"|acc_strategy|eval_(limit|use_evalscope|dataset_args|generation_config)|create_checkpoint_symlink|check_model|add_version|safe_serialization|max_shard_size|packing_num_proc|strict|swanlab_.*"
)
"""Keys of trackers, logs, uploads, saving, caches, kernels and sharding: whatever they say, the same is trained."""
_ARGUMENTS = ("lr_scheduler_kwargs", "lr_scheduler_args", "optim_args", "fsdp_config")
"""Keys that hold names and values, numbers among them."""
_NAMES = ("dataset_dir", "dataset_config", "dataset_train_split", "dataset_test_split", "template")
"""Keys of texts, beside those of settings that are texts here."""
_HERE_ANYWAY = ("disable_gradient_checkpointing",)
"""Keys that ask, when true, for what forge does by default; when false, for less memory."""
_SINGLE = (
    "adapter",
    "finetuning_type",
    "lora_rank",
    "num_train_epochs",
    "num_epochs",
    *METHOD_KEYS,
)
"""Keys that are read here, and hold a single value in every library; so do those of `CHOICES`."""


class Converted(NamedTuple):
    """A recipe made of another library's configuration."""

    library: str
    verb: str
    settings: dict[str, object]
    lost: list[str]
    """`key: reason` of each key that was not carried over."""
    comments: dict[str, str]
    """Setting → why it has its value though the file does not give it: a default of its library."""

    @property
    def groups(self) -> dict[str, list[str]]:
        """What was not carried over, by whether it can change what is trained."""
        beside = [line for line in self.lost if line.endswith(BESIDE) or _BESIDE.fullmatch(line.partition(":")[0])]
        rest = [line for line in self.lost if line not in beside]
        named = {"to be looked at": rest, "without effect on what is trained": beside}
        return {f"not carried over, {what}": lines for what, lines in named.items() if lines}


def read_foreign(text: str, name: str) -> dict[str, Any]:
    """Read a configuration or a script's command as a flat mapping. Raises RecipeError."""
    if _is_script(text, name):
        called = command_values(text, name)
        if called is not None:
            return called
    try:
        found = yaml.safe_load(text)
        json.dumps(found, default=str, skipkeys=True)  # ValueError where an anchor holds itself
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{fault_of(error, text, name)}.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise RecipeError(f"{name}: is no configuration: a mapping from names to values is wanted.")
    sections = {name for name, value in found.items() if isinstance(value, dict)}
    if sections >= {"policy", "teacher", "distillation"}:
        return nested(found)
    return {VERL: "ppo", **nested(found)} if "actor_rollout_ref" in found else found


def _is_script(text: str, name: str) -> bool:
    """Tell whether a file is a shell script, by its name, its first line or as it calls swift."""
    return name.endswith((".sh", ".bash")) or text.startswith("#!") or _SCRIPT.search(text) is not None


_SCRIPT = re.compile(r"^(?!\s*#).*(\bswift +(sft|pt|rlhf)\b|swift/cli/\w+\.py).*\\$", re.MULTILINE)


def library_of(values: Mapping[str, Any], name: str) -> str:
    """Return the library of which a configuration has most keys. Raises RecipeError."""
    if called := next((library for key, library in CALLED.items() if key in values), None):
        return called
    if all(name in values for name in NEMO):
        return "NeMo-RL"
    if values.keys() & {"dist_config", "peft_config", "kernel_config"} and "train_dataset" in values:
        raise RecipeError(
            f"{name}: is of LLaMA-Factory's second generation (v1), whose files are not converted; a file with "
            "model_name_or_path and stage is one of its first."
        )
    if any(isinstance(values.get(key), str) for key in ("model", "model_id_or_path")) and values.keys() & set(MARKS):
        return SWIFT
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        return "torchtune"  # which alone names classes so, also where its other keys are those of another
    marks = {library: sum(key in values for key in keys) for library, keys in LIBRARIES.items()}
    best = max(marks, key=lambda library: marks[library])
    if not marks[best]:
        raise RecipeError(
            f"{name}: has no key by which a file of {', '.join((*LIBRARIES, SWIFT))} is known (such as base_model, stage, "
            "model_name_or_path, tuner_type). A recipe of forge is checked by `forge config validate`."
        )
    return best


def convert(
    values: Mapping[str, Any],
    library: str,
    settings_of: Callable[[str], Mapping[str, attrs.Attribute[Any]]],
    verb: str | None = None,
) -> Converted:
    """Carry over what a configuration says, and defaults of its library that forge has not.

    Args:
        values: the configuration.
        library: whose it is.
        settings_of: verb → the fields of its settings by name.
        verb: the training verb; by default the one that the configuration asks for.

    Raises:
        RecipeError: the configuration does not say which verb it is for.

    """
    if library == SWIFT:
        draft = swift_draft(values, settings_of, verb)
        draft.left = _readable(draft.left, draft.lost)
        return _finished(draft)
    if library in _DOTTED:
        found_verb, settings, unread, comments = _DOTTED[library](values, settings_of, verb)
        return Converted(
            library, found_verb, settings, unread, {name: text for name, text in comments.items() if name in settings}
        )
    lost: list[str] = []
    left = _readable(_flat(values, library), lost)
    if verb is None:
        verb = verb_of(left, library)
        if (library, verb) == ("TRL", "grpo") and not {"loss_type", "scale_rewards", "importance_sampling_level"} & left.keys():
            lost.append("verb: read as a file for trl grpo; give --verb rloo for one of trl rloo")
    known = settings_of(verb)
    return _finished(Draft(library=library, verb=verb, known=known, left=left, lost=lost))


def _finished(draft: Draft) -> Converted:
    """Carry over what a draft has left, part by part, and the defaults of its library."""
    library, verb = draft.library, draft.verb
    draft.left = _with_numbers(draft.left, draft.known)
    given = {_setting(key, draft) for key, value in draft.left.items() if value is not None or key in _NO_LIMIT}
    parts = (methods, batch, length, schedule, optimizer, dtype, adapter, data, rows, preferences, distillation, online)
    for take in (*parts, strategy):
        take(draft)
    for key, value in draft.left.items():
        if (
            key in NOT_NEEDED
            or key in _HERE_ANYWAY
            or (key in SWITCHES and value is False)
            or (key in SO_ANYWAY and value == SO_ANYWAY[key])
        ):
            continue
        setting, ours = _setting(key, draft), SWITCHES[key].partition("=")[2] if key in SWITCHES and value is True else value
        if setting in draft.known and key not in TOLD:
            _carry(key, draft.known[setting], ours, draft)
        elif (key in SO_ANYWAY and value is not None) or not any(value is nothing or value == nothing for nothing in _NOTHING):
            draft.lost.append(f"{key}: {value!r}: {hint(key, draft.known) or _unknown(key, library)}")
    add_defaults(draft, given)
    found = {name: draft.found[name] for name in draft.known if draft.found.get(name) is not None}
    return Converted(library, verb, found, draft.lost, {name: text for name, text in draft.comments.items() if name in found})


def _unknown(key: str, library: str) -> str:
    """Say that a key is nothing here, with the key that it may be a misspelling of."""
    keys = [*LIBRARIES.get(library, DEFAULTS), *RENAMED, *SWITCHES, *TOLD, *NOT_NEEDED]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.85)
    return "forge has nothing of the kind" + (f"; did you mean `{near[0]}`?" if near and near[0] != key else "")


def _flat(values: Mapping[str, Any], library: str) -> dict[str, Any]:
    """Put the block `trl:` of Axolotl's files beside the other keys, which it must not hide."""
    own = values.get("trl")
    if library != "Axolotl" or not isinstance(own, Mapping):
        return dict(values)
    return {**{str(key): value for key, value in own.items()}, **{key: values[key] for key in values if key != "trl"}}


def _setting(key: str, draft: Draft) -> str:
    """Return the setting that a key is, or that it switches."""
    if key in SWITCHES:
        return SWITCHES[key].partition("=")[0]
    setting = RENAMED.get(key, key)
    also = ALSO.get(setting)
    if also in draft.known and setting not in draft.known:
        return also
    return "block_size" if setting == "max_seq_len" and draft.verb == "pretrain" else setting


def _readable(values: Mapping[str, Any], lost: list[str]) -> dict[str, Any]:
    """Drop numbers that are not finite, and lists where one value belongs; read 'true' as true."""
    found: dict[str, Any] = {}
    for key, given in values.items():
        value = plain(given) if isinstance(plain(given), bool) else given
        single = (key in _SINGLE or RENAMED.get(key, key) in CHOICES) and key != "pretraining_dataset"
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(f"{key}: {value!r}: is no finite number")
        elif single and isinstance(value, (list, dict)):
            lost += [f"{key}: {value!r}: a single value belongs here"] if value else []
        else:
            found[key] = value
    return found


def _with_numbers(values: Mapping[str, Any], known: Mapping[str, attrs.Attribute[Any]]) -> dict[str, Any]:
    """Read numbers that are written as texts: '8', and 1e-4, which YAML 1.1 takes for one."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        field = known.get(RENAMED.get(key, key))
        if isinstance(value, Mapping) and key in _ARGUMENTS:
            found[key] = {name: plain(each) for name, each in value.items()}
        else:
            found[key] = value if key in _NAMES or (field is not None and _is_text(field)) else plain(value)
    return found


def _is_text(field: attrs.Attribute[Any]) -> bool:
    """Whether a setting may be any text."""
    return str in (field.type, *get_args(field.type))


def _carry(key: str, field: attrs.Attribute[Any], value: Any, draft: Draft) -> None:
    """Carry one value over, in our words and type, or say why it cannot be."""
    setting = field.name
    if value is None:
        return
    if setting in draft.found:
        if draft.found[setting] not in (None, value):
            draft.lost.append(f"{key}: {value!r}: {setting} is {draft.found[setting]!r} already")
        return
    if setting in CHOICES:
        if isinstance(value, (list, dict)) or value not in CHOICES[setting]:
            draft.lost.append(f"{key}: {value!r}: {setting} has no such value")
            return
        value = CHOICES[setting][value]
        if value == "auto":
            return
    if setting == "activation_offloading" and value in ("legacy", "disk"):
        value = True
    if setting == "activation_checkpointing" and value in ("unsloth", "offload", "offload_disk"):
        # Unsloth's moves what is kept to the host too; only the memory that a run takes depends on it.
        draft.found["activation_offloading"], value = True, True
    try:
        draft.found[setting] = converted(field, value, "recipe")
    except SettingsError as error:
        draft.lost.append(f"{key}: {value!r}: {str(error).replace(' (recipe)', '')}")
