"""Triton kernel of AdamW with moments in 8 bits, which reads and writes each number once.

bitsandbytes' kernel for CUDA looks for a number's code by halves, eight loads one after the other for each moment, and takes
seven times as long as memory does. Here the code follows from the number: its decade, and its place within that. Weights in
bfloat16 are rounded stochastically on the way, with the bits of `_rounding`.

Imported only where Triton is.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

BLOCKS = 4
"""Blocks of 256 numbers that a program moves in turn. It is one warp, so that a block's largest needs no barrier."""
MOST_PROGRAMS = 65_535
"""Of CUDA's grids, in all dimensions but the first."""
LEAST = tl.constexpr(1e-37)
LOG10_OF_2, LOG2_OF_10 = tl.constexpr(math.log10(2)), tl.constexpr(math.log2(10))


@triton.jit
def _place(x: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """Return the place of the value nearest to x in [0, 1]; zero has place 0.

    The values are of a dynamic map (arXiv 1511.04561): those of decade i, from 10^(i-7) to 10^(i-6), lie in the middle of
    FIRST · 2^i equal parts; the last value is 1.
    """
    # The decade by the float's bits, which rise with its logarithm: right, or one too low, where y is above 1 then.
    bits = tl.maximum(x, 1e-8).to(tl.int32, bitcast=True).to(tl.float32)
    lower = tl.minimum(tl.maximum(127 * LOG10_OF_2 - bits * (LOG10_OF_2 / 2**23), 0.0), 6.0).to(tl.int32)
    y = x * tl.exp2(lower.to(tl.float32) * LOG2_OF_10)
    above = y > 1.0
    y = tl.where(above, y * 0.1, y)
    decade = 6 - lower + tl.where(above, 1, 0)
    items = FIRST << decade
    an_item = ((127 - decade) << 23).to(tl.float32, bitcast=True) * (1.0 / FIRST)
    part = ((y - 0.1) * (items.to(tl.float32) * (1.0 / 0.9))).to(tl.int32)
    part = tl.minimum(tl.maximum(part, 0), items - 1)
    # Halfway to the value before: the last of the lower decade, or zero.
    halfway = tl.where(decade > 0, 0.1 + 0.18 * an_item, 0.05 + 0.225 * an_item)
    place = items + part + (1 - FIRST) - tl.where(y < halfway, 1, 0)
    return tl.where(x > 1.0 - 0.225 / (64 * FIRST), 1 + 127 * FIRST, place)


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """Return lowbias32 of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["first_row", "row_key", "column_key"])
def _move(
    weight_at: tl.tensor,
    grad_at: tl.tensor,
    codes1_at: tl.tensor,
    codes2_at: tl.tensor,
    scales1_at: tl.tensor,
    scales2_at: tl.tensor,
    values1_at: tl.tensor,
    values2_at: tl.tensor,
    width: tl.tensor,
    blocks_a_row: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    one_less_beta1: tl.tensor,
    one_less_beta2: tl.tensor,
    eps: tl.tensor,
    rate: tl.tensor,
    correction: tl.tensor,
    decay: tl.tensor,
    first_row: tl.tensor,
    row_key: tl.tensor,
    column_key: tl.tensor,
    ROUND: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    # A row of a matrix of experts may have more programs than one dimension of a grid takes.
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    for number in tl.static_range(BLOCKS):
        place = program * BLOCKS + number
        if place < blocks_a_row:
            column = place * 256 + tl.arange(0, 256)
            at = row.to(tl.int64) * width + column
            block = row.to(tl.int64) * blocks_a_row + place
            mask = column < width

            grad = tl.load(grad_at + at, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_at + at, mask=mask, other=0.0).to(tl.float32)
            code1 = tl.load(codes1_at + at, mask=mask, other=127).to(tl.int32)
            code2 = tl.load(codes2_at + at, mask=mask, other=0).to(tl.int32)
            old1 = tl.load(values1_at + code1) * (tl.load(scales1_at + block) * beta1)
            old2 = tl.load(values2_at + code2) * (tl.load(scales2_at + block) * beta2)
            moment1 = old1 + one_less_beta1 * grad
            moment2 = old2 + one_less_beta2 * (grad * grad)

            weight = weight * decay - rate * (moment1 / (tl.sqrt(moment2) * correction + eps))
            if ROUND:
                # As `_rounding` draws them: of the element's place in the whole matrix.
                of_row = _mixed((row + first_row).to(tl.uint32) ^ row_key.to(tl.uint32))
                bits = of_row ^ _mixed(column.to(tl.uint32) ^ column_key.to(tl.uint32))
                bits = bits * 0x7FEB352D
                bits = (bits ^ (bits >> 15)) * 0x846CA68B
                rounded = (weight.to(tl.uint32, bitcast=True) + (bits >> 16)) & 0xFFFF0000
                # NaN has all bits set on a GPU: added to, it would be -0.
                magnitude = weight.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
                weight = tl.where(magnitude > 0x7F800000, weight, rounded.to(tl.float32, bitcast=True))
            tl.store(weight_at + at, weight.to(weight_at.dtype.element_ty), mask=mask)

            scale1 = tl.max(tl.abs(moment1), axis=0)
            scale2 = tl.max(moment2, axis=0)
            # A block of zeros has a scale of 0, by which nothing is divided.
            part1 = moment1 * (1.0 / tl.maximum(scale1, LEAST))
            part2 = moment2 * (1.0 / tl.maximum(scale2, LEAST))
            place1 = _place(tl.abs(part1), 1)
            code1 = 127 + tl.where(part1 < 0, -tl.minimum(place1, 127), place1)
            tl.store(codes1_at + at, code1.to(tl.uint8), mask=mask)
            tl.store(codes2_at + at, _place(part2, 2).to(tl.uint8), mask=mask)
            tl.store(scales1_at + block, scale1)
            tl.store(scales2_at + block, scale2)


def launch(
    weight: torch.Tensor,
    grad: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    rates: tuple[float, ...],
    place: tuple[int, int, int],
) -> None:
    """Move a matrix and its moments in place.

    Args:
        weight: float32 or bfloat16[M, D], contiguous as all tensors here.
        grad: [M, D].
        codes: uint8[M, D] of the first moment and of the second.
        scales: float32[M, blocks] of each.
        values: float32[256] of each, that the codes stand for.
        rates: beta1, beta2, eps, step size (rate over the first moment's correction), root of the second moment's correction,
            and what the weight is multiplied by first.
        place: number of the first row in the whole matrix, and the keys of rows and columns of `_rounding`.
    """
    beta1, beta2, eps, rate, correction, decay = rates
    rows, blocks = scales[0].shape
    how: dict[str, Any] = {"ROUND": weight.dtype == torch.bfloat16, "BLOCKS": BLOCKS, "num_warps": 1}
    programs = triton.cdiv(blocks, BLOCKS)
    layers = triton.cdiv(programs, MOST_PROGRAMS)
    # Triton launches on the current device, torch where the tensors are.
    with torch.accelerator.device_index(weight.device.index):
        _move[(rows, triton.cdiv(programs, layers), layers)](
            weight, grad, *codes, *scales, *values, weight.shape[1], blocks,
            beta1, beta2, 1 - beta1, 1 - beta2, eps, rate, 1 / correction, decay, *place, **how,
        )  # fmt: skip
