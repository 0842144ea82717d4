"""Files of a model's weights → their float dtype, which an export keeps, and their bytes."""

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
    directory = _directory(model_path)
    try:
        stored = read_directory(directory)
    except (ValueError, OSError):
        return _config_dtype(directory)
    sizes: Counter[str] = Counter()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.size
    floats = [name for name, _ in sizes.most_common() if name in _FLOATS]
    return _FLOATS[floats[0]] if floats else _config_dtype(directory)


def weight_bytes(model_path: str) -> int:
    """Return the bytes of a model's safetensors files; 0 where there are none here.

    Mistral's `consolidated.safetensors` has the same weights again and is not read. A link of the hub's cache whose file was
    removed counts nothing.

    Args:
        model_path: directory, or name on the hub, of whose files those in the hub's cache count.

    Raises:
        ModelError: the hub has no such model or does not answer.
    """
    files = _directory(model_path).glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file() and not file.name.startswith("consolidated"))


def _config_dtype(directory: Path) -> torch.dtype:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    named = str(config.get("dtype") or config.get("torch_dtype"))
    return next((dtype for dtype in _FLOATS.values() if str(dtype) == f"torch.{named}"), torch.float32)


def _directory(model_path: str) -> Path:
    """Return the folder of `model_path`, for a hub name the one in the hub's cache."""
    if not is_hub_name(model_path):
        return Path(expand_user(model_path))
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    # The hub is asked only for what is not here: this is called several times a run.
    found = try_to_load_from_cache(model_path, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    try:
        found = cached_file(model_path, "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"model_path {model_path} is no directory here, and the hub does not have it: {error}") from error
    if found is None:
        raise ModelError(f"model_path {model_path} has no config.json on the hub")
    return Path(found).parent
