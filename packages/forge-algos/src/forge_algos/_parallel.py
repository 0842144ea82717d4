"""What the loop needs of the ranks that share a step, and `ALONE`, the one process that shares it with nobody.

Whoever divides a model over ranks (forge_dist here) offers these calls; rooms agree by shape, so this file says the shape.
Every rank makes the same calls in the same order.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Parallel(Protocol):
    """R ranks that take each step together; `train` and `evaluate` call it, one rank as all others."""

    @property
    def world_size(self) -> int:
        """R."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the ranks in float64, the same on every rank; one collective, of one length on all ranks."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward; gradients are communicated in the `last` of a step at the earliest."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backward from loss float[]. After a step's last micro-batch gradients are the sum over ranks and micro-batches."""
        ...

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """2-norm of the summed gradients over all ranks, float32[], the same on every rank."""
        ...

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply the gradients by `factor`."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer."""
        ...

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients, those of a step that the optimizer was kept from too."""
        ...


class Alone:
    """One process: nothing is communicated."""

    world_size = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002  the protocol's
        """Nothing."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Torch's own."""
        loss.backward()

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """2-norm, float32[]: also of bfloat16 gradients, whose own norm would keep 3 digits; 0 where there is no gradient."""
        grads = [p.grad for p in parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
        return torch.linalg.vector_norm(torch.stack(norms)).float() if norms else torch.zeros(())

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """All gradients at once."""
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own."""
        optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients become None, so that the first micro-batch writes instead of adding."""
        optimizer.zero_grad(set_to_none=True)


ALONE = Alone()
"""One process that shares its steps with nobody: what `train` and `evaluate` take where no other is given."""
