"""A target's bases and how many of its directions are free → the directions themselves: protected and free, on both sides."""

from functools import cached_property

import torch

from forge_algos.adaptations.osft._bases import Bases


class Directions:
    """Of W [N, M] = U S Vᵀ with d = min(N, M), of which the r smallest singular values' directions are free and k = d − r protected."""

    def __init__(self, bases: Bases, shape: tuple[int, int], free: int) -> None:
        self.shape = shape
        self.free = free
        self.protected = min(shape) - free
        self._bases = bases

    @property
    def U_h(self) -> torch.Tensor:
        """[N, k]."""
        return self._bases.U[:, : self.protected]

    @property
    def V_h(self) -> torch.Tensor:
        """[M, k]."""
        return self._bases.Vh[: self.protected].t()

    @property
    def S_l(self) -> torch.Tensor:
        """[r]; only of exact bases."""
        return self._bases.S[self.protected :]

    @cached_property
    def Q_u(self) -> torch.Tensor:
        """[N, r] beside U_h; where N > M only of exact bases, for the complement of U_h is larger then."""
        return self._bases.U[:, self.protected :] if self._whole else _complement(self.U_h)

    @cached_property
    def Q_v(self) -> torch.Tensor:
        """[M, r] beside V_h; where N < M only of exact bases."""
        return self._bases.Vh[self.protected :].t() if self._whole else _complement(self.V_h)

    @property
    def _whole(self) -> bool:
        return len(self._bases.S) == min(self.shape)


def _complement(basis: torch.Tensor) -> torch.Tensor:
    """[n, n − k]: orthonormal columns beside those of basis [n, k]."""
    whole, _ = torch.linalg.qr(basis.double(), mode="complete")
    return whole[:, basis.shape[1] :].float()
