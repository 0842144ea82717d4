"""Number of rows that a model's head scores at once, as the machine has it."""

from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model
from forge_algos.losses._rows import CHUNK_ROWS

_NAME = "_rows_at_once"
"""Attribute of a causal model: the number."""


def score_rows_at_once(model: nn.Module, rows: int) -> None:
    """Set the largest number of rows whose logits the losses of a model hold at once.

    Logits of C rows cost 4 · C · V bytes; between two chunks the gradient [V, D] of the head is read and written again. 512 by
    default, which a CPU and its caches like best. Losses and gradients are the same within the rounding of their sums.

    Args:
        model: bare or wrapped, and so all that is put around it later.
        rows: 1 or more.

    Raises:
        LossError: `rows` is no whole number from 1.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise LossError(f"rows must be a whole number from 1, got {rows!r}")
    setattr(causal_model(model), _NAME, rows)


def rows_at_once(model: nn.Module) -> int:
    """Return the number that `score_rows_at_once` set, or the default."""
    return getattr(causal_model(model), _NAME, CHUNK_ROWS)
