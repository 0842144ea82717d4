"""What was trained → a model to use: a model directory as it is, a LoRA directory on the base model that it names."""

import os
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from forge_dist._adapter import base_path, read_adapter
from forge_dist._errors import ModelError
from forge_dist._load import load_model
from forge_dist._model_path import Task, find
from forge_dist._quiet import quiet

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def load_trained(
    model_path: str, *, dtype: torch.dtype, device: torch.device | str, task: Task = "causal"
) -> "PreTrainedModel | PeftModel":
    """Load what `export_model` wrote, or any model that `load_model` takes, for inference: eval mode, sdpa attention where the architecture
    has it and eager where not.

    An adapter directory becomes a PeftModel on its base model, which must still be where adapter_config.json says.

    Raises:
        ModelError: as `load_model`; an adapter without its base model or with weights that do not fit its configuration; peft missing.
    """
    folder = find(model_path)
    if folder is None or not os.path.isfile(folder / "adapter_config.json"):
        return load_model(model_path, dtype=dtype, device=device, attention=None, task=task)
    try:
        base = base_path(folder)
    except ImportError:
        raise ModelError(f"{folder} is a LoRA adapter, which needs peft: `pip install 'forge-dist[peft]'`") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{folder} is no adapter that can be loaded: {error}") from error
    try:
        model = load_model(base, dtype=dtype, device=device, attention=None, task=task)
    except ModelError as error:
        raise ModelError(f"{folder} is a LoRA adapter, and its base model cannot be loaded: {error}") from error
    try:
        with quiet():
            adapted = read_adapter(model, folder)
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder} is no adapter that can be loaded: {error}") from error
    return adapted.to(device).eval()
