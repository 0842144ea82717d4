"""A PeftModel ↔ the adapter directory that plain PEFT loads. peft is an extra, imported only where an adapter is read."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from forge_dist.adapters._base_model import check_base, note_base

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"


def is_peft(model: object) -> "TypeGuard[PeftModel]":
    """Whether `model` is a PeftModel; asked without importing peft (4 seconds), which a PeftModel has already done."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrapped(model: torch.nn.Module) -> "PreTrainedModel | PeftModel":
    """The model inside what a strategy put around it (DistributedDataParallel, DeepSpeed's engine: each has it as `.module`)."""
    while not is_peft(model) and isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return cast("PreTrainedModel", model)


def base_of(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """The transformers model itself, adapter layers inside it included."""
    return cast("PreTrainedModel", model.get_base_model() if is_peft(model) else model)


def base_path(folder: Path) -> str:
    """The base model that adapter_config.json names, which is there unchanged.

    Raises:
        ValueError: it names none, cannot be read, or what lies there is another one than the adapter was trained beside (ModelError).
    """
    from peft import PeftConfig

    PeftConfig.from_pretrained(str(folder))
    return check_base(folder).path


def read_adapter(
    base: "PreTrainedModel",
    folder: Path,
    name: str = "default",
    attach: "Callable[[PreTrainedModel, str, str], PeftModel] | None" = None,
) -> "PeftModel":
    """Put the adapter of `folder` on `base` by plain PEFT (or by `attach`, of base, folder and name), from safetensors alone.

    Raises:
        ValueError: there are no safetensors (PEFT would unpickle adapter_model.bin), or they are not the adapter that the
            configuration describes (PEFT would only warn).
    """
    from peft import PeftModel

    from forge_dist._safetensors import read_directory

    stored = read_directory(folder, "adapter_model")
    with warnings.catch_warnings():
        # PEFT asks transformers by an older name, and warns of missing keys, which are checked right below.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        if attach is not None:
            model = attach(base, str(folder), name)
        else:
            model = PeftModel.from_pretrained(base, str(folder), adapter_name=name)
    differing = stored.keys() ^ _picked(model, name)[1].keys()
    if differing:
        raise ValueError(
            f"{folder / WEIGHTS} and adapter_config.json disagree about the tensor {min(differing)} ({len(differing)} such)"
        )
    return model


def active_adapter(model: "PeftModel") -> str:
    """The name of the one adapter of `model`.

    Raises:
        ValueError: it has several.
    """
    names = list(model.peft_config)
    if len(names) != 1:
        raise ValueError(
            f"the model has {len(names)} adapters ({', '.join(names)}) and a directory holds one; delete the others first"
        )
    return names[0]


def _picked(model: "PeftModel", name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The names of the model's state, and what PEFT picks of it, under the names of a file: numbers in the former.

    What matters is which: the tensors of a divided model would each have to be put together.
    """
    from peft import get_peft_model_state_dict

    names = list(model.state_dict())
    state = {key: torch.tensor(number) for number, key in enumerate(names)}
    return names, get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)


def adapter_sources(model: "PeftModel", name: str) -> dict[str, str]:
    """Name in adapter_model.safetensors → name in the model's state; what every rank can make for itself is left out (`made_tensors`).

    Raises:
        ValueError: PEFT makes a tensor of this kind of adapter out of others.
    """
    names, picked = _picked(model, name)
    made = [key for key, number in picked.items() if number.dtype != torch.int64 or number.ndim]
    if made and not model.peft_config[name].is_prompt_learning:
        kind = model.peft_config[name].peft_type
        raise ValueError(f"the tensor {made[0]} of this adapter ({kind}) is not one of the model's, and the model is divided")
    picked = {key: number for key, number in picked.items() if key not in made}
    return {key: names[int(number)] for key, number in picked.items()}


def made_tensors(model: "PeftModel", name: str) -> dict[str, torch.Tensor]:
    """Name in adapter_model.safetensors → what PEFT makes of parameters that every rank holds whole: virtual tokens."""
    from peft import get_peft_model_state_dict

    if not model.peft_config[name].is_prompt_learning:
        return {}
    found = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: tensor for key, tensor in found.items() if key not in adapter_sources(model, name)}


def write_adapter(
    model: "PeftModel", folder: Path, dtype: torch.dtype | None, state: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write adapter_config.json, adapter_model.safetensors and forge_base.json, floats as `dtype` (None: as in memory); return the former's path.

    The tensors are those of `state`, a part of the model's state that holds all of the adapter's; None: those of the model.

    Embeddings are written only where they are part of the adapter (modules_to_save): PEFT's "auto" would ask the hub whether
    the vocabulary grew. A base model that is a directory here is named by its absolute path: a relative one would be found from this
    working directory alone.
    """
    name = active_adapter(model)
    given: dict[str, Any] = {} if state is None else {"state_dict": dict(state)}
    model.save_pretrained(str(folder), safe_serialization=True, selected_adapters=[name], save_embedding_layers=False, **given)
    if name != "default":  # PEFT gives any other name a folder of its own
        for file in (folder / name).iterdir():
            file.rename(folder / file.name)
        (folder / name).rmdir()
    # A model card of empty headings, with this machine's path of the base model in it.
    (folder / "README.md").unlink(missing_ok=True)
    if dtype is not None:
        _cast_file(folder / WEIGHTS, dtype)
    config_file = folder / "adapter_config.json"
    note_base(base_of(model), _name_base_from_anywhere(config_file), folder)
    return config_file


def _name_base_from_anywhere(config_file: Path) -> str | None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and os.path.isdir(base) and not os.path.isabs(base):
        config["base_model_name_or_path"] = os.path.abspath(base)
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return config["base_model_name_or_path"]


def _cast_file(file: Path, dtype: torch.dtype) -> None:
    # An adapter is small: reading it back costs less than knowing PEFT's rules for what belongs to it.
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors.values()):
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        save_file(cast, file, metadata={"format": "pt"})
