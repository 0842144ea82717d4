"""Scores of rows, by one kernel where the device has it, else by operators.

By operators each of a dozen steps passes over [C, V], the largest matrix of a step. The kernel (`_likelihood_kernel`) is
written in Triton, which comes with torch's builds for GPUs. It is tried on the device before it is used: where Triton is
missing or does not compile it, or its numbers are not those of the operators, these go on. Both hold tensors of the same bytes,
so that a memory plan, which follows the operators, is right for the kernel too.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch

from forge_algos._kernels import try_kernel
from forge_algos.losses._likelihood import Likelihood, Scores, score_in_place

_LEAST_COLUMNS = 1024
"""With fewer, rows are so short that the operators' passes are no matter."""
_BLOCK = 2048
_WARPS = 8
"""A program scores one row, `_BLOCK` columns at a time: the fastest of six pairs on an H200 (0.171 ms for 512 rows of 128,256;
0.173 to 0.203 by the others)."""
_SCORES_CLOSE = 1e-4, 1e-6
_SLOPE_CLOSE = {torch.float32: (1e-4, 1e-7), torch.bfloat16: (2**-7, 1e-7), torch.float16: (2**-10, 1e-7)}
"""Relative and absolute difference from the operators that rounding explains: in 16 bits the numbers next to the nearest; in
float32 a GPU's exponentials, and p - 1 of a likely target."""


def score_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    likelihood: Likelihood,
    weights: torch.Tensor | None,
    into: Scores,
    *,
    slope: torch.dtype | None,
) -> torch.Tensor | None:
    """Write the scores of logits[C, V], and return the slope of their loss.

    Args:
        logits: float32 or float64[C, V], overwritten.
        targets: int64[C], in [0, V).
        likelihood: the loss.
        weights: [C] in the dtype of the logits; multiplies the scores and the slope of each row.
        into: where the scores go.
        slope: the dtype that the slope may have. None: none is computed.

    Returns:
        torch.Tensor: [C, V] in that dtype, or the logits' memory in theirs; None without `slope`.
    """
    if not _has_kernel(logits, weights, slope):
        score_in_place(logits, targets, likelihood, weights, into, slope=slope is not None)
        return None if slope is None else logits
    weights = None if weights is None else weights.contiguous()
    out = logits if slope in {None, logits.dtype} else torch.empty_like(logits, dtype=slope)
    numbers = float(likelihood.dft), likelihood.label_smoothing, likelihood.z_loss
    _score(logits, targets.contiguous(), weights, out, *into, *numbers, slope is not None)
    return None if slope is None else out


@torch.library.custom_op("forge_algos::score_rows", mutates_args={"logits", "out", "losses", "nll", "correct"})
def _score(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    losses: torch.Tensor,
    nll: torch.Tensor,
    correct: torch.Tensor,
    dft: float,
    smoothing: float,
    z_loss: float,
    slope: bool,
) -> None:
    tensors = logits, targets, losses if weights is None else weights, out, losses, nll, correct
    launch(tensors, (dft, smoothing, z_loss), weighted=weights is not None, slope=slope)


@_score.register_fake
def _(*_arguments: object) -> None:
    """Allocate nothing, as the kernel."""


def launch(
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, float, float],
    *,
    weighted: bool,
    slope: bool,
    block: int = _BLOCK,
    warps: int = _WARPS,
) -> None:
    """Run the kernel; arguments as of `_likelihood_kernel.launch`."""
    from forge_algos.losses import _likelihood_kernel as kernel

    kernel.launch(tensors, numbers, weighted=weighted, slope=slope, block=block, warps=warps)


def _has_kernel(logits: torch.Tensor, weights: torch.Tensor | None, slope: torch.dtype | None) -> bool:
    """Return whether the device scores such logits by one kernel."""
    # Tensors without numbers, as of a memory plan, are of another type.
    if type(logits) is not torch.Tensor or logits.device.type == "cpu" or logits.dtype != torch.float32:
        return False
    if len(logits) == 0 or logits.shape[1] <= _LEAST_COLUMNS or logits.stride(1) != 1:
        return False
    return _works(str(logits.device), slope, weights is not None)


def _works(device: str, slope: torch.dtype | None, weighted: bool) -> bool:
    """Compare the kernel with the operators on a device, once."""
    variant = f"{'no slope' if slope is None else f'slope in {slope}'}{', weighted' if weighted else ''}"
    return try_kernel("losses", device, partial(_problem, device, slope, weighted), variant=variant, instead="operators")


def _problem(device: str, slope: torch.dtype | None, weighted: bool) -> str | None:
    if torch.version.hip is not None:
        return "nobody has measured it on HIP"
    # A pair of numbers names NVIDIA's GPUs; other vendors' modules answer otherwise or not at all.
    if not isinstance(torch.get_device_module(device).get_device_capability(device), tuple):
        return "nobody has measured it on other than NVIDIA's GPUs"
    return None if agrees(device, slope, weighted=weighted) else "its numbers are not those of the operators"


def agrees(device: str, slope: torch.dtype | None, *, weighted: bool) -> bool:
    """Return whether kernel and operators agree on a device, in every variant of the loss."""
    options = itertools.product((False, True), (0.0, 0.1), (0.0, 1e-4))
    variants = [Likelihood(dft=dft, label_smoothing=smoothing, z_loss=z_loss) for dft, smoothing, z_loss in options]
    # A kernel is compiled anew for sizes that are multiples of 16 and for those that are not.
    for columns, likelihood in itertools.product((2 * _BLOCK + 48, _BLOCK + 7), variants):
        drawn = torch.linspace(0, 900, 5 * columns, device=device).view(5, columns).sin_().mul_(4)
        targets = torch.tensor([0, columns - 1, 3, _BLOCK, _BLOCK - 1], device=device)
        # As likely as all others together, so that no slope is too small to be compared; one row far from zero, one certain.
        drawn.scatter_(1, targets[:, None], 12)
        drawn[1] += 1000
        drawn[2, 3] = 60
        weights = torch.linspace(0, 2, 5, device=device) if weighted else None
        exact, found = ([torch.empty(5, device=device) for _ in range(3)] for _ in range(2))
        logits = drawn.clone()
        score_in_place(logits, targets, likelihood, weights, (exact[0], exact[1], exact[2]), slope=slope is not None)
        out = drawn if slope in {None, torch.float32} else torch.empty_like(drawn, dtype=slope)
        numbers = float(likelihood.dft), likelihood.label_smoothing, likelihood.z_loss
        _score(drawn, targets, weights, out, *found, *numbers, slope is not None)
        pairs = [(ours, theirs, _SCORES_CLOSE) for ours, theirs in zip(found, exact, strict=True)]
        if slope is not None:
            pairs.append((out.float(), logits, _SLOPE_CLOSE[slope]))
        if not all(torch.allclose(ours, theirs, rtol=rtol, atol=atol) for ours, theirs, (rtol, atol) in pairs):
            return False
    return True
