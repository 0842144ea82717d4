"""How far a target moved under OSFT, how much of that is forbidden, and where it lies.

With W [N, M] = U diag(S) Vᵀ, its k protected directions U_h = U[:, :k] and V_h = V[:, :k], and ΔW the change by a run: entry
(i, j) of UᵀΔW V is how much of the input direction j now goes to the output direction i. All is measured in float64 on the
files that were written, so that the rounding to their dtype is in the figures, and its size stands beside them.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._adaptation import OneRank
from forge_algos.adaptations.osft._bases import Bases, bases_of, cached_inputs, stack_fingerprint


@attrs.frozen(kw_only=True)
class Moved:
    """Change of one target by a run, in Frobenius norms; a target that did not move has zeros.

    Those of a stack of expert matrices are over all of its matrices, each in its own singular directions.
    """

    name: str
    """Full name of the layer."""
    shape: tuple[int, int]
    """N outputs and M inputs, of a stack those of each matrix."""
    free: int
    """Number of its min(N, M) singular directions that could move, of a stack in each matrix."""
    moved: float
    """‖ΔW‖ / ‖W‖."""
    outputs: float
    """‖U_hᵀΔW‖ / ‖ΔW‖: the share that goes to protected output directions."""
    inputs: float
    """‖ΔW V_h‖ / ‖ΔW‖: the share that comes from protected input directions."""
    both: float
    """‖U_hᵀΔW V_h‖ / ‖ΔW‖: the share that leads from protected to protected,
    all that the paper's rule forbids."""
    rounding: float
    """Expected norm of the rounding to the written dtype, over ‖ΔW‖:
    a leak below it means nothing."""
    anew: bool = False
    """Whether the singular vectors are not the run's own, which are gone,
    but others of the same weights."""
    experts: int | None = None
    """E, the number of matrices of a stack; None of a linear layer."""
    most: int | None = None
    """Number of the matrix of a stack that moved most, from 0."""
    transposed: bool = False
    """Whether the weight in the files is [M, N], as GPT-2's Conv1D holds it."""

    @property
    def protected(self) -> int:
        """Number of its singular directions that were protected, of a stack in each matrix."""
        return min(self.shape) - self.free

    def leak(self, rule: Literal["strict", "paper"]) -> float:
        """Return the share of the update that the rule forbids: zero but for rounding where it held."""
        return self.both if rule == "paper" else max(self.outputs, self.inputs)


@attrs.frozen(eq=False, kw_only=True)
class Portrait:
    """Spectrum of one target, and where its change lies between its singular vectors."""

    singular_values: Tensor
    """float64[min(N, M)], of the weights before, in falling order."""
    protected: int
    """Number of them that are protected: the first."""
    rows: tuple[int, ...]
    """Edges of the bands of output directions, from 0 to N;
    one of them is `protected`, one min(N, M)."""
    columns: tuple[int, ...]
    """Edges of the bands of input directions, from 0 to M, likewise."""
    of_inputs: bool = False
    """Whether the directions are those of inputs and outputs, and the values how large inputs are along each."""
    rms: Tensor
    """float64[len(rows) - 1, len(columns) - 1]: root mean square of the entries of UᵀΔW V in
    each field; in the last band of the longer side, beyond min(N, M), of the directions that the weights do not use at all."""

    def share(self, *, outputs: bool, inputs: bool) -> float:
        """Return the share of ‖ΔW‖² from protected inputs to protected outputs, False for free ones."""
        energy = self.rms.square() * _widths(self.rows)[:, None] * _widths(self.columns)
        total = float(energy.sum())
        rows = _below(self.rows, self.protected, inside=outputs)
        columns = _below(self.columns, self.protected, inside=inputs)
        return float(energy[rows][:, columns].sum()) / total if total else 0.0


def osft_moved(
    name: str,
    before: Tensor,
    after: Tensor,
    planned: Mapping[str, Any],
    *,
    svd: Literal["exact", "randomized"],
    cache: Path | None,
) -> Moved:
    """Measure how far a target moved, and how much of that lies where nothing may move.

    Args:
        name: of the target.
        before: [N, M], [E, N, M] of a stack, or [M, N] of a transposed one, as the run loaded it.
        after: of the same shape, as it was exported, in the dtype of the file.
        planned: the run's plan of the target (`OSFT.plan`).
        svd: how the run found its singular vectors.
        cache: where it keeps them, or with osft_directions=inputs its directions.

    Raises:
        AdapterError: the shapes are not those of the plan, or the run's directions are of inputs and gone.
    """
    whole, free = tuple(planned["shape"]), int(planned["free"])
    if tuple(before.shape) != whole or tuple(after.shape) != whole:
        raise AdapterError(
            f"{name} is {list(before.shape)} before and {list(after.shape)} after, and was {list(whole)} when the run began: "
            "these are not its models"
        )
    delta = after.double() - before.double()
    shape, stacked = (whole[-2], whole[-1]), len(whole) > 2
    size, protected = float(delta.norm()), min(shape) - free
    turned = bool(planned.get("transposed"))
    found = Moved(
        name=name,
        shape=shape[::-1] if turned else shape,
        free=free,
        moved=0.0,
        outputs=0.0,
        inputs=0.0,
        both=0.0,
        rounding=0.0,
        transposed=turned,
    )
    if stacked:
        found = attrs.evolve(found, experts=whole[0], most=int(delta.flatten(1).norm(dim=1).argmax()))
    if not size:
        return found
    found = attrs.evolve(found, moved=size / float(before.double().norm()), rounding=_rounding(after) / size)
    if not 0 < protected < min(shape):
        # Nothing is protected, or all: no directions to compare.
        everything = float(protected > 0)
        return attrs.evolve(found, outputs=everything, inputs=everything, both=everything)
    matrices = {f"{name}[{e}]": matrix for e, matrix in enumerate(before)} if stacked else {name: before}
    wanted = {matrix: protected for matrix in matrices}  # noqa: C420 - dict.fromkeys has no type of its values
    if planned.get("directions") == "inputs":
        bases = {name: osft_input_directions(name, before, protected, cache)}
    else:
        bases = bases_of(matrices, wanted, svd=svd, cache=cache, ranks=OneRank())
    deltas = delta if stacked else delta[None]
    parts = torch.stack([_leak(one, of, protected) for one, of in zip(deltas, bases.values(), strict=True)])
    rows, columns, both = (parts.sum(0).sqrt() / size).tolist()
    outputs, inputs = (columns, rows) if turned else (rows, columns)
    own = [one.fingerprint for one in bases.values()]
    anew = (stack_fingerprint(own) if stacked else own[0]) != planned["bases"]
    return attrs.evolve(found, outputs=outputs, inputs=inputs, both=both, anew=anew)


def osft_input_directions(name: str, before: Tensor, protected: int, cache: Path | None) -> Bases:
    """Read the directions of inputs and outputs that a run protected.

    Raises:
        AdapterError: they are gone; only the rows that were measured have them.
    """
    found = "" if cache is None else cached_inputs(f"{name}.weight", before, protected, cache)
    if isinstance(found, Bases):
        return found
    raise AdapterError(
        f"{name}: the directions of inputs that the run protected are not in {cache}"
        f"{f' ({found})' if found else ''}, and weights do not have them: put back the run's osft/"
    )


def _leak(delta: Tensor, bases: Bases, protected: int) -> Tensor:
    """Return float64[3]: the squared norms of ΔW to, from, and between protected directions."""
    left, right = bases.U[:, :protected].double(), bases.Vh[:protected].double().T
    to_protected = left.T @ delta
    return torch.stack([part.square().sum() for part in (to_protected, delta @ right, to_protected @ right)])


def osft_portrait(
    before: Tensor, after: Tensor, *, protected: int, bands: int = 32, directions: Bases | None = None
) -> Portrait:
    """Measure one target's spectrum and where its change lies, from a whole decomposition.
    It is made anew, whatever method the run used.

    Args:
        before: [N, M], as the run loaded it.
        after: [N, M], as it was exported.
        protected: k, how many directions were protected.
        bands: how many bands each side is divided into, about; each holds protected or free directions alone.
        directions: those of inputs and outputs in the place of singular vectors (`osft_input_directions`).
    """
    if directions is None:
        U, S, Vh = torch.linalg.svd(before.double(), full_matrices=False)
    else:
        U, S, Vh = directions.U.double(), directions.S.double(), directions.Vh.double()
    delta = after.double() - before.double()
    d = min(before.shape)
    inner = U.T @ delta @ Vh.T
    rows, columns = _edges(d, protected, bands), _edges(d, protected, bands)
    energy = _sums(_sums(inner.square(), rows).T, columns).T
    # Thin singular vectors do not span all directions of the longer side.
    if before.shape[0] > d:
        rest = delta @ Vh.T - U @ inner
        energy = torch.cat([energy, _sums(rest.square().sum(0, keepdim=True).T, columns).T])
        rows = (*rows, before.shape[0])
    elif before.shape[1] > d:
        rest = U.T @ delta - inner @ Vh
        energy = torch.cat([energy, _sums(rest.square().sum(1, keepdim=True), rows)], dim=1)
        columns = (*columns, before.shape[1])
    rms = (energy / (_widths(rows)[:, None] * _widths(columns))).sqrt()
    of_inputs = directions is not None
    return Portrait(singular_values=S, protected=protected, rows=rows, columns=columns, of_inputs=of_inputs, rms=rms)


def _rounding(written: Tensor) -> float:
    """Return the expected norm of errors of half a unit in the last place, evenly distributed."""
    wide = written.double()
    unit = torch.finfo(written.dtype).eps * torch.ldexp(torch.ones_like(wide), torch.frexp(wide).exponent - 1)
    return float((unit.square().sum() / 12).sqrt())


def _edges(d: int, protected: int, bands: int) -> tuple[int, ...]:
    """Divide 0 to d into bands of about one width, with an edge where the protected ones end."""
    edges = [0]
    for first, last in ((0, protected), (protected, d)):
        count = min(last - first, max(1, round(bands * (last - first) / d)))
        edges += [first + (last - first) * number // count for number in range(1, count + 1)]
    return tuple(edges)


def _sums(values: Tensor, edges: tuple[int, ...]) -> Tensor:
    """Sum neighbouring rows: [d, n] → [bands, n]."""
    return torch.stack([values[first:last].sum(0) for first, last in pairwise(edges)])


def _widths(edges: tuple[int, ...]) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64).diff()


def _below(edges: tuple[int, ...], protected: int, *, inside: bool) -> Tensor:
    return (torch.tensor(edges[1:]) <= protected) == inside
