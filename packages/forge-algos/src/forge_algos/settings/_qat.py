"""Setting of quantization-aware training; no torch."""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import one_of

QATType = Literal["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

_type_or_none: Any = attrs.validators.optional(one_of(QATType))


@attrs.frozen(kw_only=True)
class QATSettings:
    """Quantization-aware training: what weights are rounded to while a model computes.

    >>> QATSettings(qat="q4_0").qat
    'q4_0'
    """

    qat: QATType | None = attrs.field(default=None, validator=_type_or_none)
    """Quantization-aware training for GGUF files of this type: the weights that such a file rounds are rounded so wherever the
    model computes, and their gradient moves the unrounded ones (straight-through, arXiv 1308.3432). Held-out figures are those
    of the rounded weights, which `forge export --format gguf` then writes; of lora, rslora and dora that
    is the merged model."""
