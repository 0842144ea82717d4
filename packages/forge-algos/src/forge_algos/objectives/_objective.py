"""What the loop needs of an objective: a count before any forward, and terms that are summed and not divided."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from forge_algos.losses import LossTerms


class Objective(Protocol):
    """A loss on a model. `train` and `evaluate` drive it; it never divides, so gradients do not depend on the batch's cut."""

    def count(self, batch: Any) -> int:
        """How many terms the batch's loss has: what `LossTerms.count` will be, known without a forward."""
        ...

    def idle(self) -> Any:
        """A tiny made-up batch with something to learn, for a rank that has nothing while others have; its loss is not counted."""
        ...

    def bind(self, model: nn.Module, *, device: torch.device) -> Callable[[Any], LossTerms]:
        """Decide once how this model is run; the returned function turns a batch into its terms."""
        ...
