"""Weights that transformers puts together from wrong shards → the right shards.

Where a weight is several tensors of the files one after another (Kimi-Linear's convolutions), several weights are one (HRM's
queries, keys and values), or only some rows are read (Inkling 2's head), each rank reads its shard of each tensor of the files
(transformers 5.23, 5.24). Put together, they are no shard of a weight that is divided along the same dimension, have another
shape, or cannot be put together at all.
"""

import copy
import functools
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_dist._errors import ModelError, StrategyError
from forge_dist._safetensors import read_directory
from forge_dist.loading._load import LOADING_ERRORS
from forge_dist.loading._model_path import is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_OF_ANY_SHARD = ("MergeModulelist", "SplitModulelist", "Transpose", "_IdentityOp")
"""Operations of transformers that make a rank's shard of what it reads of each tensor."""

_taking_turns = threading.RLock()


@contextmanager
def placeholders() -> Iterator[set[str]]:
    """Let weights that transformers cannot make of shards be zeros, and yield their names.

    `place_again` reads them. Threads take turns: meanwhile transformers' operations are changed for the whole process, though
    only for weights that are divided and cannot be made.
    """
    from transformers import core_model_loading as loading

    made: set[str] = set()
    with _taking_turns:
        kinds = [each for each in loading.ConversionOps.__subclasses__() if each.__module__ == loading.__name__]
        before = {each: each.convert for each in kinds if each.__name__ not in _OF_ANY_SHARD}
        for kind, convert in before.items():
            kind.convert = _or_zeros(convert, made)
        try:
            yield made
        finally:
            for kind, convert in before.items():
                kind.convert = convert


def _or_zeros(convert: Any, made: set[str]) -> Any:
    @functools.wraps(convert)
    def converted(self: Any, found: Any, *, target_patterns: list[str], model: Any, full_layer_name: str, **more: Any) -> Any:
        first = next((each[0] if isinstance(each, list) else each for each in found.values() if len(each)), None)
        try:
            return convert(self, found, target_patterns=target_patterns, model=model, full_layer_name=full_layer_name, **more)
        except Exception:
            zeros = {}
            for target in target_patterns:
                name = full_layer_name.replace(target_patterns[0], target)
                weight = model.get_parameter(name)
                # While the model is read its weights are on the meta device. What `place_again` reads is whole, and must fit.
                if not isinstance(weight, DTensor) or not weight.is_meta:
                    raise
                made.add(name)
                device = weight.device_mesh.device_type if first is None else first.device
                zeros[target] = torch.zeros_like(weight.to_local(), device=device)
            return zeros

    return converted


def place_again(model: "PreTrainedModel", path: str, report: dict[str, Any], *, unmade: Collection[str] = ()) -> None:
    """Read misplaced and `unmade` weights again, whole, and keep this rank's shards.

    One block of the files at a time is held whole. What `report`, transformers' of the load, says of their shapes becomes what
    they have whole.

    Raises:
        ModelError: such a weight cannot be put together.
        StrategyError: such a weight is divided otherwise than in equal parts one after another.
    """
    names = dict.fromkeys([*misplaced(model), *sorted(unmade)])
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
        elif name in names:  # read as it is: its name is only like that of one that is put together
            del names[name]
    left, wrong = set(names).difference(report["missing_keys"]), set()
    for first, members in blocks.items():
        converter = copy.deepcopy(by_pattern[members[0][1]])
        for key, pattern in members:
            with safe_open(stored[key].file, framework="pt") as file:
                converter.add_tensor(first, key, pattern, file.get_tensor(key))
        try:
            made = converter.convert(first, model=model, config=model.config)
        except LOADING_ERRORS as error:
            raise ModelError(f"model_path {path} cannot be loaded: {first} cannot be put together: {error}") from error
        for name, found in made.items():
            whole, shape = found[0] if isinstance(found, list) else found, model.get_parameter(name).shape
            left.discard(name)
            if whole.shape == shape:
                _put(model, name, whole)
            else:
                wrong.add((name, tuple(whole.shape), tuple(shape)))
    if left:
        raise StrategyError(f"model_path {path}: its files do not hold {min(left)} as one process reads it: use strategy=ddp")
    report["mismatched_keys"] = {entry for entry in report["mismatched_keys"] if entry[0] not in names} | wrong


def misplaced(model: "PreTrainedModel") -> list[str]:
    """Return the names of the weights that transformers puts together from wrong shards."""
    from transformers.core_model_loading import ConversionOps

    found: dict[str, None] = {}
    for conversion in getattr(model, "_weight_conversions", None) or ():
        # A quantizer's operations (MXFP4) make a shard of a shard.
        ours = [each for each in getattr(conversion, "operations", ()) if type(each).__module__ == ConversionOps.__module__]
        steps = [each for each in ours if type(each).__name__ not in _OF_ANY_SHARD]
        # One without a dimension may take any row from anywhere.
        dims = {getattr(step, "dim", None) for step in steps}
        for name, parameter in model.named_parameters():
            along = {place.dim for place in getattr(parameter, "placements", ()) if isinstance(place, Shard)}
            crossed = bool(along) if None in dims else bool(dims & along)
            if crossed and any(re.search(pattern, name) for pattern in conversion.target_patterns):
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
