"""Write a PeftModel to the adapter directory that plain PEFT loads, and read it back.

peft is an extra, imported only where an adapter is read.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._safetensors import TensorEntry, read_directory
from forge_dist.adapters._base_model import check_base, write_base_file
from forge_dist.loading._unwrap import base_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

AttachAdapter = Callable[["PreTrainedModel", str, str], "PeftModel"]
"""(base, folder, name of the adapter) → the PeftModel of that adapter directory."""

WEIGHTS = "adapter_model.safetensors"
"""File of an adapter directory with its tensors."""


def base_path(folder: Path) -> str:
    """Return the path of the base model that adapter_config.json names, checked to be unchanged.

    Raises:
        ValueError: it names none, cannot be read, or is another one than the adapter was trained beside (ModelError).
    """
    from peft import PeftConfig

    PeftConfig.from_pretrained(str(folder))
    return check_base(folder).path


def read_adapter(
    base: "PreTrainedModel",
    folder: Path,
    name: str = "default",
    attach: "AttachAdapter | None" = None,
) -> "PeftModel":
    """Attach the adapter of `folder` to `base`, by plain PEFT, from safetensors alone.

    Args:
        base: the model that the adapter belongs to.
        folder: the adapter directory.
        name: of the adapter within the PeftModel.
        attach: function of base, folder and name to use in place of `PeftModel.from_pretrained`.

    Raises:
        ValueError: there are no safetensors (PEFT would unpickle adapter_model.bin), or they are not the adapter that the
            configuration describes (PEFT would only warn); or they belong beside a base that nobody knows again.
    """
    from peft import PeftModel

    stored = read_directory(folder, "adapter_model")
    init = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("init_lora_weights")
    if str(init).startswith("pissa_niter_"):
        raise ValueError(
            f"it belongs beside a base that init_lora_weights={init} changed by a random approximation, which PEFT would draw "
            "anew: write it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) first"
        )
    tops = [top for top in (base.get_input_embeddings(), base.get_output_embeddings()) if top is not None]
    _check_rows(base, tops, stored)
    with warnings.catch_warnings():
        # PEFT uses an older name of transformers', and warns of missing keys, which are checked right below.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys", category=UserWarning)
        # PEFT gives fused experts a rank of their own, and warns where they are no target.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        # A merge says so, where one is asked for.
        warnings.filterwarnings("ignore", message="`lora_bias=True` was passed")
        if attach is not None:
            model = attach(base, str(folder), name)
        else:
            model = PeftModel.from_pretrained(base, str(folder), adapter_name=name)
    selected, computed = peft_selection(model, name)
    # PEFT writes the weight of an embedding or head beside low-rank factors of it, and those of both where the vocabulary grew
    # (save_embedding_layers). It reads them into the base.
    whole = {f"{key}.weight" for key, module in model.named_modules() if any(module is top for top in tops)}
    of_base = {key for key in stored if key.endswith(".base_layer.weight") or key in whole}.intersection(model.state_dict())
    differing = (stored.keys() - of_base.difference(selected)) ^ {*selected, *computed}
    if differing:
        raise ValueError(
            f"{folder / WEIGHTS} and adapter_config.json disagree about the tensor {min(differing)} ({len(differing)} such)"
        )
    return model


def _check_rows(base: "PreTrainedModel", tops: Sequence[Any], stored: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError where the file's embedding or head has other rows than the base's."""
    for name, module in base.named_modules():
        rows = getattr(module, "num_embeddings", None) or getattr(module, "out_features", None)
        entry = stored.get(f"base_model.model.{name}.weight")
        if rows and entry and entry.shape[0] != rows and any(module is top for top in tops):
            raise ValueError(
                f"its {name} has {entry.shape[0]} rows and its base {rows}: the vocabulary grew before it was trained. Load "
                f"the base with transformers, `model.resize_token_embeddings({entry.shape[0]})`, save it, and name "
                "that directory as base_model_name_or_path in adapter_config.json"
            )


def active_adapter(model: "PeftModel") -> str:
    """Return the name of the only adapter of `model`.

    Raises:
        ValueError: it has several.
    """
    names = list(model.peft_config)
    if len(names) != 1:
        raise ValueError(
            f"the model has {len(names)} adapters ({', '.join(names)}) and a directory holds one; delete the others first"
        )
    return names[0]


def peft_selection(model: "PeftModel", name: str) -> tuple[dict[str, str], list[str]]:
    """Return what PEFT saves of the model's state: name in the file → name in the state.

    And the names in the file of tensors that PEFT computes from others. Found by indices in place of tensors: each tensor of a
    divided model would have to be gathered.
    """
    names = list(model.state_dict())
    indices = {key: torch.tensor(index) for index, key in enumerate(names)}
    selected = peft_state(model, name, indices)
    computed = [key for key, index in selected.items() if index.dtype != torch.int64 or index.ndim]
    return {key: names[int(index)] for key, index in selected.items() if key not in computed}, computed


def peft_state(model: "PeftModel", name: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what PEFT saves of the model's `state`: name in adapter_model.safetensors → tensor."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name, save_embedding_layers=False)


def write_adapter(model: "PeftModel", folder: Path, dtype: torch.dtype | None, state: Mapping[str, torch.Tensor]) -> Path:
    """Write adapter_config.json (whose path is returned), its tensors, and forge_base.json.

    Floats are written as `dtype` (None: as in memory). `state` is the model's state, or the part of it that holds the adapter.

    Embeddings are written only where they are part of the adapter (modules_to_save): PEFT's "auto" would ask the hub whether
    the vocabulary grew. A base model that is a directory here is named by its absolute path: a relative one would be found from
    this working directory alone.
    """
    name = active_adapter(model)
    model.save_pretrained(
        str(folder), safe_serialization=True, selected_adapters=[name], save_embedding_layers=False, state_dict=dict(state)
    )
    if name != "default":  # PEFT gives any other name a folder of its own
        for file in (folder / name).iterdir():
            file.rename(folder / file.name)
        (folder / name).rmdir()
    # PEFT's model card of empty headings, with this machine's path of the base model in it.
    (folder / "README.md").unlink(missing_ok=True)
    if dtype is not None:
        _cast_file(folder / WEIGHTS, dtype)
    config_file = folder / "adapter_config.json"
    write_base_file(base_of(model), _make_base_path_absolute(config_file), folder)
    return config_file


def _make_base_path_absolute(config_file: Path) -> str | None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if base and os.path.isdir(base) and not os.path.isabs(base):
        config["base_model_name_or_path"] = os.path.abspath(base)
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return config["base_model_name_or_path"]


def _cast_file(file: Path, dtype: torch.dtype) -> None:
    # An adapter is small: reading it back is simpler than PEFT's rules for what belongs to it.
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if any(tensor.is_floating_point() and tensor.dtype != dtype for tensor in tensors.values()):
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        save_file(cast, file, metadata={"format": "pt"})
