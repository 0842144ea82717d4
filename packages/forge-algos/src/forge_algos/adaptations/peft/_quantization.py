"""Loading qlora's base in 4 bits (arXiv 2305.14314), and checking that it was."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_algos._errors import AdapterError, MissingPackageError
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS, Adapter

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Name of bitsandbytes' class of weights, which need not be installed here.
_IN_4_BITS = "Params4bit"


def quantization_config(settings: AdapterSettings, compute_dtype: torch.dtype) -> "BitsAndBytesConfig | None":
    """Make the `quantization_config` of `from_pretrained` for the base; None without qlora.

    The head, and what shares its weight, is never quantised: transformers leaves it out.

    Args:
        settings: `quant_type` and `double_quant` are read.
        compute_dtype: in which the linear layers multiply, once their weights are unpacked; float32 is exact and slow.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    if not ADAPTERS[settings.adapter].in_4_bits:
        return None
    if find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            f"adapter={settings.adapter} needs bitsandbytes: `pip install 'forge-algos[bitsandbytes]'`, or use adapter=lora"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quant_type,
        bnb_4bit_use_double_quant=settings.double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def check_quantized(model: nn.Module, adapter: Adapter) -> None:
    """Refuse qlora on a base that is not in 4 bits, and any other adapter on a quantised one.
    A base in 4 bits is kept as it was loaded.

    Raises:
        AdapterError: model and adapter do not go together; the message names one that does.
    """
    wanted = ADAPTERS[adapter].in_4_bits
    if wanted and not _in_4_bits(model):
        raise AdapterError(
            f"adapter={adapter} trains beside a base in 4 bits, and {type(model).__name__}'s weights are not quantised: load "
            "it with quantization_config=forge_algos.quantization_config(settings, compute_dtype), or use adapter=lora"
        )
    if not wanted and (_in_4_bits(model) or getattr(model, "is_quantized", False)):
        raise AdapterError(
            f"{type(model).__name__}'s weights are quantised, which adapter={adapter} does not expect: use adapter=qlora (4 "
            "bits), or load the model without a quantization_config"
        )
    if wanted:
        _keep_as_loaded(model)


def _keep_as_loaded(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking the weights at an evaluation.

    On processors with AVX512-BF16 bitsandbytes 0.50 packs a layer's weight anew, with rounding, at its first forward in
    evaluation mode; after that it computes in bfloat16 and lets no gradient through.
    """
    for name, module in model.named_modules():
        if type(getattr(module, "weight", None)).__name__ != _IN_4_BITS:
            continue
        layer: Any = module
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise AdapterError(
                f"{name} was evaluated on the CPU, for which bitsandbytes packed its weight in a way that cannot be trained "
                "through: load the model again, and adapt it before its first forward"
            )
        layer.support_avx512bf16_for_cpu = False


def _in_4_bits(model: nn.Module) -> bool:
    return any(type(p).__name__ == _IN_4_BITS for p in model.parameters())
