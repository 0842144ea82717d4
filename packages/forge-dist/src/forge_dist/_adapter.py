"""A PeftModel ↔ the adapter directory that plain PEFT loads. peft is an extra, imported only where an adapter is read."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"


def is_peft(model: object) -> "TypeGuard[PeftModel]":
    """Whether `model` is a PeftModel; asked without importing peft (4 seconds), which a PeftModel has already done."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """The transformers model itself, adapter layers inside it included."""
    return cast("PreTrainedModel", model.get_base_model() if is_peft(model) else model)


def base_path(folder: Path) -> str:
    """The base model that adapter_config.json names.

    Raises:
        ValueError: it names none, or cannot be read.
    """
    from peft import PeftConfig

    path = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not path:
        raise ValueError(f"{folder / 'adapter_config.json'} does not name its base model (base_model_name_or_path)")
    return str(path)


def read_adapter(base: "PreTrainedModel", folder: Path, name: str = "default") -> "PeftModel":
    """Put the adapter of `folder` on `base` by plain PEFT, from safetensors alone.

    Raises:
        ValueError: there are no safetensors (PEFT would unpickle adapter_model.bin), or they are not the adapter that the
            configuration describes (PEFT would only warn).
    """
    from peft import PeftModel

    from forge_dist._proof import adapter_tensors
    from forge_dist._safetensors import read_directory

    stored = read_directory(folder, "adapter_model")
    with warnings.catch_warnings():
        # PEFT asks transformers by an older name, and warns of missing keys, which are checked right below.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        model = PeftModel.from_pretrained(base, str(folder), adapter_name=name)
    differing = stored.keys() ^ adapter_tensors(model, name).keys()
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


def write_adapter(model: "PeftModel", folder: Path, dtype: torch.dtype | None) -> Path:
    """Write adapter_config.json and adapter_model.safetensors, floats as `dtype` (None: as in memory); return the former's path.

    Embeddings are written only where they are part of the adapter (modules_to_save): PEFT's "auto" would ask the hub whether
    the vocabulary grew. A base model that is a directory here is named by its absolute path: a relative one would be found from this
    working directory alone.
    """
    name = active_adapter(model)
    model.save_pretrained(str(folder), safe_serialization=True, selected_adapters=[name], save_embedding_layers=False)
    if name != "default":  # PEFT gives any other name a folder of its own
        for file in (folder / name).iterdir():
            file.rename(folder / file.name)
        (folder / name).rmdir()
    # A model card of empty headings, with this machine's path of the base model in it.
    (folder / "README.md").unlink(missing_ok=True)
    if dtype is not None:
        _cast_file(folder / WEIGHTS, dtype)
    config_file = folder / "adapter_config.json"
    _name_base_from_anywhere(config_file)
    return config_file


def _name_base_from_anywhere(config_file: Path) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and os.path.isdir(base) and not os.path.isabs(base):
        config["base_model_name_or_path"] = os.path.abspath(base)
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast_file(file: Path, dtype: torch.dtype) -> None:
    # An adapter is small: reading it back costs less than knowing PEFT's rules for what belongs to it.
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors.values()):
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        save_file(cast, file, metadata={"format": "pt"})
