"""Loading a base in 4 bits (arXiv 2305.14314) or 8 (2208.07339), and checking it."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_algos._errors import AdapterError, MissingPackageError
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Names of bitsandbytes' classes of weights, which need not be installed here.
_IN_4_BITS, _IN_8_BITS = "Params4bit", "Int8Params"


def quantization_config(settings: AdapterSettings, compute_dtype: torch.dtype) -> "BitsAndBytesConfig | None":
    """Make the `quantization_config` of `from_pretrained` for the base; None for other adapters.

    The head, and what shares its weight, is never quantised: transformers leaves it out.

    Args:
        settings: `quant_type` and `double_quant` are read.
        compute_dtype: in which layers in 4 bits multiply, once their weights are unpacked; float32 is exact and slow. Those
            in 8 bits multiply in the dtype of their inputs.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    if not ADAPTERS[settings.adapter].quantized:
        return None
    if find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            f"adapter={settings.adapter} needs bitsandbytes: `pip install 'forge-algos[bitsandbytes]'`, or use adapter=lora"
        )
    from transformers import BitsAndBytesConfig

    if settings.quant_type == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quant_type,
        bnb_4bit_use_double_quant=settings.double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def check_quantized(model: nn.Module, settings: AdapterSettings) -> None:
    """Refuse qlora and qoft on a base that is not in their bits, and others on a quantised one.
    A quantised base is kept as it was loaded.

    Raises:
        AdapterError: model and adapter do not go together; the message names one that does.
    """
    adapter, found = settings.adapter, _bits(model)
    wanted = (8 if settings.quant_type == "int8" else 4) if ADAPTERS[adapter].quantized else None
    if wanted and not found:
        raise AdapterError(
            f"adapter={adapter} trains beside a base in 4 or 8 bits, and {type(model).__name__}'s weights are not quantised: "
            "load it with quantization_config=forge_algos.quantization_config(settings, compute_dtype), or use adapter=lora"
        )
    if not wanted and (found or getattr(model, "is_quantized", False)):
        raise AdapterError(
            f"{type(model).__name__}'s weights are quantised, which adapter={adapter} does not expect: use adapter=qlora or "
            "qoft (4 or 8 bits), or load the model without a quantization_config"
        )
    if wanted != found:
        raise AdapterError(
            f"quant_type={settings.quant_type} is a base in {wanted} bits, and {type(model).__name__}'s weights are in "
            f"{found}: set quant_type={'int8' if found == 8 else 'nf4 or fp4'}, or load the model with "
            "quantization_config=forge_algos.quantization_config(settings, compute_dtype)"
        )
    if wanted:
        _keep_as_loaded(model)


def _keep_as_loaded(model: nn.Module) -> None:
    """Let layers compute one product in training and in evaluation, with a gradient.

    On processors with AVX512-BF16 bitsandbytes 0.50 packs a layer's 4-bit weight anew, with rounding, at its first forward in
    evaluation mode; after that it computes in bfloat16 and lets no gradient through.

    In 8 bits it multiplies by the dequantized weight on the CPU in training mode alone. Elsewhere it rounds the inputs to 8
    bits too: one percent of the product, and a gradient that is not the product's. And the columns that LLM.int8 spares from
    it (section 3.2) are those that are large in any row, so that a sample's numbers would depend on its neighbours in a row.
    """
    for name, module in model.named_modules():
        layer: Any = module
        kind = type(getattr(module, "weight", None)).__name__
        if kind == _IN_8_BITS and not hasattr(layer, "scales"):
            layer.__class__ = _exact_linear()
            # A buffer: shards and copies of a weight lack its attributes.
            layer.register_buffer("scales", layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB, persistent=False)
            layer.weight.SCB = layer.scales
            layer.weight.CB = None  # the codes again, which would stay where they are when the weight moves
            layer.state.reset_grads()
        if kind != _IN_4_BITS:
            continue
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise AdapterError(
                f"{name} was evaluated on the CPU, for which bitsandbytes packed its weight in a way that cannot be trained "
                "through: load the model again, and adapt it before its first forward"
            )
        layer.support_avx512bf16_for_cpu = False


class _Product(torch.autograd.Function):
    """Product with dequantized weights, of which the codes alone are kept for the backward pass."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        return nn.functional.linear(x, dequantized(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        codes, scales = ctx.saved_tensors
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return grad @ dequantized(codes, scales, grad.dtype), None, None, of_bias


def dequantized(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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


def _bits(model: nn.Module) -> int | None:
    """Return the bits of a weight of bitsandbytes' linear layers; None where there is none."""
    kinds = {type(p).__name__ for p in model.parameters()}
    return 4 if _IN_4_BITS in kinds else 8 if _IN_8_BITS in kinds else None
