"""An adapter directory → what it decides of `AdapterSettings`, without torch or peft."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_algos._errors import AdapterError

CONFIG = "adapter_config.json"
"""File of an adapter directory with PEFT's configuration."""
WEIGHTS = "adapter_model.safetensors"
"""File of an adapter directory with its tensors."""

_READ = frozenset(
    """task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules
    exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora use_dora modules_to_save init_lora_weights
    layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core trainable_token_indices target_parameters
    qalora_group_size ensure_weight_tying eva_config corda_config lora_ga_config loftq_config runtime_config""".split()
)
"""Fields of PEFT's LoraConfig that may have any value: attached as they are, or of no effect on an adapter with weights."""
_BASE_STAYS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""`init_lora_weights` of adapters beside which the base keeps its weights."""


@attrs.frozen(kw_only=True)
class StoredAdapter:
    """A LoRA adapter in a directory."""

    folder: Path
    config: Mapping[str, Any]
    """PEFT's LoraConfig, as adapter_config.json has it."""

    @property
    def shape(self) -> dict[str, Any]:
        """Values of AdapterSettings that it decides: rank and scale."""
        return {"lora_r": self.config["r"], "lora_alpha": float(self.config["lora_alpha"])}

    @property
    def base(self) -> str | None:
        """Path or hub name of its base model, where its configuration names one."""
        return self.config.get("base_model_name_or_path") or None


def stored_adapter(directory: str | Path, adapter: str) -> StoredAdapter:
    """Return the adapter in `directory`, checked to be one that `adapter` can go on from.

    Args:
        directory: what an export of forge, PEFT or a trainer that uses it wrote.
        adapter: lora, qlora, dora or rslora.

    Raises:
        AdapterError: there is no LoRA adapter in safetensors, it is of another kind, it has an option of PEFT that is not
            trained here, or it belongs beside a base that was changed as it began.
    """
    folder = Path(directory)
    if folder.is_file():
        raise AdapterError(f"adapter_path {directory}: is a file. Give the directory that holds {CONFIG} and {WEIGHTS}")
    if not folder.is_dir():
        raise AdapterError(
            f"adapter_path {directory}: there is no such directory. Give one that holds {CONFIG} and {WEIGHTS}; "
            "`hf download` fetches an adapter from the hub"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except FileNotFoundError:
        beside = ". It holds a model, which model_path takes" if (folder / "config.json").is_file() else ""
        raise AdapterError(f"adapter_path {folder}: is no adapter: it has no {CONFIG}{beside}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AdapterError(f"adapter_path {folder}: its {CONFIG} is not what PEFT writes ({error!r})") from error
    if kind != "LORA":
        raise AdapterError(f"adapter_path {folder}: holds an adapter of the kind {kind}, and a run goes on from LoRA alone")
    _check_shape(folder, config)
    if not (folder / WEIGHTS).is_file():
        other = sorted(file.name for file in folder.glob("adapter_model*") if file.name != WEIGHTS)
        beside = (
            f", only {other[0]}: pickled files run code, and are not read. Save it with PEFT as safetensors" if other else ""
        )
        raise AdapterError(f"adapter_path {folder}: has no {WEIGHTS}{beside}")
    _check_kind(folder, config, adapter)
    return StoredAdapter(folder=folder, config=config)


def _check_shape(folder: Path, config: Mapping[str, Any]) -> None:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_shape = (
        isinstance(rank, int)
        and isinstance(alpha, int | float)
        and not any(isinstance(value, bool) for value in (rank, alpha))
        and rank > 0
        and 0 < alpha < math.inf
    )
    patterns = {name: config.get(name, {}) for name in ("rank_pattern", "alpha_pattern")}
    wrong = {} if is_shape else {"r": rank, "lora_alpha": alpha}
    wrong |= {name: value for name, value in patterns.items() if not isinstance(value, dict)}
    if wrong:
        found = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise AdapterError(f"adapter_path {folder}: its {CONFIG} is not what PEFT writes ({found})")


def _check_kind(folder: Path, config: Mapping[str, Any], adapter: str) -> None:
    dora, rslora = bool(config.get("use_dora")), bool(config.get("use_rslora"))
    if dora and rslora:
        raise AdapterError(f"adapter_path {folder}: holds DoRA with the scale of rsLoRA, and adapter has no name for both")
    names = ("dora",) if dora else ("rslora",) if rslora else ("lora", "qlora")
    if adapter not in names:
        raise AdapterError(
            f"adapter_path {folder}: holds a {names[0]} adapter, and adapter={adapter}: set adapter={' or '.join(names)}"
        )
    init = config.get("init_lora_weights", True)
    if init not in _BASE_STAYS:
        raise AdapterError(
            f"adapter_path {folder}: belongs beside a base that init_lora_weights={init} changed as it began, and not "
            "beside the model itself: write it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    others = [name for name, value in config.items() if name not in _READ and value and value != "none"]
    if others:
        raise AdapterError(
            f"adapter_path {folder}: {others[0]}={config[others[0]]!r} in its {CONFIG} is an option of PEFT that is not "
            "trained here"
        )
