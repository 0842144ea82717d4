"""Float32 weights without data → forwards in the dtype in which ranks would gather them.

PyTorch's `fully_shard` with mixed precision computes with copies of a layer's weights in 16 bits, which it frees when the layer
is done, and adds up gradients in the dtype of its own shards. Here one process does the same with all layers: the copies take
no bytes, since what ranks gather at a time is counted by who knows how they divide it.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge_algos._parallel import Alone
from forge_algos.memory._tracker import Tracker


class Gathered(Alone):
    """Process that computes with copies of its weights in another dtype; gradients keep theirs.

    Args:
        model: without data.
        dtype: of the copies.
        modules: modules whose weights are gathered; others compute with their own.
        tracker: counts the gradients.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, modules: Container[nn.Module], tracker: Tracker) -> None:
        self._tracker = tracker
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in model.modules():
            for name, weight in module._parameters.items() if module in modules else ():
                if weight is not None and weight.is_floating_point() and weight.dtype != dtype:
                    self._places.append((module._parameters, name, weight))
                    if weight not in self._copies:
                        self._copies[weight] = self._copy(weight, dtype)
        tracker.hold_elsewhere(self._copies.values())

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:  # noqa: ARG002  the protocol's
        """Compute the block's forwards and backwards with the copies."""
        with self.gathered():
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Put the copies in the place of the weights inside the block."""
        for parameters, name, weight in self._places:
            parameters[name] = self._copies[weight]
        try:
            yield
        finally:
            for parameters, name, weight in self._places:
                parameters[name] = weight

    def _copy(self, weight: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        made = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=weight.requires_grad)

        def reduce(copied: torch.Tensor) -> None:
            if copied.grad is None:
                return
            with torch.no_grad():
                summed = copied.grad.to(weight.dtype)
                copied.grad = None
                weight.grad = summed if weight.grad is None else weight.grad.add_(summed)
            self._tracker.mark(weight.grad, "gradients")

        if made.requires_grad:
            made.register_post_accumulate_grad_hook(reduce)
        return made
