"""osft_rule=strict, osft_form=factors: trained singular vectors and values of the free part.

They are those of mini-trainer: ΔW = U diag(S) V less its value at the start. The gradients of U [N, r] and V [r, M] lose their
part within the protected directions before a step, so that an optimizer's averages do not fill with it, and so do U and V
themselves after it, for an optimizer such as Adam leaves the complement by itself. The reachable set is that of the direct
form, parametrised otherwise.
"""

import torch
from torch import nn

from forge_algos.adaptations.osft._bases import Directions, StackedDirections
from forge_algos.adaptations.osft._delta import Delta, addmm_, constant
from forge_algos.adaptations.osft._linear import Pair


class Factors(Delta):
    """ΔW of W [N, M], or of a stack, from its directions, of exact bases, on `like`'s device."""

    projects = True

    protected_left: torch.Tensor
    protected_right: torch.Tensor
    first_left: torch.Tensor
    first_right: torch.Tensor

    def __init__(self, directions: Directions | StackedDirections, like: torch.Tensor) -> None:
        super().__init__()
        left, values, right = (constant(t, like) for t in (directions.Q_u, directions.S_l, directions.Q_v.mT))
        self.left, self.values, self.right = nn.Parameter(left), nn.Parameter(values), nn.Parameter(right)
        constants = {
            "protected_left": directions.U_h,
            "protected_right": directions.V_h,
            # Each of its own storage: parameters are changed in place.
            "first_left": left * values[..., None, :],
            "first_right": right.mT.clone(),
        }
        for name, value in constants.items():
            self.register_buffer(name, constant(value, like), persistent=False)

    def factors(self) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
        return self.left * self.values[..., None, :], self.right.mT, (self.first_left, self.first_right)

    @torch.no_grad()
    def moved(self) -> torch.Tensor:
        # A sum of differences: the difference of the two products would hold the rounding of each. The differences are
        # projected once more, for the factors hold them only as finely as their own size allows.
        left, right = self.left * self.values[..., None, :] - self.first_left, self.right - self.first_right.mT
        _confine(left, right, self.protected_left, self.protected_right)
        return left @ self.right + self.first_left @ right

    @torch.no_grad()
    def before_step(self) -> None:
        _confine(self.left.grad, self.right.grad, self.protected_left, self.protected_right)

    @torch.no_grad()
    def after_step(self) -> None:
        _confine(self.left, self.right, self.protected_left, self.protected_right)


def _confine(
    left: torch.Tensor | None, right: torch.Tensor | None, protected_left: torch.Tensor, protected_right: torch.Tensor
) -> None:
    """Project in place: left [N, r] off U_h, right [r, M] off V_h.
    left ← left − U_h U_hᵀ left, right ← right − right V_h V_hᵀ.
    """
    if left is not None:
        addmm_(left, protected_left, protected_left.mT @ left, alpha=-1)
    if right is not None:
        addmm_(right, right @ protected_right, protected_right.mT, alpha=-1)
