"""osft_rule=strict, osft_form=direct: matrices within the free directions by construction.

The set that the strict rule can reach, U_hᵀ ΔW = 0 and ΔW V_h = 0, is linear, so an optimizer may move in it freely: with the
singular directions U_h, V_h protected and Q_u, Q_v free,

    N = M    ΔW = Q_u C Q_vᵀ              C [r, r]
    N > M    ΔW = (I − U_h U_hᵀ) A Q_vᵀ   A [N, r]
    N < M    ΔW = Q_u B (I − V_h V_hᵀ)    B [r, M]

with C, A, B zero at the start. Of a stack W [E, N, M] they are [E, ...], those of each matrix. Nothing is projected after a
step, and weight decay pulls ΔW to 0, not W.
"""

from typing import Any

import torch
from torch import nn

from forge_algos.adaptations.osft._bases import Directions, StackedDirections
from forge_algos.adaptations.osft._delta import Delta, addmm, constant
from forge_algos.adaptations.osft._linear import Pair


class Direct(Delta):
    """ΔW of W [N, M], or of a stack [E, N, M], from its directions, on the device of `like`."""

    left: torch.Tensor | None
    right: torch.Tensor | None
    protected: torch.Tensor | None

    def __init__(self, directions: Directions | StackedDirections, like: torch.Tensor) -> None:
        super().__init__()
        (N, M), r = directions.shape, directions.free
        constants = {
            "left": directions.Q_u if N <= M else None,
            "right": directions.Q_v if N >= M else None,
            "protected": None if N == M else directions.U_h if N > M else directions.V_h,
        }
        for name, value in constants.items():
            self.register_buffer(name, None if value is None else constant(value, like), persistent=False)
        shape = (N if N > M else r, M if N < M else r)
        self.weight = nn.Parameter(torch.zeros(*like.shape[:-2], *shape, dtype=torch.float32, device=like.device))
        """C, A or B."""

    def factors(self) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
        # It costs r² N or 4·k·r·(N or M) multiplications a forward, whatever its number of rows: a weight is projected.
        if self.protected is None:
            assert self.left is not None and self.right is not None  # noqa: PT018 - one of three cases
            return self.left @ self.weight, self.right, None
        if self.right is not None:
            return _Confined.apply(self.weight, self.protected, 0), self.right, None
        assert self.left is not None
        return self.left, _Confined.apply(self.weight, self.protected, 1).mT, None


class _Confined(torch.autograd.Function):
    """A → (I − U Uᵀ) A along dimension 0, or B → B (I − V Vᵀ) along dimension 1.

    A is [..., N, r] and B [..., r, M]; U [..., N, k] and V [..., M, k] have orthonormal columns. The map is symmetric, so
    gradients go through the same; each is computed in its own layout, for adding up across it would be slow.
    """

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, protected: torch.Tensor, dim: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(protected)
        ctx.dim = dim
        return _confined(matrix, protected, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (protected,) = ctx.saved_tensors
        return _confined(grads[0], protected.to(grads[0].dtype), ctx.dim), None, None


def _confined(matrix: torch.Tensor, protected: torch.Tensor, dim: int) -> torch.Tensor:
    if dim:
        return addmm(matrix, matrix @ protected, protected.mT, alpha=-1)
    return addmm(matrix, protected, protected.mT @ matrix, alpha=-1)
