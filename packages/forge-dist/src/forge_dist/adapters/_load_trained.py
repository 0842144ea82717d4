"""Load a trained model for inference: a model directory, or an adapter on its base."""

import os
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._errors import ModelError
from forge_dist._third_party_logs import quiet_imports, quiet_transformers
from forge_dist.adapters._adapter import base_path, read_adapter
from forge_dist.adapters._base_model import adapter_base
from forge_dist.loading._load import load_model
from forge_dist.loading._model_path import Task, find_path
from forge_dist.loading._moving import moved
from forge_dist.loading._quantization import quantization_from

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def load_trained(
    model_path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    task: Task = "causal",
    as_trained: bool = False,
    other_dtype: torch.dtype | None = None,
) -> "PreTrainedModel | PeftModel":
    """Load what `export_model` wrote, or any model that `load_model` takes, for inference.

    In eval mode, with sdpa attention where the architecture has it and eager where not; `other_dtype` as in `load_model`.

    An adapter directory becomes a PeftModel on its base model, which must be where adapter_config.json says, and unchanged:
    where forge_base.json holds its identity, another base is refused. A base that was quantized while the adapter was trained
    is read unquantized, as plain PEFT does, which any machine can and which rounds nothing; `as_trained` reads it quantized as
    it was, for the exact numbers of the training (and a quarter of the memory).

    Raises:
        ModelError: as `load_model`; an adapter without its base model, with another one, or with weights that do not fit its
            configuration; peft missing.
    """
    folder = find_path(model_path)
    if folder is None or not os.path.isfile(folder / "adapter_config.json"):
        return load_model(model_path, dtype=dtype, device=device, attention=None, task=task, other_dtype=other_dtype)
    quiet_imports()
    try:
        base = base_path(folder)
        quantization = quantization_from(adapter_base(folder).quantization) if as_trained else None
    except ModelError:
        raise
    except ImportError:
        raise ModelError(f"{folder} is an adapter, which needs peft: `pip install 'forge-dist[peft]'`") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{folder} is no adapter that can be loaded: {error}") from error
    try:
        model = load_model(
            base,
            dtype=dtype,
            device=device,
            attention=None,
            task=task,
            quantization=quantization,
            other_dtype=other_dtype,
        )
    except ModelError as error:
        raise ModelError(f"{folder} is an adapter, and its base model cannot be loaded: {error}") from error
    try:
        with quiet_transformers():
            adapted = read_adapter(model, folder)
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder} is no adapter that can be loaded: {error}") from error
    return moved(adapted, device).eval()
