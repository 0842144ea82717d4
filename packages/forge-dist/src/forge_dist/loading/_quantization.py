"""A base model that is held in fewer bits, as bitsandbytes does it: how it is read, and read alike a second time."""

import copy
import importlib.util
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._model_path import Task
from forge_dist.loading._task import HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


@attrs.frozen
class Quantized:
    """How a base is held in fewer bits, and where."""

    config: "QuantizationConfigMixin"
    """transformers' settings of it."""

    device: torch.device
    """Where the weights are quantized, and stay."""

    def arguments(self, model_path: str, task: Task) -> dict[str, Any]:
        """What `from_pretrained` is given beside the rest.

        Raises:
            ModelError: transformers would need a package that is not there.
        """
        missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ModelError(
                f"model_path {model_path}: a quantized base needs {' and '.join(missing)}: `pip install 'forge-dist[bitsandbytes]'`"
            )
        config: Any = copy.deepcopy(self.config)  # transformers writes into it
        if task == "reward":
            # A head of one number, new and trained: transformers spares only those that give logits.
            config.llm_int8_skip_modules = sorted({*(config.llm_int8_skip_modules or ()), HEAD})
        return {"quantization_config": config, "device_map": {"": self.device}}


def quantization_of(model: "PreTrainedModel") -> "QuantizationConfigMixin | None":
    """What `model` was quantized by; None where it was not."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    return None if quantizer is None else quantizer.quantization_config


def quantization_from(noted: dict[str, Any] | None) -> "QuantizationConfigMixin | None":
    """The settings of transformers' that `to_dict` gave."""
    if noted is None:
        return None
    from transformers.quantizers.auto import AutoQuantizationConfig

    return AutoQuantizationConfig.from_dict(noted)


def settle_quantized(model: "PreTrainedModel") -> None:
    """Keep the weights of a model that was read quantized as they were read.

    On CPUs with bfloat16 instructions a forward in eval mode would lay them out anew, for a kernel that has no backward: what is trained
    after it would learn nothing, without a word. That kernel also computes in bfloat16.
    """
    for module in four_bit_layers(model).values():
        module.support_avx512bf16_for_cpu = False


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Name → linear layer in 4 bits."""
    bitsandbytes: Any = sys.modules.get("bitsandbytes")  # whoever made such a layer has imported it
    if bitsandbytes is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}


def without_codes(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` without the weights in 4 bits of `model` and what bitsandbytes notes beside them."""
    coded = {f"{name}.weight" for name in four_bit_layers(model)}
    return {
        name: tensor
        for name, tensor in state.items()
        if name not in coded and name.rpartition(".weight.")[0] + ".weight" not in coded
    }
