"""Show PEFT sharded linear layers at their whole size while an adapter is attached.

PEFT 0.21 sizes an adapter by this rank's shard wherever the mesh has a second dimension, as under hsdp, taking it for tensor
parallelism. Plain tensors of the whole shape, which need no memory, replace the weights until the adapter is there.
"""

from torch import nn
from torch.distributed.tensor import DTensor

from forge_dist.loading._task import HEAD


class WholeShapePlaceholders:
    """Placeholders for a model's sharded linear weights, until `restore`.

    No forward in between.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights: list[tuple[nn.Linear, nn.Parameter]] = []
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if name.rpartition(".")[2] == HEAD:  # PEFT copies its values
                continue
            if isinstance(module, nn.Linear) and isinstance(weight, DTensor):
                self._weights.append((module, weight))  # pyrefly: ignore[bad-argument-type]  a DTensor that is a Parameter
                empty = weight.to_local().new_empty(()).expand(weight.shape)
                module.weight = nn.Parameter(empty, requires_grad=weight.requires_grad)

    def restore(self) -> None:
        """Put every weight back, frozen where its placeholder was frozen meanwhile."""
        for module, weight in self._weights:
            weight.requires_grad_(bool(module.weight.requires_grad))
            module.weight = weight
        self._weights.clear()
