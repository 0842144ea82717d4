"""Replicated parameters beside shards: first values from rank 0, gradients summed, whoever has one."""

import pytest

from ...ranks import run_on_ranks

pytestmark = pytest.mark.slow


def summed(ranks):
    import torch

    from forge_dist.strategies._replicated import broadcast, sum_grads

    both, mine, none, half = (
        torch.nn.Parameter(torch.full((2, 3), float(ranks.rank), dtype=dtype))
        for dtype in (torch.float32, torch.float32, torch.float32, torch.bfloat16)
    )
    broadcast([both, mine, none, half], ranks.group)
    both.grad = torch.full((2, 3), 1.0 + ranks.rank)
    half.grad = torch.full((2, 3), 2.0**ranks.rank, dtype=torch.bfloat16)
    if ranks.rank == 1:
        mine.grad = torch.full((2, 3), 5.0)
    sum_grads([both, half, mine, none], ranks.group)
    values = [p.detach().unique().tolist() for p in (both, mine, none, half)]
    grads = [None if p.grad is None else (str(p.grad.dtype), p.grad.unique().tolist()) for p in (both, mine, none, half)]
    return values, grads


def test_summed():
    """A gradient that one rank alone has reaches all; one that none has stays absent, so that the optimizer leaves it alone."""
    for values, grads in run_on_ranks(summed, 3):
        assert values == [[0.0]] * 4
        assert grads == [("torch.float32", [6.0]), ("torch.float32", [5.0]), None, ("torch.bfloat16", [7.0])]
