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
from forge_algos.adaptations.osft._bases import Directions
from forge_algos.adaptations.osft._delta import constant


class Protected(nn.Module):
    """Protected directions U_h [N, k] and V_h [M, k] of a linear layer, and its first weight W₀.

    Where W is divided by rows, U_h and W₀ are this rank's rows of them.
    """

    projects = True

    rows: torch.Tensor
    right: torch.Tensor
    start: torch.Tensor

    def __init__(self, directions: Directions, linear: nn.Linear) -> None:
        super().__init__()
        # In a tuple, so that the layer is not registered as a child of its child.
        self._linear = (linear,)
        weight: torch.Tensor = linear.weight.detach()
        rows = directions.U_h
        if isinstance(weight, DTensor):
            if not all(placement.is_replicate() or placement.is_shard(0) for placement in weight.placements):
                raise AdapterError(f"osft_rule='paper' keeps weights that are divided by rows, not {weight.placements}")
            rows = rows.to(weight.device).contiguous()
            # Every rank has the whole matrix already.
            rows = distribute_tensor(rows, weight.device_mesh, weight.placements, src_data_rank=None).to_local()
        start = weight.to_local() if isinstance(weight, DTensor) else weight
        for name, value in (("rows", rows), ("right", directions.V_h), ("start", start)):
            self.register_buffer(name, constant(value, weight), persistent=False)

    @torch.no_grad()
    def before_step(self) -> None:
        """Project the gradient; collective where W is divided."""
        gradient = self._linear[0].weight.grad
        if gradient is not None:
            self._take(gradient, _local(gradient).float())

    @torch.no_grad()
    def after_step(self) -> None:
        """Project the weight's move; collective where W is divided."""
        weight = self._linear[0].weight
        self._take(weight, _local(weight).float() - self.start)

    def _take(self, matrix: torch.Tensor, moved: torch.Tensor) -> None:
        """Compute X ← X − U_h U_hᵀ D V_h V_hᵀ in place; D [N, M] is laid out as X is."""
        block = self.rows.t() @ moved @ self.right
        if isinstance(matrix, DTensor):
            placements = [Partial() if placement.is_shard() else Replicate() for placement in matrix.placements]
            block = DTensor.from_local(block, matrix.device_mesh, placements, run_check=False).full_tensor()
        local = _local(matrix)
        if local.dtype == torch.float32:
            local.addmm_(self.rows @ block, self.right.t(), alpha=-1)
        else:
            local.copy_(local.float().addmm_(self.rows @ block, self.right.t(), alpha=-1))


def _local(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix.to_local() if isinstance(matrix, DTensor) else matrix).detach()
