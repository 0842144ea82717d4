"""Triton kernel of the losses of rows: it reads logits twice, and writes the slope once.

Imported only where Triton is.
"""

from typing import Any

import torch
import triton
import triton.language as tl


# One number a row is read or written there: whether a chunk begins at a multiple of 16 bytes is no reason to compile anew.
@triton.jit(do_not_specialize_on_alignment=["targets", "weights", "losses", "nlls", "corrects"])
def _score_row(
    logits: tl.tensor,
    targets: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    losses: tl.tensor,
    nlls: tl.tensor,
    corrects: tl.tensor,
    logits_stride: tl.tensor,
    out_stride: tl.tensor,
    columns: tl.tensor,
    one_over_columns: tl.tensor,
    dft: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    WEIGHTED: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < columns)
    own = tl.load(logits + target, mask=inside, other=float("nan"))
    lanes = tl.arange(0, BLOCK)
    blocks = (columns + BLOCK - 1) // BLOCK

    # Each lane has a maximum of its own and a sum relative to it, so that lanes meet once a row. The first maximum is the least
    # finite number: from -inf the difference of two would be NaN.
    top_B = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total_B = tl.zeros((BLOCK,), tl.float32)
    apart_B = tl.zeros((BLOCK,), tl.float32)
    ahead_B = tl.zeros((BLOCK,), tl.float32)
    for block in range(blocks):
        places = block * BLOCK + lanes
        there = places < columns
        x = tl.load(logits + places, mask=there, other=-float("inf"))
        top = tl.maximum(top_B, x)
        total_B = total_B * tl.exp(top_B - top) + tl.exp(x - top)
        top_B = top
        apart_B += tl.where(there, own - x, 0.0)
        ahead_B += tl.where((x == own) & (places < target), 1.0, 0.0)
    top = tl.max(top_B, 0)
    total = tl.sum(total_B * tl.exp(top_B - top), 0)

    log_total = tl.log(total)
    nll = log_total - (own - top)
    weight = tl.where(dft > 0, tl.exp(-nll), 1.0)
    # Where there is none, no 0 · ∞ of a logit that is -inf.
    smoothed = tl.where(smoothing > 0, smoothing * (tl.sum(apart_B, 0) * one_over_columns), 0.0)
    normaliser = log_total + top
    token = 1.0
    if WEIGHTED:
        token = tl.load(weights + row)
    tl.store(losses + row, token * (weight * (nll + smoothed) + z_loss * normaliser * normaliser))
    tl.store(nlls + row, token * nll)
    tl.store(corrects + row, token * tl.where((own == top) & (tl.sum(ahead_B, 0) == 0), 1.0, 0.0))

    if SLOPE:
        out += row * out_stride
        # A target outside of the vocabulary makes NaN, not a plausible gradient.
        scale = tl.where(inside, token * (weight + 2 * z_loss * normaliser) / total, float("nan"))
        less = token * weight * smoothing * one_over_columns
        at_target = token * weight * (smoothing - 1)
        # From the end: what was read last is in the cache.
        for block in range(blocks):
            places = (blocks - 1 - block) * BLOCK + lanes
            there = places < columns
            x = tl.load(logits + places, mask=there, other=-float("inf"))
            slope = tl.exp(x - top) * scale - less + tl.where(places == target, at_target, 0.0)
            tl.store(out + places, slope.to(out.dtype.element_ty), mask=there)


def launch(
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[float, float, float],
    *,
    weighted: bool,
    slope: bool,
    block: int,
    warps: int,
) -> None:
    """Run the kernel on logits, targets, weights, slope, losses, nll, and correct.

    Args:
        tensors: these seven; any for the weights without `weighted`, and for the slope without `slope`.
        numbers: dft, label_smoothing and z_loss of a `Likelihood`.
        weighted: whether the weights are read.
        slope: whether the slope is written.
        block: columns that a program takes at a time, a power of two.
        warps: of 32 threads each, in a program.
    """
    logits, _, _, out, *_ = tensors
    (rows, columns), strides = logits.shape, (logits.stride(0), out.stride(0))
    flags: dict[str, Any] = {"WEIGHTED": weighted, "SLOPE": slope, "BLOCK": block, "num_warps": warps}
    # Triton launches on the current device, torch where the tensors are.
    with torch.accelerator.device_index(logits.device.index):
        _score_row[(rows,)](*tensors, *strides, columns, 1 / columns, *numbers, **flags)
