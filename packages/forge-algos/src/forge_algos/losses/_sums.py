"""Log-probabilities of a row's tokens → those of its completions, or of their tails."""

from collections.abc import Sequence

import torch

from forge_algos.losses import _check


def completion_logps(
    token_logps: torch.Tensor, lengths: torch.Tensor | Sequence[int], *, skip: torch.Tensor | Sequence[int] | None = None
) -> torch.Tensor:
    """Sums over the completions that lie one after another in a row; with `skip`, over what follows each one's first tokens.

    Args:
        token_logps: float[T], log-probabilities of the completions' tokens, in nats.
        lengths: int[B], tokens of each completion; they add up to T. On the CPU, so that nothing waits for the device.
        skip: int[B], how many tokens of each to leave out; `min(chosen, rejected)` gives the tails that `dpo(ld_alpha=...)` asks
            for.

    Returns:
        torch.Tensor: float32[B]; 0 where nothing is left.

    Raises:
        LossError: the lengths do not add up to T, or `skip` is not over the same completions.

    >>> completion_logps(torch.tensor([-1.0, -2.0, -4.0, -8.0]), [1, 3])
    tensor([ -1., -14.])
    >>> completion_logps(torch.tensor([-1.0, -2.0, -4.0, -8.0]), [1, 3], skip=[1, 1])
    tensor([  0., -12.])
    """
    tokens = _check.samples(token_logps=token_logps)["token_logps"]
    cut = _check.cuts(lengths, tokens, "token_logps")
    owner_T = owners(cut, len(tokens))
    if skip is not None:
        first = _check.lengths("skip", torch.as_tensor(skip), cut.to(tokens.dtype), "lengths")
        # An empty completion's skip of 0 counts as 1 above, and changes nothing; a skip of 0 elsewhere must stay 0.
        first = torch.where(torch.as_tensor(skip, device=first.device) == 0, 0, first)
        position_T = torch.arange(len(tokens), device=tokens.device) - (cut.cumsum(0) - cut)[owner_T]
        tokens = torch.where(position_T >= first[owner_T], tokens, 0)
    return sums(tokens, owner_T, len(cut))


def owners(cut: torch.Tensor, T: int) -> torch.Tensor:
    """int64[T]: which of the B samples of lengths `cut`[B] each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(cut), device=cut.device), cut, output_size=T)


def sums(values_T: torch.Tensor, owner_T: torch.Tensor, B: int) -> torch.Tensor:
    """float[B]: values added up by owner."""
    return values_T.new_zeros(B).index_add(0, owner_T, values_T)
