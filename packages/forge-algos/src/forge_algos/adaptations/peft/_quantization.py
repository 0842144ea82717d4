"""Settings → how qlora's base is loaded in 4 bits (arXiv 2305.14314); and whether a model was."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_algos._errors import AdapterError, MissingPackageError
from forge_algos.settings._adapter import Adapter, AdapterSettings

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# bitsandbytes' class of weights, by name: it need not be installed to ask.
_IN_4_BITS = "Params4bit"


def quantization_config(settings: AdapterSettings, compute_dtype: torch.dtype) -> "BitsAndBytesConfig | None":
    """What `from_pretrained(..., quantization_config=)` is given for the base of `settings`; None unless adapter="qlora".

    The head, and what shares its weight, is never quantised: transformers leaves it out.

    Args:
        settings: `quant_type` and `double_quant` are read.
        compute_dtype: in which the linear layers multiply, once their weights are unpacked; float32 is exact and slow.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    if settings.adapter != "qlora":
        return None
    if find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            "adapter=qlora needs bitsandbytes: `pip install 'forge-algos[bitsandbytes]'`, or use adapter=lora"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.quant_type,
        bnb_4bit_use_double_quant=settings.double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def check_quantized(model: nn.Module, adapter: Adapter) -> None:
    """Refuse qlora on a base that is not in 4 bits, and everything else on one that is quantised; keep a base in 4 bits as it is.

    Raises:
        AdapterError: model and adapter do not go together; the message says which would.
    """
    if adapter == "qlora" and not _in_4_bits(model):
        raise AdapterError(
            f"adapter=qlora trains beside a base in 4 bits, and {type(model).__name__}'s weights are not quantised: load it with "
            "quantization_config=forge_algos.quantization_config(settings, compute_dtype), or use adapter=lora"
        )
    if adapter != "qlora" and (_in_4_bits(model) or getattr(model, "is_quantized", False)):
        raise AdapterError(
            f"{type(model).__name__}'s weights are quantised, which adapter={adapter} does not expect: use adapter=qlora (4 bits), or "
            "load the model without a quantization_config"
        )
    if adapter == "qlora":
        _keep_as_loaded(model)


def _keep_as_loaded(model: nn.Module) -> None:
    """See to it that an evaluation leaves the weights alone.

    On processors with AVX512-BF16 bitsandbytes 0.50 packs a layer's weight anew, with rounding, at its first forward in evaluation mode;
    after that it computes in bfloat16 and lets no gradient through.
    """
    for name, module in model.named_modules():
        if type(getattr(module, "weight", None)).__name__ != _IN_4_BITS:
            continue
        layer: Any = module
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise AdapterError(
                f"{name} was evaluated on the CPU, for which bitsandbytes packed its weight in a way that cannot be trained through: load "
                "the model again, and adapt it before its first forward"
            )
        layer.support_avx512bf16_for_cpu = False


def _in_4_bits(model: nn.Module) -> bool:
    return any(type(p).__name__ == _IN_4_BITS for p in model.parameters())
