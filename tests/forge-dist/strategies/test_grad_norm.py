"""Norms of plain gradients; test_divided.py has those of shards."""

import pytest
import torch

from forge_dist.strategies import _grad_norm
from forge_dist.strategies._grad_norm import grad_norm, scale_grads

CPU = torch.device("cpu")


def parameter(grad):
    made = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    made.grad = grad
    return made


def test_bfloat16():
    """Gradients in bfloat16 are squared and added in float32: more than the three digits of their own norm."""
    torch.manual_seed(0)
    grads = [torch.randn(501).bfloat16(), torch.randn(3, 7), torch.empty(0, 5)]
    wanted = torch.cat([grad.double().flatten() for grad in grads]).norm().item()
    norm = grad_norm(map(parameter, grads), CPU)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(wanted, rel=1e-6)


def test_nothing():
    """Parameters without gradients have norm 0, and are left alone by scaling."""
    bare = torch.nn.Parameter(torch.ones(3))
    assert grad_norm([bare], CPU).item() == 0
    scale_grads([bare], 0.5)
    assert bare.grad is None


def test_scale():
    """Every gradient is multiplied in place."""
    made = parameter(torch.tensor([2.0, -4.0]))
    before = made.grad
    scale_grads([made], 0.25)
    assert made.grad is before
    assert before.tolist() == [0.5, -1.0]


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e-16, 1e-9, 1.0, 1e9, 1e18, 1.5e19, float("inf"), float("nan")])
def test_shards_of_any_size_without_float64(monkeypatch, size):
    """What ranks add up is float32: hccl adds no float64, and not every GPU has it. Squares would pass its range."""
    sent = []

    def all_reduce(tensor, group):
        sent.append((tensor.dtype, tuple(tensor.shape), group))
        # Three more ranks with the same shards.
        tensor.mul_(4)

    monkeypatch.setattr(_grad_norm, "all_reduce", all_reduce)
    monkeypatch.setattr(_grad_norm, "_shard_groups", lambda grad: ("ranks",) if grad.dim() > 1 else ())
    shard, whole = torch.tensor([[size, size / 2]]), torch.tensor([size])
    wanted = (4 * (1 + 0.25) + 1) ** 0.5 * size
    norm = grad_norm([parameter(shard), parameter(whole)], CPU)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    assert sent == [(torch.float32, (3,), "ranks")]
