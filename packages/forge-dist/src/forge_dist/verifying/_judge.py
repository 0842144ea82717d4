"""Compare the losses (or rewards) of a model and of its export, within tolerances."""

import math
from pathlib import Path

from forge_dist._errors import ExportError
from forge_dist.verifying._loss import Score
from forge_dist.verifying._result import ExportCheck

EXACT = 1e-5
"""Tolerance for the same weights and kernels in float32: the losses are in fact equal; this allows sums in another order."""

PADDED = 1e-4
"""Tolerance for rewards in a padded batch, float32: a mask means other kernels, whose rounding every layer passes on."""

HALF = 2e-2
"""Tolerance for a model that is held, and so compared, in 16 bits."""

ROUNDED = 1e-1
"""Tolerance for weights that the export rounded to 16 bits.

Measured on a 135M-parameter model over 70 tokens: 4e-3, and more over fewer tokens. The bound has little to catch (an overflow
of float16): the bits are proved before, and the configuration with the unrounded weights to EXACT.
"""


def judge(
    path: Path, ours: Score, theirs: Score, same_weights: Score, *, arithmetic: float, rounded: bool, tensors: int
) -> ExportCheck:
    """Return the result of a check, if all losses are close.

    Args:
        path: of the export, for messages.
        ours: score of the model in memory.
        theirs: score of its export.
        same_weights: score of the export with the unrounded weights in memory.
        arithmetic: tolerance of the arithmetic: EXACT or HALF.
        rounded: whether the export rounded a tensor; then `theirs` may differ by ROUNDED.
        tensors: number of tensors in the files.

    Raises:
        ExportError: `ours` is not finite, or another score differs from it by more than its tolerance.
    """
    if not math.isfinite(ours.mean):
        what = "a hidden state" if ours.hidden else "the mean reward" if ours.rewards else "the loss"
        raise ExportError(
            f"{path}: {what} of the model in memory is {ours.mean}, so the training diverged; use an earlier export"
        )
    tolerance = ROUNDED if rounded else arithmetic
    compared = [("", theirs.values, tolerance), (" even with the weights in memory", same_weights.values, arithmetic)]
    if theirs.padded:
        compared.append((" in a padded batch", same_weights.padded, max(arithmetic, PADDED)))
    unit = "as the reward of a sample" if ours.rewards else "nats per token"
    if ours.hidden:
        unit = "of the largest number in a mean hidden state"
    for what, values, allowed in compared:
        expected, found = max(zip(ours.values, values, strict=True), key=lambda pair: _finite_difference(*pair))
        if not difference(expected, found) <= allowed:
            raise ExportError(
                f"{path}{what} does not compute what the model in memory does: {found:.8g} {unit} instead of "
                f"{expected:.8g} (a difference of {difference(expected, found):.3g}, allowed {allowed:g})"
            )
    return ExportCheck(
        in_memory=ours.mean,
        reloaded=theirs.mean,
        difference=max(map(difference, ours.values, theirs.values)),
        tolerance=tolerance,
        loss_tokens=ours.count,
        tensors=tensors,
    )


def difference(expected: float, found: float) -> float:
    """Return how far two losses (nats per token) or rewards differ, relative to `expected`.

    Absolute where `expected` is below 1: a model that has memorized its samples has a loss near 0, of which rounding errors in
    the logits are any multiple.

    >>> difference(4.0, 5.0), difference(0.5, 0.25)
    (0.25, 0.25)
    """
    return abs(found - expected) / max(abs(expected), 1.0)


def _finite_difference(expected: float, found: float) -> float:
    apart = difference(expected, found)
    return apart if math.isfinite(apart) else math.inf
