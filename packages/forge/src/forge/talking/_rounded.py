"""Export of a run with `qat` → the model of the GGUF file that the run was trained for.

The run's own figures are of that model, and so is what it is asked, scored and compared by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import forge_accel
import forge_algos
import forge_dist
from forge.saving._directories import trained_for


class Rounding(NamedTuple):
    """What the weights of an export are rounded to as they are read."""

    kind: Any
    """Type of the file; None for weights as they are."""
    said: str
    """The same in words; "" where there is nothing to say."""


def rounding_of(directory: str | Path) -> Rounding:
    """Return what an export's weights are rounded to; without gguf they are read as they are."""
    if (kind := trained_for(directory)) is None:
        return Rounding(None, "")
    try:
        forge_dist.require_gguf()
    except forge_dist.ModelError as error:
        return Rounding(None, f"WARNING: weights as they are, and not those of the {kind} file it was trained for: {error}")
    return Rounding(kind, f"weights rounded to {kind}, as `forge export --format gguf` writes them")


def load_rounded(directory: str, rounding: Rounding, *, dtype: Any, device: Any, other_dtype: Any = None) -> Any:
    """Load a model for inference, an adapter merged, with its weights rounded.

    Args:
        directory: as of `forge_dist.load_trained`.
        rounding: of a run; where it has no kind, weights are as they are.
        dtype: torch dtype of the weights, to which they are rounded last.
        device: where they lie.
        other_dtype: as of `forge_dist.load_trained`.

    """
    if rounding.kind is None:
        return forge_dist.load_trained(directory, dtype=dtype, device=device, other_dtype=other_dtype)
    # Merged on the CPU, as an export does: another device adds in another order.
    model: Any = forge_dist.load_trained(directory, dtype=forge_accel.float32, device="cpu")
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload(safe_merge=True).eval()
    model = model.to(device)
    forge_algos.QuantizedWeights(model, forge_dist.rounded_weights(model, rounding.kind)).round()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not the buffers, whose angles need float32
    return model
