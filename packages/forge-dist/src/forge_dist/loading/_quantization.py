"""Bases quantized by bitsandbytes: how one is read, and read the same way a second time."""

import copy
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from forge_dist._errors import ModelError
from forge_dist.loading._modalities import modules_beside_language
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

    def arguments(self, model_path: str, task: Task, outline: "PreTrainedModel | None" = None) -> dict[str, Any]:
        """Return the further arguments of `from_pretrained`.

        Args:
            model_path: for errors.
            task: what is loaded.
            outline: the same model without data, where it is one of several modalities.

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
        if outline is not None:
            config.llm_int8_skip_modules = _kept(outline, config, task)
        elif makes_head(task):
            # A head of one number, or one a label, new and trained: transformers spares only those that give logits.
            config.llm_int8_skip_modules = sorted({*(config.llm_int8_skip_modules or ()), HEAD})
        return {"quantization_config": config, "device_map": {"": self.device}}


def quantize_outline(model: "PreTrainedModel", config: "QuantizationConfigMixin", task: Task) -> None:
    """Put quantized layers where a quantized load has them; on the meta device."""
    from transformers.integrations import replace_with_bnb_linear

    own: Any = config
    replace_with_bnb_linear(model, modules_to_not_convert=_kept(model, own, task), quantization_config=own)
    for module in int8_layers(model).values():
        weight, scales = module.weight, torch.empty(module.out_features, device="meta")
        codes = torch.empty_like(weight, dtype=torch.int8)
        module.weight = type(weight)(codes, requires_grad=False, has_fp16_weights=False, SCB=scales)
    multiply_exactly(model)
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


def _kept(model: "PreTrainedModel", config: Any, task: Task) -> list[str]:
    """Return names of modules that keep their bits: heads, and what is beside the language.

    Small as it is, a vision tower in 4 bits would show the language part other images than the model sees later.
    """
    from transformers.quantizers.base import get_keys_to_not_convert

    named = config.llm_int8_skip_modules or get_keys_to_not_convert(model)
    return sorted({*named, *([HEAD] if makes_head(task) else []), *modules_beside_language(model)})


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


def keep_as_loaded(model: "PreTrainedModel") -> None:
    """Let a quantized model's layers compute one product in both modes, with a gradient.

    Of 4 bits, on CPUs with bfloat16 instructions, a forward in eval mode would repack the weights for a kernel that has no
    backward: what is trained after it would silently learn nothing. That kernel also computes in bfloat16.
    """
    for module in four_bit_layers(model).values():
        module.support_avx512bf16_for_cpu = False
    multiply_exactly(model)


def multiply_exactly(model: nn.Module) -> None:
    """Let layers in 8 bits multiply by what their codes stand for, in any mode, on any device.

    bitsandbytes does so on the CPU in training mode alone. Elsewhere it rounds the inputs to 8 bits too: a percent of the
    product, and a gradient that is not the product's. And the columns that LLM.int8 spares from it (arXiv 2208.07339, section
    3.2) are those that are large in any row, so that a sample's numbers would depend on its neighbours in a packed row.

    Raises:
        ModelError: a weight has numbers that float16 does not have.
    """
    for name, module in int8_layers(model).items():
        # Without scales it is no layer of the codes: a head that shares the embedding's weight.
        if type(module) is sys.modules["bitsandbytes"].nn.Linear8bitLt and getattr(module.weight, "SCB", None) is not None:
            if not module.weight.is_meta and not module.weight.SCB.isfinite().all():
                raise ModelError(
                    f"{name}.weight has numbers beyond 65,504 or not finite, and bitsandbytes makes codes of 8 bits from "
                    "float16: use quant_type=nf4, or adapter=lora"
                )
            module.__class__ = _exact_linear()
            # A buffer: shards and copies of a weight lack its attributes.
            module.register_buffer("scales", module.weight.SCB, persistent=False)
            module.weight.CB = None  # the codes again, which would stay where they are when the weight moves


class _Product(torch.autograd.Function):
    """Product with dequantized weights, of which the codes alone are kept for the backward pass."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        return nn.functional.linear(x, _dequantized(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        codes, scales = ctx.saved_tensors
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad @ _dequantized(codes, scales, grad.dtype), None, None, of_bias


def _dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, M] of int8 codes [N, M] and scales float32[N], rounded once.

    A scale is the largest |weight| of its row, whose code is ±127.
    """
    return codes.to(dtype).mul_(scales.unsqueeze(1) * (1 / 127))


@cache
def _exact_linear() -> type[nn.Module]:
    """Make the class of layers in 8 bits.

    Importing bitsandbytes waits for a model that needs it.
    """
    import bitsandbytes

    class Int8Linear(bitsandbytes.nn.Linear8bitLt):
        """bitsandbytes' layer in 8 bits, with the product of its dequantized weights."""

        scales: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = x.device.type
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                x = x.to(torch.get_autocast_dtype(kind))
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return _Product.apply(x, self.weight, self.scales, bias)

    return Int8Linear


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Return name → linear layer in 4 bits."""
    return _layers(model, "Linear4bit")


def int8_layers(model: nn.Module) -> dict[str, Any]:
    """Return name → linear layer in 8 bits."""
    return _layers(model, "Linear8bitLt")


def _layers(model: nn.Module, kind: str) -> dict[str, Any]:
    bitsandbytes: Any = sys.modules.get("bitsandbytes")  # making such a layer has imported it
    if bitsandbytes is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, getattr(bitsandbytes.nn, kind))}
