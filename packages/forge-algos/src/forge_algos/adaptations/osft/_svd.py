"""Singular vectors and values of a matrix: all, or the largest by a randomised method.

All of it is computed in float64, whatever the dtype of the matrix.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

RESIDUAL = 1e-3
"""Bound at which the randomised method stops:
what it leaves of the matrix between the found directions and the others, as a share of the smallest singular value that was
asked for."""
_SEED = 1097
_SMALL = 1e-4
"""Share of the largest singular value above which eigenvectors of the square give orthogonal
images: their cosines are at most 1e-15 by the square of it."""


def lacks_float64(error: Exception) -> bool:
    """Return whether an error says that a device computes no float64.

    MPS says so by a TypeError, some GPUs of Intel (Arc) in the words of their driver.
    """
    return isinstance(error, TypeError) or (isinstance(error, RuntimeError) and "aspect fp64 is not supported" in str(error))


class Triplets(NamedTuple):
    """The m largest singular triplets of W [N, M], float64 on the device of W."""

    U: torch.Tensor
    """[N, m], orthonormal columns."""
    S: torch.Tensor
    """[m], in falling order."""
    Vh: torch.Tensor
    """[m, M], orthonormal rows."""
    note: str
    """Why they were not found by the method that was asked for."""


def exact(W: torch.Tensor) -> Triplets:
    """Compute all d = min(N, M) triplets of W float64[N, M].

    V are the eigenvectors of WᵀW, and U are the columns of WV made 1 long: up to twice as fast as LAPACK's SVD in the same
    precision. Squaring loses what lies below 1e-8 of the largest singular value, far below the precision of a float32 W.
    """
    if W.shape[0] < W.shape[1]:
        U, S, Vh, note = exact(W.T)
        return Triplets(Vh.T, S, U.T, note)
    V = torch.linalg.eigh(W.T @ W).eigenvectors.flip(1)
    media = W @ V
    S = torch.linalg.vector_norm(media, dim=0)
    if S.min() > _SMALL * S.max():
        U = media / S
    else:
        # Images of small singular values are not orthogonal, and those of 0 have no direction.
        U, R = torch.linalg.qr(media)
        S = R.diagonal()
        U, S = U * _signs(S), S.abs()
    # Eigenvalues that are equal within rounding come in any order.
    order = S.argsort(descending=True, stable=True)
    return Triplets(U[:, order], S[order], V[:, order].T, "")


def randomized(W: torch.Tensor, count: int) -> Triplets:
    """Compute the `count` largest triplets of W float64[N, M] from the Krylov space of WᵀW.

    The space is that of a random block (Halko, Martinsson, Tropp, arXiv 0909.4061, section 4.5 and its block form, arXiv
    1504.05477), which needs far fewer products with W than powers of it would. It grows until ‖WᵀU − V S‖ (Frobenius, and W V =
    U S) is at most `RESIDUAL` of the last singular value. Where it would need more than half of all directions, `exact`
    answers, which costs less then, and the note gives the reason.
    """
    if W.shape[0] < W.shape[1]:
        U, S, Vh, note = randomized(W.T, count)
        return Triplets(Vh.T, S, U.T, note)
    most = W.shape[1] // 2
    # Spectra of weights are flat: fewer than three times as many directions never sufficed.
    if 3 * count > most:
        return exact(W)._replace(note=f"exact, because {count} of {W.shape[1]} directions are too many for a random start")
    share = float("inf")
    for V, share in _grow(W, count, most):
        if share <= RESIDUAL:
            Q, R = torch.linalg.qr(W @ V)
            P, S, Th = torch.linalg.svd(R)
            return Triplets(Q @ P, S, Th @ V.T, "")
    return exact(W)._replace(
        note=f"exact, because {most} directions from a random start left a residual of {share:.1e} of the last singular value"
    )


def _grow(W: torch.Tensor, count: int, most: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Yield the best V [M, count] of a growing space, and its residual by the last value."""
    block = count // 4 + 8
    # Drawn on the CPU: the same numbers for every device.
    start = torch.randn(W.shape[1], block, generator=torch.Generator().manual_seed(_SEED), dtype=W.dtype)
    basis = torch.linalg.qr(start.to(W.device)).Q
    media = W.T @ (W @ basis)
    while basis.shape[1] <= most:
        if basis.shape[1] >= count:
            squares, P = torch.linalg.eigh(basis.T @ media)
            squares, P = squares[-count:].flip(0), P[:, -count:].flip(1)
            V, S = basis @ P, squares.clamp_min(0).sqrt()
            # A matrix of lower rank than asked for would divide by 0; it goes to the exact method.
            residual = torch.linalg.norm((media @ P - V * squares) / S) / S[-1]
            yield V, float(residual) if S[-1] > 0 else float("inf")
        new = media[:, -block:]
        for _ in range(2):
            # Twice: of a direction that is there already only rounding is left, in any direction.
            new = torch.linalg.qr(new - basis @ (basis.T @ new)).Q
        basis, media = torch.cat([basis, new], 1), torch.cat([media, W.T @ (W @ new)], 1)


def left_out(W: torch.Tensor, U: torch.Tensor, S: torch.Tensor, Vh: torch.Tensor) -> float:
    """Compute the part of W outside of these triplets, as a share of ‖W‖ (Frobenius).

    All min(N, M) of them: ‖W − U S Vh‖. Fewer: what W has between these directions and the others, which is nothing for its
    own: max(‖W V − U S‖, ‖WᵀU − V S‖).
    """
    size = float(torch.linalg.norm(W))
    if not size:
        return 0.0
    if len(S) == min(W.shape):
        return float(torch.linalg.norm(W - U * S @ Vh)) / size
    return max(float(torch.linalg.norm(W @ Vh.T - U * S)), float(torch.linalg.norm(W.T @ U - Vh.T * S))) / size


def with_signs(U: torch.Tensor, Vh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose signs by which the largest entry of each column of U is positive.
    A pair of vectors is as good with both signs turned.
    """
    if not U.shape[1]:
        return U, Vh
    signs = _signs(U.gather(0, U.abs().argmax(0, keepdim=True))[0])
    return U * signs, Vh * signs[:, None]


def _signs(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
