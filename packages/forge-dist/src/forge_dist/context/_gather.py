"""Rows of all context ranks, gathered with their gradients."""

from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup


def gather(local: torch.Tensor, places: tuple[torch.Tensor, ...], longest: int, group: ProcessGroup) -> torch.Tensor:
    """Gather rows of every rank, and take those at `places`; collective.

    The backward pass sums the gradients of all ranks, in float32 and in the order of the ranks: seen from the sum of what each
    rank computes, it is exact wherever the result is used.

    Args:
        local: [t, C], this rank's rows.
        places: int64, indices of rows where each rank has `longest`; each tensor names a place at most once where that can be.
        longest: most rows of one rank.
        group: the ranks.

    Returns:
        torch.Tensor: [sum of the places' lengths, C].
    """
    return _Gather.apply(local, longest, group, *places)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, local: torch.Tensor, longest: int, group: ProcessGroup, *places: torch.Tensor
    ) -> torch.Tensor:
        ranks = distributed.get_world_size(group)
        ctx.group, ctx.rows, ctx.longest, ctx.dtype = group, len(local), longest, local.dtype
        ctx.save_for_backward(*places)
        sent = local.new_zeros(longest, local.shape[1])
        sent[: len(local)] = local
        found = local.new_empty(ranks, *sent.shape)
        distributed.all_gather(list(found), sent, group=group)
        return found.flatten(0, 1).index_select(0, torch.cat(places))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        places = ctx.saved_tensors
        ranks = distributed.get_world_size(ctx.group)
        wide = torch.promote_types(ctx.dtype, torch.float32)
        sent = grad.new_zeros(ranks * ctx.longest, grad.shape[1], dtype=wide)
        for at, part in zip(places, grad.split([len(at) for at in places]), strict=True):
            # One after another: a place that several chunks see is added to in one order.
            sent.index_add_(0, at, part.to(wide))
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=ctx.group)
        total, *others = received.view(ranks, ctx.longest, -1)
        for other in others:
            total = total + other
        return total[: ctx.rows].to(ctx.dtype), None, None, *(None for _ in places)
