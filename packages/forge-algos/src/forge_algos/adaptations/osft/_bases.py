"""Directions of weights: singular vectors, or principal components of inputs.

They are computed once, cached in files, and shared by ranks.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import attrs
import torch
import torch.distributed as dist

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._adaptation import Ranks
from forge_algos.adaptations.osft import _cache as files
from forge_algos.adaptations.osft._svd import exact, left_out, randomized, with_signs

Svd = Literal["exact", "randomized"]
_SAME_INPUTS = 1e-4
"""Difference of the shares outside of the protected directions up to which inputs are taken for the same."""
_SAME_SIZES = 0.05
"""Relative difference of the second moments along protected directions, in the middle, up to which they are."""


@attrs.frozen(eq=False, kw_only=True)
class Inputs:
    """Inputs of a layer on the rows that osft_directions=inputs measures on."""

    moment: torch.Tensor | None
    """float[M, M], the second moment E[x xᵀ] of its inputs (`osft_moments`); None before it is measured."""
    name: str
    """Full name of the weight, which its file is named by too: equal weights may be given other inputs."""
    rows: str = ""
    """What the rows, and the model that is given them, are known by; "" where nothing is."""
    transposed: bool = False
    """Whether the weight is [inputs, outputs], as transformers' Conv1D has it."""


@attrs.frozen(eq=False, kw_only=True)
class Bases:
    """The m largest singular triplets of a weight W [N, M]: all min(N, M), or those asked for.

    With osft_directions=inputs they are the first min(N, M) principal components of what the layer puts out and is given.
    """

    U: torch.Tensor
    """float32[N, m], orthonormal columns."""
    S: torch.Tensor
    """float32[m], in falling order."""
    Vh: torch.Tensor
    """float32[m, M], orthonormal rows."""
    fingerprint: str
    """sha256 of the three: what is learned in these directions means nothing in others."""
    error: float
    """Part of W that they do not account for, as a share of ‖W‖ (Frobenius),
    measured on these float32 numbers. With m = d it is ‖W − U S Vh‖ / ‖W‖, rounding; with fewer it bounds what W has between
    these directions and the others, nothing for exact ones. With osft_directions=inputs it is the share of E‖x‖² of the inputs
    that lies outside of the protected directions."""
    rows: str = ""
    """`Inputs.rows` of the inputs whose directions they are; "" of singular vectors."""
    note: str = ""
    """Remark for the log: why they are exact after all, or that a file in the cache was bad;
    empty where all went as asked."""


class Directions:
    """Free and protected directions of W [N, M] = U S Vᵀ on both sides.

    Of d = min(N, M) directions the r of the smallest singular values are free, and k = d − r protected.
    """

    def __init__(self, bases: Bases, shape: tuple[int, int], free: int) -> None:
        self.shape = shape
        self.free = free
        self.protected = min(shape) - free
        self._bases = bases

    @property
    def U_h(self) -> torch.Tensor:
        """[N, k]: protected output directions."""
        return self._bases.U[:, : self.protected]

    @property
    def V_h(self) -> torch.Tensor:
        """[M, k]: protected input directions."""
        return self._bases.Vh[: self.protected].t()

    @property
    def S_l(self) -> torch.Tensor:
        """[r]: singular values of the free directions; only of exact bases."""
        return self._bases.S[self.protected :]

    @cached_property
    def Q_u(self) -> torch.Tensor:
        """[N, r]: output directions orthogonal to U_h.

        Where N > M only of exact bases, since the complement of U_h is larger then.
        """
        return self._bases.U[:, self.protected :] if self._whole else _complement(self.U_h)

    @cached_property
    def Q_v(self) -> torch.Tensor:
        """[M, r]: input directions orthogonal to V_h.

        Where N < M only of exact bases, since the complement of V_h is larger then.
        """
        return self._bases.Vh[self.protected :].t() if self._whole else _complement(self.V_h)

    @property
    def _whole(self) -> bool:
        return len(self._bases.S) == min(self.shape)


class StackedDirections:
    """Directions of E matrices W [N, M], each decomposed by itself: tensors [E, ...]."""

    def __init__(self, matrices: Sequence[Directions]) -> None:
        self.shape = matrices[0].shape
        self.free = matrices[0].free
        self._matrices = matrices

    @property
    def U_h(self) -> torch.Tensor:
        """[E, N, k]."""
        return torch.stack([matrix.U_h for matrix in self._matrices])

    @property
    def V_h(self) -> torch.Tensor:
        """[E, M, k]."""
        return torch.stack([matrix.V_h for matrix in self._matrices])

    @property
    def S_l(self) -> torch.Tensor:
        """[E, r]."""
        return torch.stack([matrix.S_l for matrix in self._matrices])

    @property
    def Q_u(self) -> torch.Tensor:
        """[E, N, r]."""
        return torch.stack([matrix.Q_u for matrix in self._matrices])

    @property
    def Q_v(self) -> torch.Tensor:
        """[E, M, r]."""
        return torch.stack([matrix.Q_v for matrix in self._matrices])


def walk_stack(stack: torch.Tensor, name: str, protected: int, *, svd: Svd, cache: Path | None, ranks: Ranks) -> list[Bases]:
    """Return the bases of each matrix of a stack [E, N, M]; collective.

    The stack is gathered whole once, and its matrices are divided among the ranks.
    """
    whole = _full_matrix(stack)
    matrices = {f"{name}[{e}]": matrix for e, matrix in enumerate(whole.unbind())}
    found = bases_of(matrices, dict.fromkeys(matrices, protected), svd=svd, cache=cache, ranks=ranks)
    return list(found.values())


def stack_fingerprint(fingerprints: Sequence[str]) -> str:
    """Compute the fingerprint of a stack from those of its matrices, in their order."""
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def decompose(weight: torch.Tensor, *, protected: int, svd: Svd, device: torch.device | None = None) -> Bases:
    """Compute the singular triplets of a matrix, in float64 whatever its dtype.

    The same matrix gives the same bytes on the same machine with the same number of threads: signs are fixed, random starts are
    seeded.

    Args:
        weight: [N, M], floating.
        protected: k, how many of the largest are wanted, 0 to d = min(N, M).
        svd: "exact" gives all d triplets, "randomized" the k largest, or all d where that is cheaper or does not arrive (`note`
            says so).
        device: where to compute, by default where the weight is; the CPU stands in for one that has no float64. Results are
            there.

    Raises:
        AdapterError: the matrix holds a number that is not finite.
    """
    device = device or weight.device
    W = _float64(weight.detach(), device)
    if not bool(torch.isfinite(W).all()):
        raise AdapterError("the weight holds NaN or infinity; it has no singular vectors. Look at the model's files")
    found = exact(W) if svd == "exact" else randomized(W, protected)
    U, Vh = with_signs(found.U, found.Vh)
    U, S, Vh = U.float().contiguous(), found.S.float(), Vh.float().contiguous()
    error = left_out(W, U.double(), S.double(), Vh.double())
    U, S, Vh = (tensor.to(device) for tensor in (U, S, Vh))
    return Bases(U=U, S=S, Vh=Vh, fingerprint=files.fingerprint_of(U, S, Vh), error=error, note=found.note)


def decompose_inputs(weight: torch.Tensor, inputs: Inputs, *, protected: int) -> Bases:
    """Compute the principal components of a layer's inputs and outputs.

    With C = E[x xᵀ] the inputs' are the eigenvectors of C, and the outputs', without the bias, those of E[Wx (Wx)ᵀ] = W C Wᵀ,
    in float64 where the device has it. S are the roots of the eigenvalues of C: how large inputs are along each.

    Args:
        weight: [N, M], or [M, N] where `inputs.transposed`.
        inputs: what the layer is given.
        protected: k, how many of the first are protected; `error` counts what lies outside of them.

    Raises:
        AdapterError: the matrix holds a number that is not finite.
    """
    device = weight.device
    W, C = _float64(weight.detach(), device), _float64(_measured(inputs), device)
    if not bool(torch.isfinite(W).all()):
        raise AdapterError("the weight holds NaN or infinity; it has no directions. Look at the model's files")
    W = W.T if inputs.transposed else W
    d = min(W.shape)
    values, given = (part.flip(-1) for part in torch.linalg.eigh(C))
    if len(W) > len(C):
        # With W = Q R it is Q (R C Rᵀ) Qᵀ: d of N eigenvectors are all that is asked for, at a fraction of the cost.
        Q, R = torch.linalg.qr(W)
        put_out = Q @ torch.linalg.eigh(R @ C @ R.T).eigenvectors.flip(-1)
    else:
        put_out = torch.linalg.eigh(W @ C @ W.T).eigenvectors.flip(-1)
    left, right = (given, put_out) if inputs.transposed else (put_out, given)
    U, Vh = with_signs(left[:, :d], right[:, :d].T)
    U, S, Vh = U.float().contiguous(), values[:d].clamp_min(0).sqrt().float(), Vh.float().contiguous()
    U, S, Vh = (tensor.to(device) for tensor in (U, S, Vh))
    found = Bases(U=U, S=S, Vh=Vh, fingerprint=files.fingerprint_of(U, S, Vh), error=0.0, rows=inputs.rows)
    return attrs.evolve(found, error=_outside(found, inputs, protected))


def _outside(bases: Bases, inputs: Inputs, protected: int) -> float:
    """Return the share of E‖x‖² that lies outside of the protected directions of the inputs."""
    directions = bases.U[:, :protected] if inputs.transposed else bases.Vh[:protected].T
    C, V = (_float64(tensor, bases.U.device) for tensor in (_measured(inputs), directions))
    whole = float(C.trace())
    return max(0.0, 1 - float((V * (C.to(V.device) @ V)).sum()) / whole) if whole else 0.0


def bases_of(
    weights: Mapping[str, torch.Tensor],
    protected: Mapping[str, int],
    *,
    svd: Svd,
    cache: Path | None,
    ranks: Ranks,
) -> dict[str, Bases]:
    """Return the singular triplets that `walk_bases` yields, in the order of `weights`."""
    found = dict(walk_bases(weights, protected, svd=svd, cache=cache, ranks=ranks))
    return {name: found[name] for name in weights}


def walk_bases(
    weights: Mapping[str, torch.Tensor],
    protected: Mapping[str, int],
    *,
    svd: Svd,
    cache: Path | None,
    ranks: Ranks,
    inputs: Mapping[str, Inputs] | None = None,
    measure: Callable[[], Mapping[str, Inputs]] | None = None,
    fixed: bool = False,
) -> Iterator[tuple[str, Bases]]:
    """Yield (name, bases) of each weight, on its device, largest matrices first; collective.

    Ranks that are joined in torch's process group each decompose one matrix of R at a time, of like sizes, and broadcast it,
    so all have the same bytes. Only R matrices are held at once, beside what the caller keeps.

    Args:
        weights: [N, M] each; a DTensor is gathered.
        protected: how many of the largest directions are wanted of each.
        svd: as in `decompose`.
        cache: directory of files from before, and for those to come; None keeps none. A file that is torn, altered or another
            matrix's is replaced, and the note says why.
        ranks: those that share the model.
        inputs: what each layer is given, the same on every rank: their principal components in the place of singular vectors.
        measure: returns them with their moments, collective; called where `inputs` have none and the cache of one rank has not
            the directions of their `rows`, whole.
        fixed: whether the directions in the cache are those of a run that goes on: of other rows none are computed.

    Raises:
        AdapterError: a weight holds a number that is not finite, the cache cannot be written, or it is fixed and of other rows.
    """
    if any(weight.is_meta for weight in weights.values()):
        yield from ((name, _outline(weight, protected[name], svd)) for name, weight in weights.items())
        return
    together = ranks.world_size > 1 and dist.is_initialized()
    at_once, mine = (ranks.world_size, ranks.rank) if together else (1, 0)
    names = sorted(weights, key=lambda name: -weights[name].numel() * min(weights[name].shape))
    for start in range(0, len(names), at_once):
        group = names[start : start + at_once]
        matrix: torch.Tensor | None = None
        for i, name in enumerate(group):
            whole = _full_matrix(weights[name])
            # On every rank, so that all raise, instead of waiting for one that did.
            if not bool(torch.isfinite(whole).all()):
                raise AdapterError(f"{name} holds NaN or infinity; it has no singular vectors. Look at the model's files")
            matrix = whole if i == mine else matrix
            del whole
        own = None
        if matrix is not None:
            name = group[mine]
            own = _cached(matrix, protected[name], svd, cache, None if inputs is None else inputs[name], fixed=fixed)
        if measure is not None and inputs is not None and inputs[group[0]].moment is None:
            lacks = matrix is not None and own is None
            if _on_any(lacks, weights[group[0]].device) if together else lacks:
                inputs = measure()
                if matrix is not None:
                    own = _cached(matrix, protected[name], svd, cache, inputs[name], fixed=fixed)
        del matrix
        for i, name in enumerate(group):
            yield name, _broadcast(own, i, i == mine, weights[name].device) if together or own is None else own


def _outline(weight: torch.Tensor, protected: int, svd: Svd) -> Bases:
    """Return bases without data of a weight without data: memory needs shapes alone."""
    (N, M), d = weight.shape, min(weight.shape)
    m = d if svd == "exact" else protected
    U, S, Vh = (weight.new_empty(*shape, dtype=torch.float32) for shape in ((N, m), (m,), (m, M)))
    return Bases(U=U, S=S, Vh=Vh, fingerprint="", error=0.0)


def cached_inputs(name: str, weight: torch.Tensor, protected: int, cache: Path) -> Bases | str:
    """Read the directions of inputs that a run has protected, or return why they cannot be."""
    return _read(cache / f"{_key(weight, protected, 'exact', name)}.safetensors", weight.device)


def _key(weight: torch.Tensor, protected: int, svd: Svd, name: str | None) -> str:
    return files.key_of(weight, svd if name is None else f"inputs of {name} beyond {protected}", protected)


def _read(path: Path, device: torch.device) -> Bases | str:
    """Read a file of the cache, or return why it cannot be used: "" without a file."""
    found = files.read(path)
    if isinstance(found, str):
        return found
    tensors, words = found
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Bases(
        **on_device,
        fingerprint=words["fingerprint"],
        error=float(words["error"]),
        rows=words.get("rows", ""),
        note=words["note"],
    )


def _cached(
    weight: torch.Tensor, protected: int, svd: Svd, cache: Path | None, inputs: Inputs | None, *, fixed: bool
) -> Bases | None:
    """Return the bases from the cache, or compute and cache them.

    None where they are those of inputs that were not measured, and the cache has none of their rows.
    """

    def computed() -> Bases:
        if inputs is not None:
            return decompose_inputs(weight, inputs, protected=protected)
        return decompose(weight, protected=protected, svd=svd)

    unmeasured = inputs is not None and inputs.moment is None
    if cache is None:
        return None if unmeasured else computed()
    path = cache / f"{_key(weight, protected, svd, None if inputs is None else inputs.name)}.safetensors"
    found = _read(path, weight.device)
    if inputs is not None and unmeasured:
        return found if isinstance(found, Bases) and inputs.rows and found.rows == inputs.rows else None
    if isinstance(found, Bases):
        # Measured on other ranks the inputs differ by their rounding, of other rows by much more.
        if inputs is None or _are_of(found, inputs, protected):
            return found
        if fixed:
            raise AdapterError(
                f"{inputs.name}: what this run protects was measured on other rows than those of osft_calibration_path now: "
                "put back the rows that it began with, or begin another run"
            )
        found = f"{path.name} in the cache is of other rows"
    bases = computed()
    words = {"fingerprint": bases.fingerprint, "error": repr(bases.error), "note": bases.note}
    if bases.rows:
        words["rows"] = bases.rows
    files.write(path, {"U": bases.U, "S": bases.S, "Vh": bases.Vh}, words)
    return attrs.evolve(bases, note="; ".join(filter(None, (bases.note, f"{found}: computed anew" if found else ""))))


def _are_of(bases: Bases, inputs: Inputs, protected: int) -> bool:
    """Return whether directions are of these inputs, but for rounding.

    One direction may have nearly all of E‖x‖², so the share outside does not tell alone: along the protected directions the
    moments are compared, by the middle one of their relative differences, for the smallest are rounding.
    """
    if abs(_outside(bases, inputs, protected) - bases.error) >= _SAME_INPUTS:
        return False
    V = _float64(bases.U[:, :protected] if inputs.transposed else bases.Vh[:protected].T, bases.U.device)
    C = _float64(_measured(inputs), bases.U.device).to(V.device)
    now, then = (V * (C @ V)).sum(0), _float64(bases.S[:protected], V.device).square()
    some = then > 1e-9 * then.max()
    return not bool(some.any()) or float(((now - then).abs() / then)[some].median()) < _SAME_SIZES


def _broadcast(own: Bases | None, source: int, is_mine: bool, device: torch.device) -> Bases:
    """Broadcast the bases of rank `source` to all ranks."""
    carried = _transfer_device(device)
    head: list[tuple[dict[str, list[int]], str, float, str, str] | None] = [None]
    if own is not None and is_mine:
        shapes = {name: list(getattr(own, name).shape) for name in ("U", "S", "Vh")}
        head = [(shapes, own.fingerprint, own.error, own.rows, own.note)]
    dist.broadcast_object_list(head, src=source)
    assert head[0] is not None
    shapes, fingerprint, error, rows, note = head[0]
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = getattr(own, name).to(carried) if own is not None and is_mine else torch.empty(shape, device=carried)
        dist.broadcast(tensor, src=source)
        tensors[name] = tensor.to(device)
    U, S, Vh = (tensors[name] for name in ("U", "S", "Vh"))
    return Bases(U=U, S=S, Vh=Vh, fingerprint=fingerprint, error=error, rows=rows, note=note)


def _on_any(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on a rank of the process group; collective."""
    found = torch.tensor(int(flag), device=_transfer_device(device))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def _measured(inputs: Inputs) -> torch.Tensor:
    assert inputs.moment is not None, f"{inputs.name} was not measured"
    return inputs.moment


def _transfer_device(device: torch.device) -> torch.device:
    """Return the device on which tensors travel: their own, or the process group's."""
    served = [entry.partition(":")[0] for entry in dist.get_backend_config().split(",")]
    return device if device.type in served else torch.device(served[0])


def _full_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return the matrix itself; gathering a DTensor is collective."""
    gather = getattr(weight.detach(), "full_tensor", None)
    return weight.detach() if gather is None else gather()


def _float64(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return weight.to(device, torch.float64)
    except TypeError:
        return weight.to("cpu", torch.float64)


def _complement(basis: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns [n, n − k] that are orthogonal to basis [n, k]."""
    whole, _ = torch.linalg.qr(basis.double(), mode="complete")
    return whole[:, basis.shape[1] :].float()
