"""Accelerate's configuration, from its file or from `accelerate launch` → settings.

The file is what `accelerate config` writes. `accelerate launch` passes the same answers on in the environment of the processes
that it starts. Each key has an effect, asks for what is always so, or is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from forge._errors import RecipeError, SettingsError
from forge.settings._yaml_fault import fault_of, read_text

Settings = dict[str, object]
_SECTIONS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
"""distributed_type → the section that belongs to it; NO and MULTI_... have none."""

_REFUSED = {
    "debug": "forge always checks that its ranks agree",
    "gpu_ids": "choose devices by the variable of their driver that hides the others",
    "enable_cpu_affinity": "bind processes with numactl or taskset",
    "downcast_bf16": "TPUs are not available",
    "fp8_config": "there is no training in 8 bits",
    "dynamo_config": "give compile=blocks",
    "megatron_lm_config": "Megatron-LM is not available",
    "mpirun_config": "it is read by accelerate launch alone: start the run with that",
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), "TPUs are not available"),
    **dict.fromkeys(("command_file", "commands"), "TPUs are not available"),
    "fsdp_transformer_layer_cls_to_wrap": "every layer of the decoder is divided by itself, whatever its class",
    "fsdp_transformer_cls_to_wrap": "every layer of the decoder is divided by itself, whatever its class",
    "fsdp_ignored_modules": "all weights are divided",
    **dict.fromkeys(
        ("fsdp_xla", "fsdp_xla_fsdp_v2", "fsdp_xla_fsdp_settings", "fsdp_xla_fsdp_grad_ckpt"), "TPUs are not available"
    ),
    "fsdp_activation_checkpointing_offload": "give activation_offloading=true beside activation_checkpointing=full",
    "deepspeed_config_file": "give zero_stage, offloading and gradient_clipping by themselves",
    "deepspeed_moe_layer_cls_names": "experts are found in the model",
    **dict.fromkeys(
        ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
        "start forge on each node with nnodes and node_rank, or by torchrun",
    ),
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"), "nothing is offloaded to disk"),
}
"""Key that has no effect → why; its empty values pass."""

_ALWAYS = {
    "compute_environment": ("LOCAL_MACHINE",),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True, False),
    "fsdp_version": (1, 2),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_backward_prefetch": ("BACKWARD_PRE",),
    "fsdp_forward_prefetch": (True, False),  # fully_shard gathers the next layer by itself
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp_use_orig_params": (True,),
    "fsdp_cpu_ram_efficient_loading": (True,),
    "fsdp_sync_module_states": (True,),
    "fsdp_limit_all_gathers": (True,),
    "deepspeed_multinode_launcher": ("standard",),
    "zero3_init_flag": (True, False),
    "zero3_save_16bit_model": (True, False),
    "gradient_accumulation_steps": (1, "auto"),
}
"""Key → values that are always so here: any other is refused."""

_NOTHING = (None, False, "", "no", "none", "all", "NO", {}, [])


def with_accelerate(path: object, *given: tuple[str, Mapping[str, object]]) -> list[tuple[str, Mapping[str, object]]]:
    """Put the environment of `accelerate launch`, then its file, below layers of settings.

    Args:
        path: the file that `accelerate config` wrote; None reads the environment alone.
        given: recipe and arguments, as `resolve` takes them; they outrank both.

    Raises:
        RecipeError: the file cannot be read, or is no configuration of Accelerate.
        SettingsError: a key asks for what forge does not have.

    """
    decided = {name for _, values in given for name, value in values.items() if value is not None}
    layers: list[tuple[str, Mapping[str, object]]] = []
    said = from_environment(os.environ)
    if said:
        layers.append(("environment: accelerate launch", translated(said, "accelerate launch", decided)))
    if path is not None:
        if not isinstance(path, str | Path):
            raise SettingsError(f"accelerate_config must be the path of a file, not {path!r}.")
        found = translated(read_file(path), str(path), decided)
        if os.environ.get("RANK", "").strip():
            # Ranks are there already: only their number can still be compared.
            found = {name: value for name, value in found.items() if name not in _MEETING}
        layers.append((f"accelerate {path}", found))
    return [*layers, *given]


_MEETING = ("node_rank", "master_addr", "master_port")


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a file of `accelerate config`. Raises RecipeError where it is none."""
    text = ""
    try:
        text = read_text(Path(path).expanduser())
        found = yaml.safe_load(text)
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())
        raise RecipeError(
            f"accelerate_config {path}: cannot be read: {why}. `accelerate config` writes such a file."
        ) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = fault_of(error, text, path) if text else error
        raise RecipeError(f"accelerate_config {why}. `accelerate config` writes such a file.") from error
    if not isinstance(found, dict) or "distributed_type" not in found:
        raise RecipeError(
            f"accelerate_config {path}: is no configuration of Accelerate: it has no distributed_type. `accelerate config` "
            "writes such a file."
        )
    return {str(key): value for key, value in found.items()}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read what `accelerate launch` passes on, under the keys of its file.

    Empty where it did not start this process. Transformers sets some of these variables too: the launcher is
    known by what it alone sets.
    """
    if not any(name in environ for name in ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "ACCELERATE_CONFIG_DS_FIELDS")):
        return {}
    said = {key: yaml.safe_load(environ[name]) for name, key in _VARIABLES.items() if environ.get(name)}
    if said.get("mixed_precision") in ("no", False):
        del said["mixed_precision"]  # also where nobody chose it
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend.upper() != "NO":
        said["dynamo_config"] = {"dynamo_backend": backend}
    for flag, kind, section, prefix in _PLUGINS:
        if environ.get(flag, "").lower() != "true":
            continue
        said["distributed_type"] = kind
        names = _DEEPSPEED if kind == "DEEPSPEED" else {name: name.lower() for name in environ if name.startswith(prefix)}
        said[section] = {key: yaml.safe_load(environ[name]) for name, key in names.items() if environ.get(name)}
    if environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        prefix = "PARALLELISM_CONFIG_"
        said["parallelism_config"] = {
            name.lower(): yaml.safe_load(value) for name, value in environ.items() if name.startswith(prefix)
        }
    return said


_VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DEBUG_MODE": "debug",
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
}
_PLUGINS = (
    ("ACCELERATE_USE_FSDP", "FSDP", "fsdp_config", "FSDP_"),
    ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED", "deepspeed_config", "ACCELERATE_DEEPSPEED_"),
    ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM", "megatron_lm_config", "MEGATRON_LM_"),
)
"""Variable of a plug-in, its distributed_type, its section in the file, and how its variables begin."""

_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}


def translated(config: Mapping[str, Any], where: str, decided: Collection[str] = ()) -> Settings:
    """Translate keys of Accelerate to settings.

    Args:
        config: as its file has them, nested.
        where: the file, or the launcher.
        decided: settings that are given otherwise; keys for them are not looked at.

    Raises:
        SettingsError: a key is unknown, or asks for what forge does not have.

    >>> translated({"distributed_type": "FSDP", "fsdp_config": {"fsdp_offload_params": True}}, "fsdp.yaml")
    {'strategy': 'fsdp2', 'cpu_offload': True}
    """
    said = config.get("distributed_type", "NO")
    kind = "NO" if said is False else str(said)  # YAML 1.1 reads a bare NO as false
    flat = _flat(config, kind, where)
    settings: Settings = {"strategy": "fsdp2"} if kind == "FSDP" else {}
    for key, value in flat.items():
        effect = _effect(key, value, flat)
        if not isinstance(effect, str):
            settings |= effect
        elif key != "mixed_precision" or "dtype" not in decided:
            raise _refused(where, key, value, effect)
    return {name: value for name, value in settings.items() if name not in decided}


def sharding(section: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """Translate a section `fsdp_config` by itself, as transformers' arguments have it.

    Args:
        section: keys with or without their `fsdp_`.

    Returns:
        The settings, and key → why it cannot be had.

    >>> sharding({"offload_params": True, "backward_prefetch": "backward_pre", "xla": True})
    ({'strategy': 'fsdp2', 'cpu_offload': True}, {'xla': 'TPUs are not available'})
    """
    settings: Settings = {"strategy": "fsdp2"}
    refused: dict[str, str] = {}
    flat = _with_prefix(section, "fsdp_config")
    for long, value in flat.items():
        known = value.upper() if isinstance(value, str) and long not in _REFUSED else value
        effect = _effect(long, known, flat)
        if isinstance(effect, str):
            refused[long if long in section else long.removeprefix("fsdp_")] = effect
        else:
            settings |= effect
    return settings, refused


def _refused(where: str, key: str, value: object, why: str) -> SettingsError:
    return SettingsError(f"{where}: {key}: {value}: {why}. Leave it out.")


def _flat(config: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Bring the keys of sections to the top, each under its longest form."""
    if kind != "NO" and not kind.startswith("MULTI_") and kind not in _SECTIONS:
        raise _refused(where, "distributed_type", kind, "forge has NO, MULTI_GPU and its like, FSDP, DEEPSPEED")
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key not in ("distributed_type", "fsdp_config", "deepspeed_config", "parallelism_config"):
            flat[key] = value
        elif key != "distributed_type" and value:
            if not isinstance(value, Mapping):
                raise _refused(where, key, value, "keys with values are wanted below it")
            if key not in (_SECTIONS.get(kind), "parallelism_config"):
                raise _refused(where, key, "...", f"it has no effect with distributed_type {kind}")
            flat |= _with_prefix(value, key)
    return flat | ({"zero_stage": flat.get("zero_stage", 2)} if kind == "DEEPSPEED" else {})


def _effect(key: str, value: Any, flat: Mapping[str, Any]) -> Settings | str:
    """Return the settings that a key stands for, or why it cannot be had."""
    if isinstance(value, (list, dict)) and (key in _READ or key in _ALWAYS):
        return "a single value is wanted"
    if key in _READ:
        return _READ[key](value, flat)
    if key in _ALWAYS:
        known = " or ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in _ALWAYS[key])
        return {} if value is None or value in _ALWAYS[key] else f"here it is {known}"
    if key.endswith("_cls_to_wrap") and str(value).endswith("DecoderLayer"):
        return {}  # the layer that is divided by itself anyway
    if key in _REFUSED:
        # 0 switches a key off, but is the number of a device too.
        number = key == "gpu_ids" and type(value) is int
        return {} if (value in _NOTHING and not number) or (key == "dynamo_config" and _uncompiled(value)) else _REFUSED[key]
    return {} if key in _TAKEN else "forge knows no such key of Accelerate"


def _uncompiled(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("dynamo_backend", "NO")).upper() == "NO"


def _with_prefix(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Spell the keys of a section as its longest form does: `fsdp_offload_params`."""
    prefix = {"fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_"}.get(name, "")
    return {key if key.startswith(prefix) else prefix + key: value for key, value in ((str(k), v) for k, v in section.items())}


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _switch(on: Settings) -> Callable[[Any, Mapping[str, Any]], Settings | str]:
    """Return what reads a key that is true or false: a text such as "false" is neither."""
    return lambda value, _: (on if value else {}) if isinstance(value, bool | None) else "true or false is wanted"


def _processes(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    machines = flat.get("num_machines") or 1
    if not _counts(value):
        return "a number of processes from 1 is wanted; give nproc_per_node"
    if not _counts(machines) or value % machines:
        return f"it cannot be divided over num_machines {machines}; give nproc_per_node and nnodes"
    return {"nproc_per_node": value // machines}


def _machines(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    if not _counts(value):
        return "a number of machines from 1 is wanted; give nnodes"
    if value == 1:
        return {}
    at = {"node_rank": "machine_rank", "master_addr": "main_process_ip", "master_port": "main_process_port"}
    return {"nnodes": value, **{ours: flat[theirs] for ours, theirs in at.items() if flat.get(theirs) is not None}}


def _machine_rank(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    machines = flat.get("num_machines") or 1
    if value is None or (type(value) is int and 0 <= value < (machines if _counts(machines) else 1)):
        return {}
    return f"machines are numbered from 0, and num_machines is {machines}"


def _precision(value: Any, _: Mapping[str, Any]) -> Settings | str:
    # YAML 1.1 reads a bare no as false.
    known = {"no": "float32", "false": "float32", "bf16": "bfloat16"}
    text = str(value).lower()
    return {"dtype": known[text]} if text in known else {} if value is None else "dtype is float32 (no) or bfloat16 (bf16)"


def _sharding(value: Any, _: Mapping[str, Any]) -> Settings | str:
    known: dict[str, Settings] = {
        "1": {},
        "2": {"reshard_after_forward": "never"},
        "3": {"strategy": "ddp"},
        "4": {"strategy": "hsdp"},
        "5": {"strategy": "hsdp", "reshard_after_forward": "never"},
    }
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    text = str(names.index(value) + 1) if value in names else str(value)
    return known.get(text, f"one of {', '.join(names)} is wanted")


def _reshard(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    if isinstance(value, bool):
        return {} if value else {"reshard_after_forward": "never"}
    return _sharding(value, flat)


def _zero(value: Any, _: Mapping[str, Any]) -> Settings | str:
    stages = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    return {"strategy": stages[value]} if value in stages and not isinstance(value, bool) else "a stage from 0 to 3 is wanted"


def _offload(value: Any, flat: Mapping[str, Any]) -> Settings | str:
    both = [str(flat.get(f"offload_{what}_device") or "none") for what in ("optimizer", "param")]
    if "nvme" in both:
        return "nothing is offloaded to disk; cpu is possible"
    if flat.get("zero_stage") == 3 and len({*both}) > 1:
        return "with stage 3 cpu_offload moves both the optimizer's state and the weights: set both devices to cpu, or to none"
    return {"cpu_offload": True} if value == "cpu" else {}


def _clipping(value: Any, _: Mapping[str, Any]) -> Settings | str:
    if value in ("auto", None):
        return {}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"max_grad_norm": float(value)} if number else "a number is wanted"


def _replicas(_value: Any, flat: Mapping[str, Any]) -> Settings | str:
    kinds = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = [flat.get(f"parallelism_config_{what}_size") or 1 for what in kinds]
    if not all(map(_counts, sizes)):
        return "a whole number is wanted"
    copies, shards, sharing = sizes[0], sizes[1], sizes[2] * sizes[3]
    if shards > 1:
        # There dp_shard counts the data shards; here shard_size counts all ranks that share a copy.
        return {"strategy": "hsdp", "shard_size": shards * sharing} if copies > 1 else {"strategy": "fsdp2"}
    return {"strategy": "ddp"} if copies > 1 else {}


def _sharing(name: str) -> Callable[[Any, Mapping[str, Any]], Settings | str]:
    def read(value: Any, _: Mapping[str, Any]) -> Settings | str:
        if value in (None, 1) and not isinstance(value, bool):
            return {}
        return {name: value} if _counts(value) else "a whole number is wanted"

    return read


def _one(value: Any, _: Mapping[str, Any]) -> Settings | str:
    return {} if value in (None, 1) else "rows are divided by cp_size, in chunks of all heads"


_READ: dict[str, Callable[[Any, Mapping[str, Any]], Settings | str]] = {
    "num_processes": _processes,
    "num_machines": _machines,
    "machine_rank": _machine_rank,
    "mixed_precision": _precision,
    "use_cpu": _switch({"device": "cpu"}),
    "fsdp_sharding_strategy": _sharding,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _switch({"cpu_offload": True}),
    "fsdp_activation_checkpointing": _switch({"activation_checkpointing": True}),
    "zero_stage": _zero,
    "offload_optimizer_device": _offload,
    "offload_param_device": _offload,
    "gradient_clipping": _clipping,
    "parallelism_config_dp_replicate_size": _replicas,
    "parallelism_config_dp_shard_size": _replicas,
    "parallelism_config_cp_size": _sharing("cp_size"),
    "parallelism_config_tp_size": _sharing("tp_size"),
    "parallelism_config_sp_size": _one,
}
"""Key → what makes settings of its value and the other keys, or says why it cannot."""

_TAKEN = frozenset(
    {
        *("main_process_ip", "main_process_port", "fsdp_min_num_params"),
        *(f"parallelism_config_{name}" for name in ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length")),
        *(f"parallelism_config_{name}" for name in ("sp_seq_length_is_variable", "sp_attn_implementation")),
    }
)
"""Keys that are read with another one, or belong to a kind of parallelism that was refused."""
