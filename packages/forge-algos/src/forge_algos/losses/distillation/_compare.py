"""Two models' logits of rows → how far the second has moved from the first, token by token."""

from typing import NamedTuple

import torch

from forge_algos._errors import LossError
from forge_algos.losses._rows import LogitSource, Tensors


class Compared(NamedTuple):
    """Numbers of M tokens, float[M] each, in nats."""

    kl: torch.Tensor
    """KL(base ‖ model) of the next-token distributions, over the whole vocabulary."""
    base_nll: torch.Tensor
    """-log of the probability that the base gives to the target."""
    nll: torch.Tensor
    """-log of the probability that the model gives to the target."""


def compare_rows(source: LogitSource, tensors: Tensors, base: tuple[LogitSource, Tensors], targets: torch.Tensor) -> Compared:
    """Compute KL(base ‖ model) and both losses of M rows, a chunk of logits at a time.

    Args:
        source: of the model's logits.
        tensors: that they are computed from.
        base: source and tensors of the base's logits, of the same rows.
        targets: int64[M], the tokens that follow.

    Raises:
        LossError: two vocabularies.
    """
    base_source, base_tensors = base
    ours, theirs = source.start(tensors, [False] * len(tensors)), base_source.start(base_tensors, [False] * len(base_tensors))
    device = next(tensor.device for tensor in tensors if tensor is not None)
    found = [tuple(torch.zeros(0, dtype=source.dtype, device=device) for _ in Compared._fields)]
    for rows in ours.chunks:
        s, t = ours.logits(rows), theirs.logits(rows).to(source.dtype)
        if s.shape != t.shape:
            raise LossError(
                f"the model has a vocabulary of {s.shape[1]} tokens and its base one of {t.shape[1]}: the divergence between "
                "them is over the same tokens"
            )
        s.sub_(s.logsumexp(1, keepdim=True))
        t.sub_(t.logsumexp(1, keepdim=True))
        wanted = targets[rows, None]
        # Of two equal distributions rounding may leave a sum just below 0, which no divergence is.
        kl = (t.exp() * (t - s)).sum(1).clamp_min_(0)
        found.append((kl, -t.gather(1, wanted)[:, 0], -s.gather(1, wanted)[:, 0]))
    return Compared(*(torch.cat(parts) for parts in zip(*found, strict=True)))
