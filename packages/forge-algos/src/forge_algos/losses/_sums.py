"""Sums of tokens' log-probabilities by completion."""

from collections.abc import Sequence

import torch

from forge_algos.losses import _check


def completion_logps(token_logps: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Add up the tokens of each of the completions that lie one after another in a row.

    Args:
        token_logps: float[T], log-probabilities of the completions' tokens, in nats.
        lengths: int[B], tokens of each completion; they add up to T. On the CPU, so that nothing waits for the device.

    Returns:
        torch.Tensor: float32[B]; 0 for an empty completion.

    Raises:
        LossError: the lengths do not add up to T.

    >>> completion_logps(torch.tensor([-1.0, -2.0, -4.0, -8.0]), [1, 3])
    tensor([ -1., -14.])
    """
    tokens = _check.samples(token_logps=token_logps)["token_logps"]
    return sums(tokens, _check.cuts(lengths, tokens, "token_logps"))


def sums(values_T: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Add up the values[T] of each sample, in the same order each time: float[B].

    A GPU's index_add takes any order, so that what is computed twice would differ in its last digits.
    """
    return torch.stack([values.sum() for values in values_T.split(list(sizes))]) if len(sizes) else values_T.new_zeros(0)
