"""Bases quantized by bitsandbytes: how one is read, and read the same way a second time."""

import copy
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import Task
from forge_dist.loading._task import HEAD, makes_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


@attrs.frozen
class QuantizedLoad:
    """Quantization of a base while it is read."""

    config: "QuantizationConfigMixin"
    """transformers' configuration of it."""

    device: torch.device
    """Device on which the weights are quantized, and stay."""

    def arguments(self, model_path: str, task: Task) -> dict[str, Any]:
        """Return the further arguments of `from_pretrained`.

        Raises:
            ModelError: a package that transformers needs is not installed.
        """
        missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ModelError(
                f"model_path {model_path}: a quantized base needs {' and '.join(missing)}: `pip install "
                "'forge-dist[bitsandbytes]'`"
            )
        config: Any = copy.deepcopy(self.config)  # transformers writes into it
        if makes_head(task):
            # A head of one number, or one a label, new and trained: transformers spares only those that give logits.
            config.llm_int8_skip_modules = sorted({*(config.llm_int8_skip_modules or ()), HEAD})
        return {"quantization_config": config, "device_map": {"": self.device}}


def quantize_outline(model: "PreTrainedModel", config: "QuantizationConfigMixin", task: Task) -> None:
    """Put layers in 4 bits in the places in which a quantized load has them; on the meta device."""
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    own: Any = config
    kept = {*(own.llm_int8_skip_modules or get_keys_to_not_convert(model)), *([HEAD] if makes_head(task) else [])}
    replace_with_bnb_linear(model, modules_to_not_convert=sorted(kept), quantization_config=own)
    functional = sys.modules["bitsandbytes"].functional
    # It keeps its table of numbers for all later calls, and must make it where there are numbers.
    functional.quantize_blockwise(torch.zeros(256))
    for module in four_bit_layers(model).values():
        weight = module.weight
        options = {name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
        codes, state = functional.quantize_4bit(weight.data, **options)
        module.weight = type(weight)(
            codes, requires_grad=False, quant_state=state, bnb_quantized=True, module=module, **options
        )


def quantization_of(model: "PreTrainedModel") -> "QuantizationConfigMixin | None":
    """Return the configuration that `model` was quantized by; None where it was not."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    return None if quantizer is None else quantizer.quantization_config


def quantization_from(stored: dict[str, Any] | None) -> "QuantizationConfigMixin | None":
    """Rebuild transformers' configuration from its `to_dict`."""
    if stored is None:
        return None
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(stored)


def disable_repacking(model: "PreTrainedModel") -> None:
    """Keep the layout of a quantized model's weights.

    On CPUs with bfloat16 instructions a forward in eval mode would repack them for a kernel that has no backward: what is
    trained after it would silently learn nothing. That kernel also computes in bfloat16.
    """
    for module in four_bit_layers(model).values():
        module.support_avx512bf16_for_cpu = False


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Return name → linear layer in 4 bits."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")  # making such a layer has imported it
    if bitsandbytes is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}
