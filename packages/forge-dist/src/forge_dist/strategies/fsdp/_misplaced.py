"""Weights that transformers puts together from wrong shards → the right shards.

Where a weight is several tensors of the files one after another (Kimi-Linear's convolutions), or several weights are one (HRM's
queries, keys and values), each rank reads its shard of each tensor of the files (transformers 5.23). Put together, they are no
shard of a weight that is divided along the same dimension, or have another shape.
"""

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_dist._errors import StrategyError
from forge_dist._safetensors import read_directory
from forge_dist.loading._model_path import is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def place_again(model: "PreTrainedModel", path: str, report: dict[str, Any]) -> None:
    """Read misplaced weights again, whole, and keep this rank's shards of them.

    One block of the files at a time is held whole. What `report`, transformers' of the load, says of their shapes is taken out.

    Raises:
        StrategyError: such a weight is divided otherwise than in equal parts one after another.
    """
    names = misplaced(model)
    if not names:
        return
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions: Any = model._weight_conversions
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    stored = read_directory(_directory(path))
    blocks: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, model.state_dict())
        if pattern is not None and name in names:
            blocks.setdefault(name, []).append((key, pattern))
    left = set(names)
    for first, members in blocks.items():
        converter = copy.deepcopy(by_pattern[members[0][1]])
        for key, pattern in members:
            with safe_open(stored[key].file, framework="pt") as file:
                converter.add_tensor(first, key, pattern, file.get_tensor(key))
        for name, found in converter.convert(first, model=model, config=model.config).items():
            _put(model, name, found[0] if isinstance(found, list) else found)
            left.discard(name)
    if left:
        raise StrategyError(f"model_path {path}: its files do not hold {min(left)} as one process reads it: use strategy=ddp")
    report["mismatched_keys"] = {entry for entry in report["mismatched_keys"] if entry[0] not in names}


def misplaced(model: "PreTrainedModel") -> list[str]:
    """Return the names of the weights that transformers puts together from wrong shards."""
    from transformers.core_model_loading import Chunk, Concatenate

    found: dict[str, None] = {}
    for conversion in getattr(model, "_weight_conversions", None) or ():
        dims = {step.dim for step in getattr(conversion, "operations", ()) if isinstance(step, Chunk | Concatenate)}
        for name, parameter in model.named_parameters():
            along = {place.dim for place in getattr(parameter, "placements", ()) if isinstance(place, Shard)}
            if dims & along and any(re.search(pattern, name) for pattern in conversion.target_patterns):
                found[name] = None
    return list(found)


def _directory(path: str) -> Path:
    """Return the folder of the files that were read."""
    if not is_hub_name(path):
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(path, "config.json"))).parent


def _put(model: nn.Module, name: str, whole: torch.Tensor) -> None:
    """Make this rank's shard of a whole tensor the parameter's."""
    home, _, key = name.rpartition(".")
    module = model.get_submodule(home)
    old: Any = getattr(module, key)
    if not all(place.is_replicate() or type(place) is Shard for place in old.placements):
        raise StrategyError(f"{name} is divided as {old.placements}, and its files have it in other parts: use strategy=ddp")
    given = whole.to(device=old.device, dtype=old.dtype).contiguous()
    shard = distribute_tensor(given, old.device_mesh, old.placements, src_data_rank=None).to_local().clone()
    new = DTensor.from_local(shard, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride())
    setattr(module, key, nn.Parameter(new, requires_grad=old.requires_grad))
