"""Floating-point operations that one optimizer step needs, counted causally, from the model's shape and sample lengths.

For a packed row of documents s_1..s_B with T = sum s_i tokens, P of them labelled; a decoder of L layers with H query heads
of d, W weights in its linear layers, width D, vocabulary V. A multiply-add is 2 operations.

    layers      2 W T                     forward
    attention   2 L H d sum_i s_i^2       forward: q.k and p.v are 2 s^2 d each and head, halved because half of it is masked
    head        2 D V P                   forward; P and not T, because logits are needed only where there is a label

A backward pass costs the gradient of the inputs (as much as the forward) and the gradient of the weights (as much again). So

    full        6 W T        + 6 L H d sum s_i^2 + 6 D V P
    LoRA        4 W T + 6 A T + 6 L H d sum s_i^2 + 4 D V P        A adapter weights; frozen weights need no weight gradient

What a trainer computes beyond that (recomputation, logits without a label, the masked half of attention, attention between
documents) does not count. Norms, rotations, softmax and the optimizer are left out, as is usual. MFU = operations / seconds /
dense peak of the chip.
"""

from collections.abc import Sequence

from _models import Described


def step_flops(model: Described, lengths: Sequence[int], labelled: int, *, lora_weights: int = 0) -> float:
    """Count the operations of one step over one packed row; `lora_weights` is 0 for a full fine-tune.

    >>> model = Described("m", vocabulary=10, width=4, layers=1, heads=2, head_dim=2, linear_weights=100, tied=True)
    >>> step_flops(model, [3, 2], labelled=4)
    4272.0
    """
    tokens = sum(lengths)
    attention = 6 * model.layers * model.heads * model.head_dim * sum(length**2 for length in lengths)
    passes = 4 if lora_weights else 6
    matrices = passes * (model.linear_weights * tokens + model.width * model.vocabulary * labelled)
    return float(matrices + 6 * lora_weights * tokens + attention)
