"""osft_rule=paper (arXiv 2504.07097): W trains, but not between protected directions.

Gradients become ∇W − U_h U_hᵀ ∇W V_h V_hᵀ before a step. An optimizer that is not linear in them (Adam, clipping by element,
weight decay) still moves that block, so after the step W ← W − U_h U_hᵀ (W − W₀) V_h V_hᵀ. W₀ is kept for that: U_hᵀ W V_h −
S_h is the same block in exact arithmetic, and in float32 has the rounding of W in it, which is no small part of what a low rate
moves.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from forge_algos._errors import AdapterError
from forge_algos.adaptations.osft._bases import Directions, StackedDirections
from forge_algos.adaptations.osft._delta import addmm_, constant


class Protected(nn.Module):
    """Protected directions U_h [..., N, k], V_h [..., M, k] of a weight, and its first value W₀.

    Where a matrix is divided by rows, U_h and W₀ are this rank's rows of them. Where a stack is divided by its matrices, all
    three are those of this rank's matrices.
    """

    projects = True

    rows: torch.Tensor
    right: torch.Tensor
    start: torch.Tensor

    def __init__(self, directions: Directions | StackedDirections, module: nn.Module, key: str = "weight") -> None:
        super().__init__()
        # In a tuple, so that the module is not registered as a child of its child.
        self._home = (module, key)
        weight = self._weight.detach()
        rows, right = directions.U_h, directions.V_h
        if isinstance(weight, DTensor):
            if not all(placement.is_replicate() or placement.is_shard(0) for placement in weight.placements):
                raise AdapterError(f"osft_rule='paper' keeps weights that are divided by rows, not {weight.placements}")
            rows = _divided(rows, weight)
            right = _divided(right, weight) if weight.ndim > 2 else right
        start = weight.to_local() if isinstance(weight, DTensor) else weight
        for name, value in (("rows", rows), ("right", right), ("start", start)):
            self.register_buffer(name, constant(value, weight), persistent=False)

    @property
    def _weight(self) -> torch.Tensor:
        module, key = self._home
        return getattr(module, key)

    @torch.no_grad()
    def before_step(self) -> None:
        """Project the gradient; collective where W is divided."""
        gradient = self._weight.grad
        if gradient is not None:
            self._take(gradient, _local(gradient).float())

    @torch.no_grad()
    def after_step(self) -> None:
        """Project the weight's move; collective where W is divided."""
        weight = self._weight
        self._take(weight, _local(weight).float() - self.start)

    def _take(self, matrix: torch.Tensor, moved: torch.Tensor) -> None:
        """Compute X ← X − U_h U_hᵀ D V_h V_hᵀ in place; D is laid out as X is."""
        block = self.rows.mT @ moved @ self.right
        # A stack is divided into whole matrices, of which no other rank has a part.
        if isinstance(matrix, DTensor) and matrix.ndim == 2:
            placements = [Partial() if placement.is_shard() else Replicate() for placement in matrix.placements]
            block = DTensor.from_local(block, matrix.device_mesh, placements, run_check=False).full_tensor()
        local = _local(matrix)
        if local.dtype == torch.float32:
            addmm_(local, self.rows @ block, self.right.mT, alpha=-1)
        else:
            local.copy_(addmm_(local.float(), self.rows @ block, self.right.mT, alpha=-1))


def _divided(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank has, divided as `like` is."""
    placed = whole.to(like.device).contiguous()
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _local(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix.to_local() if isinstance(matrix, DTensor) else matrix).detach()
