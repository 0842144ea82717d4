"""Find the float dtype in which a model's weights are stored, so that an export keeps it."""

import json
from collections import Counter
from pathlib import Path

import torch

from forge_dist._errors import ModelError
from forge_dist._safetensors import read_directory
from forge_dist.loading._model_path import Task, check_model_path, expand_user, is_hub_name

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def base_dtype(model_path: str, *, task: Task = "causal") -> torch.dtype:
    """Return the float dtype of most bytes of a model's weights.

    Read from the safetensors headers, because a config.json often names another dtype than the files hold. For a hub name: from
    the files where `load_model` has fetched them, else from its config, as of a directory without weights; float32 where
    neither says.

    Raises:
        ModelError: `check_model_path` refuses it, or the hub has no such model or does not answer.
    """
    check_model_path(model_path, task=task, weights=False)
    directory = _hub_directory(model_path) if is_hub_name(model_path) else Path(expand_user(model_path))
    try:
        stored = read_directory(directory)
    except (ValueError, OSError):
        return _config_dtype(directory)
    sizes: Counter[str] = Counter()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.size
    floats = [name for name, _ in sizes.most_common() if name in _FLOATS]
    return _FLOATS[floats[0]] if floats else _config_dtype(directory)


def _config_dtype(directory: Path) -> torch.dtype:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return next((dtype for dtype in _FLOATS.values() if str(dtype) == f"torch.{named}"), torch.float32)


def _hub_directory(model_path: str) -> Path:
    """Return the folder of `model_path` in the hub's cache, its config.json downloaded."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model_path, "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"model_path {model_path} is no directory here, and the hub does not have it: {error}") from error
    if found is None:
        raise ModelError(f"model_path {model_path} has no config.json on the hub")
    return Path(found).parent
