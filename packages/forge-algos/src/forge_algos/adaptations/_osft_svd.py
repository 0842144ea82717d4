"""A matrix → its singular vectors and values: all of them, or the largest by a randomised method, and how far off they are.

All of it is computed in float64, whatever the dtype of the matrix.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

RESIDUAL = 1e-3
"""The randomised method goes on until what it leaves of the matrix between the found directions and the others is below this share of the
smallest singular value that was asked for."""
_SEED = 1097


class Triplets(NamedTuple):
    """The m largest singular triplets of W [N, M], float64 on the device of W, and what they leave of it."""

    U: torch.Tensor
    """[N, m], orthonormal columns."""
    S: torch.Tensor
    """[m], falling."""
    Vh: torch.Tensor
    """[m, M], orthonormal rows."""
    note: str
    """How they were found, where that is not the plain way."""


def exact(W: torch.Tensor) -> Triplets:
    """All d = min(N, M) triplets of W float64[N, M].

    From the eigenvectors V of WᵀW and the QR decomposition of WV, twice as fast as LAPACK's SVD in the same precision, and far more so on
    GPUs. Squaring loses what lies below 1e-8 of the largest singular value, far below what float32 says of W; U is orthonormal even there.
    """
    if W.shape[0] < W.shape[1]:
        U, S, Vh, note = exact(W.T)
        return Triplets(Vh.T, S, U.T, note)
    V = torch.linalg.eigh(W.T @ W).eigenvectors.flip(1)
    U, R = torch.linalg.qr(W @ V)
    S = R.diagonal()
    # Eigenvalues that rounding cannot tell apart come in any order.
    order = S.abs().argsort(descending=True, stable=True)
    return Triplets(U[:, order] * _signs(S[order]), S[order].abs(), V[:, order].T, "")


def randomized(W: torch.Tensor, count: int) -> Triplets:
    """The `count` largest triplets of W float64[N, M] from the Krylov space of WᵀW on a random block (Halko, Martinsson, Tropp, arXiv
    0909.4061, section 4.5 and its block form, arXiv 1504.05477), which wants far fewer products with W than powers of it would.

    The space grows until ‖WᵀU − V S‖ (Frobenius, and W V = U S) is at most `RESIDUAL` of the last singular value. Where it would need
    more than half of all directions, `exact` answers, which costs less then, and the note says why.
    """
    if W.shape[0] < W.shape[1]:
        U, S, Vh, note = randomized(W.T, count)
        return Triplets(Vh.T, S, U.T, note)
    most = W.shape[1] // 2
    # Spectra of weights are flat: fewer than three times as many never were enough.
    if 3 * count > most:
        return exact(W)._replace(note=f"exact, because {count} of {W.shape[1]} directions are too many for a random start")
    share = float("inf")
    for V, share, width in _grow(W, count, most):
        if share <= RESIDUAL:
            Q, R = torch.linalg.qr(W @ V)
            P, S, Th = torch.linalg.svd(R)
            return Triplets(
                Q @ P, S, Th @ V.T, f"randomised, from {width} directions, residual {share:.1e} of the last singular value"
            )
    return exact(W)._replace(
        note=f"exact, because {most} directions from a random start left a residual of {share:.1e} of the last singular value"
    )


def _grow(W: torch.Tensor, count: int, most: int) -> Iterator[tuple[torch.Tensor, float, int]]:
    """(V [M, count] with the best that a growing space has to offer, its residual as a share of the last singular value, the width)."""
    block = count // 4 + 8
    # Drawn on the CPU: the same numbers for every device.
    start = torch.randn(W.shape[1], block, generator=torch.Generator().manual_seed(_SEED), dtype=W.dtype)
    basis = torch.linalg.qr(start.to(W.device)).Q
    images = W.T @ (W @ basis)
    while basis.shape[1] <= most:
        if basis.shape[1] >= count:
            squares, P = torch.linalg.eigh(basis.T @ images)
            squares, P = squares[-count:].flip(0), P[:, -count:].flip(1)
            V, S = basis @ P, squares.clamp_min(0).sqrt()
            # A matrix of lower rank than was asked for has nothing to divide by, and goes to the exact way.
            residual = torch.linalg.norm((images @ P - V * squares) / S) / S[-1]
            yield V, float(residual) if S[-1] > 0 else float("inf"), basis.shape[1]
        new = images[:, -block:]
        for _ in range(2):
            # Twice: what is left of a direction that is there already is rounding, and points anywhere.
            new = torch.linalg.qr(new - basis @ (basis.T @ new)).Q
        basis, images = torch.cat([basis, new], 1), torch.cat([images, W.T @ (W @ new)], 1)


def left_out(W: torch.Tensor, U: torch.Tensor, S: torch.Tensor, Vh: torch.Tensor) -> float:
    """How far U S Vh is from an invariant part of W: max(‖W V − U S‖, ‖WᵀU − V S‖) / ‖W‖, Frobenius.

    That is what W has between these directions and all others, which is nothing for its own. With all min(N, M) directions it is
    ‖W − U S Vh‖ / ‖W‖.
    """
    off = max(float(torch.linalg.norm(W @ Vh.T - U * S)), float(torch.linalg.norm(W.T @ U - Vh.T * S)))
    size = float(torch.linalg.norm(W))
    return off / size if size else 0.0


def with_signs(U: torch.Tensor, Vh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pair's sign such that the largest entry of its column of U is positive: a pair is as good with both signs turned."""
    if not U.shape[1]:
        return U, Vh
    signs = _signs(U.gather(0, U.abs().argmax(0, keepdim=True))[0])
    return U * signs, Vh * signs[:, None]


def _signs(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
