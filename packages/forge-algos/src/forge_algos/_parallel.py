"""Interface between the training loop and the ranks that share a step.

`ALONE` is a single process. A package that divides a model over ranks, such as forge_dist, implements `Parallel`; packages
agree by shape, so this file states the shape. Every rank makes the same calls in the same order.

Ranks and data shards are two numbers. Each data shard has micro-batches of its own; where ranks divide the data alone there is
one rank a shard, and where they also divide a tensor or a context several ranks share one: they get the same micro-batches and
report the same counts and sums, which count once.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Parallel(Protocol):
    """R ranks that take each step together; `train` and `evaluate` call it on every rank alike."""

    @property
    def world_size(self) -> int:
        """R: number of ranks that make every call together."""
        ...

    @property
    def data_parallel_size(self) -> int:
        """Number of data shards, from 1 to R: parts into which a step's data is divided."""
        ...

    @property
    def data_parallel_rank(self) -> int:
        """Number of this rank's data shard, from 0; ranks that share a shard have the same."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up each value over the data shards in float64, in one collective.

        A shard counts once: the ranks that share it give the same values. The result is the same on every rank; all ranks give
        equally many values. For what a single rank may meet, a failure for instance, use `any`.
        """
        ...

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Concatenate the rows [n, ...] of all data shards; return also where this one's begin.

        They come in the order of the shards, to the bit, without a graph, on the device of `rows`. A shard may have any number
        of them, of one shape and dtype on all; the ranks that share it give the same.
        """
        ...

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank, whichever data shard it has."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Wrap a micro-batch's forward and backward.
        Gradients are communicated in the `last` micro-batch of a step at the earliest.
        """
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from loss float[].

        After a step's last micro-batch the gradients are the sum over its micro-batches and data shards.
        """
        ...

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Compute the 2-norm of the whole model's summed gradients, float32[].
        It is the same on every rank.
        """
        ...

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply the gradients by `factor`."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the weights by one optimizer step."""
        ...

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients, also those of a step that the optimizer did not take."""
        ...


def norms_of(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the 2-norm of each tensor in float32 or wider, in one call for each dtype."""
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.dtype, grad.device), []).append(grad)
    found: list[torch.Tensor] = []
    for (dtype, _), tensors in alike.items():
        found += torch._foreach_norm(tensors, 2, dtype=torch.promote_types(dtype, torch.float32))
    return found


class Alone:
    """A single process: nothing is communicated."""

    world_size = 1
    data_parallel_size = 1
    data_parallel_rank = 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the values."""
        return list(values)

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows, which begin at 0."""
        return rows.detach(), 0

    def any(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002  the protocol's
        """Return a context that does nothing."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run torch's own backward."""
        loss.backward()

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Compute the 2-norm of all gradients, float32[]; 0 where there is no gradient.

        Norms of bfloat16 gradients are taken in float32: bfloat16's own would keep 3 digits.
        """
        norms = norms_of(p.grad for p in parameters if p.grad is not None)
        return torch.linalg.vector_norm(torch.stack(norms)).float() if norms else torch.zeros(())

    def scale_grads(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply all gradients at once."""
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's own step."""
        optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients to None, so that the first micro-batch writes instead of adding."""
        optimizer.zero_grad(set_to_none=True)


ALONE = Alone()
"""A single process: the default of `train` and `evaluate`."""
