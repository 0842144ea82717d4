"""Batch-all triplets, beside a computation of one triplet at a time in float64."""

import itertools

import pytest
import torch

from forge_algos import LossError, losses

N, D = 9, 5
LABELS = torch.tensor([0, 1, 0, 2, 1, 1, 0, 2, 3])


def drawn(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype).requires_grad_()


def naive(texts: torch.Tensor, margin: float) -> tuple[torch.Tensor, int]:
    """Sum max(0, d(a, p) - d(a, n) + margin), one triplet at a time; count those above 0."""
    unit = texts / texts.norm(dim=1, keepdim=True)
    total, above = torch.zeros((), dtype=texts.dtype), 0
    for a, p, n in itertools.permutations(range(N), 3):
        if LABELS[a] == LABELS[p] != LABELS[n]:
            loss = (unit[a] - unit[p]).norm() - (unit[a] - unit[n]).norm() + margin
            if loss > 0:
                total, above = total + loss, above + 1
    return total, above


@pytest.mark.parametrize("margin", [0.1, 5.0])
@pytest.mark.parametrize("cut", [N, 4])
def test_it_is_all_triplets_one_at_a_time(margin: float, cut: int) -> None:
    """Sum to 1e-6 and gradients to 1e-5 of a float64 loop, and the number above 0, whatever parts of the anchors are asked."""
    texts, exact = drawn(), drawn(torch.float64)
    parts = [
        losses.batch_all_triplet(texts, LABELS, anchors, margin=margin)
        for anchors in torch.arange(N).split(cut)
        if len(anchors)
    ]
    total, above = naive(exact, margin)
    total.backward()
    sum(part.sum for part in parts).backward()
    assert sum(part.sum.item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
    assert sum(part.stats["violations"].item() for part in parts) == above
    assert sum(part.count for part in parts) == N
    assert sum(part.stats["pairable"].item() for part in parts) == 8
    torch.testing.assert_close(texts.grad.double(), exact.grad, rtol=1e-5, atol=1e-5 * exact.grad.abs().max().item())


def test_nearest_texts_are_counted() -> None:
    """`correct` counts the anchors whose nearest other text has their label."""
    texts = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, 0.05]])
    found = losses.batch_all_triplet(texts, torch.tensor([0, 0, 1, 1, 2]), torch.arange(5))
    assert (found.stats["pairable"].item(), found.stats["correct"].item()) == (4, 2)


def test_equal_texts_have_a_gradient_of_zero_and_no_nan() -> None:
    """The distance of two equal texts has no direction: they pull at nothing."""
    texts = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    losses.batch_all_triplet(texts, torch.tensor([0, 0, 1]), torch.arange(3)).sum.backward()
    assert texts.grad.isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    """Shapes and a margin below 0 are errors by name."""
    with pytest.raises(LossError, match="margin"):
        losses.batch_all_triplet(drawn(), LABELS, torch.arange(N), margin=-1.0)
    with pytest.raises(LossError, match="labels"):
        losses.batch_all_triplet(drawn(), LABELS[:3], torch.arange(N))
    with pytest.raises(LossError, match="texts_ND"):
        losses.batch_all_triplet(LABELS, LABELS, torch.arange(N))
