"""An adapter directory → what it decides of `AdapterSettings`, without torch or peft."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_algos._errors import AdapterError
from forge_algos.settings._adapter import STORED, AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS
from forge_algos.settings._validators import either

CONFIG = "adapter_config.json"
"""File of an adapter directory with PEFT's configuration."""
WEIGHTS = "adapter_model.safetensors"
"""File of an adapter directory with its tensors."""

_OF_LORA = frozenset(
    """task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules
    exclude_modules lora_alpha lora_dropout fan_in_fan_out use_rslora use_dora modules_to_save init_lora_weights
    layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_core trainable_token_indices target_parameters
    qalora_group_size ensure_weight_tying eva_config corda_config lora_ga_config loftq_config runtime_config
    lora_bias bias""".split()
)
"""Fields of PEFT's LoraConfig that may have any value: attached as they are, or of no effect on an adapter with weights."""
_NOT_TRAINED = {"bias": "biases of the base", "coft": "rotations that are pulled back in each forward"}
"""Fields of the other kinds' configurations that are refused → what they would train."""
_BASE_STAYS = (True, False, None, "gaussian", "eva", "orthogonal")
"""`init_lora_weights` of adapters beside which the base keeps its weights, and which train as any other."""
_RUNS = ("lora_dropout", "prefix_projection")
"""Settings of adapters that are the run's, and no part of an adapter's shape."""


@attrs.frozen(kw_only=True)
class StoredAdapter:
    """An adapter of PEFT in a directory."""

    folder: Path
    config: Mapping[str, Any]
    """PEFT's configuration, as adapter_config.json has it."""
    shape: Mapping[str, Any]
    """Values of AdapterSettings that it decides: rank, scale and the like.
    None where it has another measure instead."""

    @property
    def base(self) -> str | None:
        """Path or hub name of its base model, where its configuration names one."""
        return self.config.get("base_model_name_or_path") or None

    def said(self, name: str) -> str:
        """Return what the adapter has in place of a setting of `shape`, for messages."""
        value = self.shape[name]
        if value is None:
            return f"r={self.config['r']} blocks, of any size"
        return self.as_setting(name, value)

    @staticmethod
    def as_setting(name: str, value: Any) -> str:
        """Return a setting and its value as they are given."""
        return f"{name}={value}" if isinstance(value, str) else f"{name}={value:g}"


def stored_adapter(directory: str | Path, adapter: str) -> StoredAdapter:
    """Return the adapter in `directory`, checked to be one that `adapter` can go on from.

    Args:
        directory: what an export of forge, PEFT or a trainer that uses it wrote.
        adapter: name of a row of `ADAPTERS`, lora say.

    Raises:
        AdapterError: there is no adapter in safetensors, it is of another kind, it has an option of PEFT that is not
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
        names = _names_of(config)
    except FileNotFoundError:
        beside = ". It holds a model, which model_path takes" if (folder / "config.json").is_file() else ""
        raise AdapterError(f"adapter_path {folder}: is no adapter: it has no {CONFIG}{beside}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AdapterError(f"adapter_path {folder}: its {CONFIG} is not what PEFT writes ({error!r})") from error
    if not names:
        kinds = sorted({kind.peft_type for kind in ADAPTERS.values() if kind.peft})
        raise AdapterError(
            f"adapter_path {folder}: holds an adapter of the kind {config['peft_type']}, and a run goes on from "
            f"{', '.join(kinds)}"
        )
    shape = _shape(folder, config, names[0])
    if not (folder / WEIGHTS).is_file():
        other = sorted(file.name for file in folder.glob("adapter_model*") if file.name != WEIGHTS)
        beside = (
            f", only {other[0]}: pickled files run code, and are not read. Save it with PEFT as safetensors" if other else ""
        )
        raise AdapterError(f"adapter_path {folder}: has no {WEIGHTS}{beside}")
    if adapter not in names:
        a = "an" if names[0][0] in "aeio" else "a"
        raise AdapterError(
            f"adapter_path {folder}: holds {a} {names[0]} adapter, and adapter={adapter}: set adapter={either(names)}"
        )
    _check_options(folder, config)
    return StoredAdapter(folder=folder, config=config, shape=shape)


def _names_of(config: Mapping[str, Any]) -> list[str]:
    """Return the values of `adapter` that train such an adapter."""
    kind_of_peft = config["peft_type"].replace("_", "")
    rows = {name: kind for name, kind in ADAPTERS.items() if kind.peft and kind.peft_type == kind_of_peft}
    if kind_of_peft == "LORA":
        # DoRA has no row of its own with rsLoRA's scale, which the file has.
        chosen = next((key for key in ("use_dora", "use_rslora") if config.get(key)), None)
        rows = {name: kind for name, kind in rows.items() if [*kind.options] == ([chosen] if chosen else [])}
    return list(rows)


def _shape(folder: Path, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of AdapterSettings that the file decides, or raise AdapterError."""
    fields, kind = attrs.fields_dict(AdapterSettings), ADAPTERS[name]
    decided = {argument: field for argument, field in kind.arguments.items() if field not in _RUNS}
    if "adapter_layers" in kind.reads:
        decided["adapter_layers"] = "adapter_layers"
    found, wrong = {}, {}
    for argument, setting in decided.items():
        value, field = config.get(argument), fields[setting]
        if kind.peft_type == "OFT" and not value and config.get("r"):
            found[setting] = None  # a number of blocks, whatever their size
            continue
        try:
            if value is None or field.validator is None:
                raise ValueError(setting)
            field.validator(None, field, value)
        except (TypeError, ValueError):
            wrong[argument] = value
        else:
            found[setting] = float(value) if isinstance(field.default, float) else value
    if "init_lora_weights" in kind.reads:
        init = config.get("init_lora_weights")
        found["init_lora_weights"] = init if init in STORED else "default"
    patterns = {name: config.get(name, {}) for name in ("rank_pattern", "alpha_pattern")}
    wrong |= {name: value for name, value in patterns.items() if not isinstance(value, dict)}
    chosen = {name: config.get(name) for name in ("target_modules", "exclude_modules")}
    wrong |= {name: value for name, value in chosen.items() if not _names_modules(value)}
    if wrong:
        said = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise AdapterError(f"adapter_path {folder}: its {CONFIG} is not what PEFT writes ({said})")
    return found


def _names_modules(value: object) -> bool:
    """Tell whether a value is what PEFT has for a choice of modules: none, a pattern, or names."""
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error:
            return False
        return True
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _check_options(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what PEFT's configuration has and nothing here trains."""
    init = config.get("init_lora_weights", True)
    if init not in (*_BASE_STAYS, *STORED):
        raise AdapterError(
            f"adapter_path {folder}: belongs beside a base that init_lora_weights={init} changed as it began, and not "
            "beside the model itself: write it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    of_lora = config["peft_type"] == "LORA"
    refused = [name for name in config if name not in _OF_LORA] if of_lora else _NOT_TRAINED
    others = [name for name in refused if config.get(name) and config[name] != "none"]
    if others:
        what = "" if of_lora else f" ({_NOT_TRAINED[others[0]]})"
        raise AdapterError(
            f"adapter_path {folder}: {others[0]}={config[others[0]]!r} in its {CONFIG} is an option of PEFT that is not "
            f"trained here{what}"
        )
