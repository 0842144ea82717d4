"""Checks of a loss's arguments; a `LossError` names the argument, the value and the remedy."""

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import torch

from forge_algos._errors import LossError
from forge_algos.losses._numeric import wide


def samples(*optional: str, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return tensors float[N] of one length by name, as float32; an `optional` None is dropped.
    They are float64 where one of them is.
    """
    given: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() != 1:
            raise LossError(f"{name}: a tensor of floats with one dimension is wanted, not {described(tensor)}")
        given[name] = tensor
    _same_length(given)
    dtype = torch.float32
    for tensor in given.values():
        dtype = torch.promote_types(dtype, wide(tensor.dtype))
    return {name: tensor.to(dtype) for name, tensor in given.items()}


def lengths(name: str, given: torch.Tensor, like: torch.Tensor, like_name: str) -> torch.Tensor:
    """Return numbers of tokens int[N], one for each of `like`, as floats on its device.
    An empty completion counts as one token.
    """
    if not isinstance(given, torch.Tensor) or given.is_floating_point() or given.is_complex() or given.dim() != 1:
        raise LossError(f"{name}: a tensor of integers with one dimension is wanted, not {described(given)}")
    _same_length({like_name: like, name: given})
    # A GPU's host would wait for all that it still has to do.
    return given.to(device=like.device, dtype=like.dtype, non_blocking=True).clamp(min=1)


def targets(given: torch.Tensor, rows: torch.Tensor, name: str) -> None:
    """Raise LossError unless `given` is int[M], one target for each row of `rows` [M, ...].

    Labels that are not shifted, beside hidden states that are, would be paired with the wrong rows without an error.
    """
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        raise LossError(f"{name}: a tensor with two dimensions is wanted, a row for each target, not {described(rows)}")
    if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
        raise LossError(f"targets: a tensor of int64 is wanted, not {described(given)}")
    if given.shape != rows.shape[:1]:
        raise LossError(
            f"targets: one for each row of {name} is wanted, int64[{len(rows)}], not {described(given)}. Where the last "
            "position is left out of one, leave the first label out of the other: each row predicts the token after it"
        )


def integers(name: str, given: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return a tensor or a sequence of integers in one dimension as a tensor."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):  # None, texts
        found = None
    if found is None or found.is_floating_point() or found.dim() != 1:
        raise LossError(f"{name}: integers in one dimension are wanted, not {described(given)}")
    return found


def cuts(given: torch.Tensor | Sequence[int], tokens: torch.Tensor, name: str) -> list[int]:
    """Return the lengths of samples that fill `tokens`[T]."""
    found = integers("lengths", given)
    total, least = (int(found.sum()), int(found.min())) if len(found) else (0, 0)
    if total != len(tokens) or least < 0:
        raise LossError(
            f"lengths: {len(found)} lengths from {least} that add up to {total}, but {name} has {len(tokens)} tokens; give the "
            "number of tokens of each sample, in the order of the tokens"
        )
    return list(map(int, found.tolist()))


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Raise LossError for an unknown choice, with the nearest known one."""
    names = list(known)
    if value in names:
        return
    nearest = get_close_matches(str(value), names, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise LossError(f"{name}: there is no {value!r}.{hint} Known: {', '.join(names)}")


def number(name: str, value: float, *, above: float = -math.inf, least: float = -math.inf, below: float = math.inf) -> None:
    """Raise LossError unless above < value < below and least ≤ value, a finite number."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if ok and above < value < below and value >= least:
        return
    lower = f"above {above:g}" if above > -math.inf else f"from {least:g}" if least > -math.inf else ""
    upper = f"below {below:g}" if below < math.inf else ""
    raise LossError(f"{name}: a finite number {' and '.join(filter(None, [lower, upper]))} is wanted, not {value!r}")


def described(value: object) -> str:
    """Describe a value for a message: its type, shape or text."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def _same_length(given: dict[str, torch.Tensor]) -> None:
    if len({len(tensor) for tensor in given.values()}) > 1:
        found = ", ".join(f"{name} {len(tensor)}" for name, tensor in given.items())
        raise LossError(f"the lengths disagree: {found}; all of them are over the same samples")
