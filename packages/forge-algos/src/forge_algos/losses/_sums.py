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
    cut = _check.cuts(lengths, tokens, "token_logps")
    return sums(tokens, owners(cut, len(tokens)), len(cut))


def owners(cut: torch.Tensor, T: int) -> torch.Tensor:
    """Return which of the B samples of lengths `cut`[B] each token belongs to, int64[T]."""
    return torch.repeat_interleave(torch.arange(len(cut), device=cut.device), cut, output_size=T)


def sums(values_T: torch.Tensor, owner_T: torch.Tensor, B: int) -> torch.Tensor:
    """Add up values[T] by owner: float[B]."""
    return values_T.new_zeros(B).index_add(0, owner_T, values_T)
