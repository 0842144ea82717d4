"""Liger's fused kernels in place of a model's own layers: RMSNorm, SwiGLU and RoPE.

A layer is replaced only where Liger's function gives its outputs and gradients on this very device: that is tried on random
numbers, one layer of each kind. Names of parameters stay.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import isfinite
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from forge_accel._errors import AccelError
from forge_accel.fused._replaced_forward import ReplacedForward, may_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROPE = "apply_rotary_pos_emb"
"""Name of the function by which transformers' attention layers rotate queries and keys."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Most difference of outputs and gradients over their norms: both round as often, in another order."""


_WITHOUT_TRITON = ("hpu", "mps")
"""Kinds of devices for which there is no Triton."""


def check_liger(device: str) -> str:
    """Check that Liger's kernels can be used on a kind of device; return Liger's version.

    Raises:
        AccelError: liger-kernel or Triton is missing, Triton has nothing for the device, or that is a CPU and Triton is not
            asked to interpret.

    """
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        found = None
    # By its module: its package has another name in each vendor's build of torch (triton-rocm, triton-xpu, triton-ascend).
    if found is None or find_spec("triton") is None:
        raise AccelError(
            "kernels=liger needs liger-kernel and Triton, which are not both installed: `pip install liger-kernel`, "
            "or kernels=none."
        )
    if device in _WITHOUT_TRITON:
        raise AccelError(f"kernels=liger: Triton, in which Liger is written, has no kernels for {device}: set kernels=none.")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise AccelError(
            "kernels=liger: Triton has no kernels for CPUs (with TRITON_INTERPRET=1 it interprets them, which is for tests): "
            "set kernels=none."
        )
    return found


class Replaced(NamedTuple):
    """Layers of one kind, and what became of them."""

    kind: str
    """`RMSNorm`, `SwiGLU` or `RoPE`."""
    layers: str
    """Class of the layers."""
    number: int
    """Number of them that compute by Liger's kernel; 0 where none does."""
    why: str
    """The reason, of one as of the other."""


def use_liger(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> list[Replaced]:
    """Let a model's layers compute by Liger's kernels, where those give the same.

    Args:
        model: Loaded, not yet compiled; it may be divided over ranks.
        dtype: Of the computation.
        device: On which the layers are tried.

    Returns:
        What was replaced and what was not, by class of layer; empty for a model that has no such layer.

    """
    functions = import_module("liger_kernel.transformers.functional")
    tried: dict[tuple[str, type], tuple[Callable[[nn.Module], ReplacedForward] | None, str]] = {}
    numbers: dict[tuple[str, type], int] = {}
    for kind, module in _candidates(model):
        key = kind, type(module)
        if key not in tried:
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
                torch.manual_seed(0)
                tried[key] = _TRIALS[kind](module, functions, dtype, device)
            numbers[key] = 0
        if (make := tried[key][0]) is not None:
            make(module).install()
            numbers[key] += 1
    return [Replaced(kind, layers.__name__, numbers[kind, layers], why) for (kind, layers), (_, why) in tried.items()]


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find layers that may be one of Liger's, by what they hold."""
    for module in model.modules():
        if not may_replace(module):
            continue
        name, children = type(module).__name__, dict(module.named_children())
        if name.endswith("RMSNorm") and list(dict(module.named_parameters())) == ["weight"]:
            yield "RMSNorm", module
        elif {"gate_proj", "up_proj", "down_proj"} <= children.keys() and hasattr(module, "act_fn"):
            yield "SwiGLU", module
        elif _rope_of(type(module).forward) is not None:
            yield "RoPE", module


def _rope_of(function: Any) -> Callable[..., Any] | None:
    """Return the function that a forward, or what it decorates, calls by the name of `ROPE`."""
    if not isinstance(function, FunctionType):
        return None
    if ROPE in function.__code__.co_names and ROPE in function.__globals__:
        return function.__globals__[ROPE]
    return None if _decorated(function) is None else _rope_of(_decorated(function))


def _decorated(function: FunctionType) -> Any:
    """Return the function that a decorator's wrapper holds in its closure; None without one."""
    inner = getattr(function, "__wrapped__", None)
    return inner if inner is not None and any(_holds(cell, inner) for cell in function.__closure__ or ()) else None


def _holds(cell: CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        # It is empty.
        return False


def _rotating_by(function: FunctionType, rope: Callable[..., Any]) -> FunctionType:
    """Copy a forward, and the decorators around it, that finds `rope` by the name of `ROPE`."""
    names, closure = function.__globals__, function.__closure__
    if ROPE in function.__code__.co_names and ROPE in names:
        names = {**names, ROPE: rope}
    else:
        inner = _decorated(function)
        copied = _rotating_by(inner, rope)
        closure = tuple(CellType(copied) if _holds(cell, inner) else cell for cell in closure or ())
    found = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


Trial = tuple["Callable[[nn.Module], ReplacedForward] | None", str]


def _try_norm(module: nn.Module, functions: Any, dtype: torch.dtype, device: torch.device) -> Trial:
    size = next(module.parameters()).shape[0]
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None, "it has no epsilon under a known name"
    x, weight = torch.randn(2, 5, size, device=device).to(dtype), (1 + torch.randn(size, device=device) / 8).to(dtype)

    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _twin(module, weight=weight).forward(x)

    fault = ""
    for casting, offset in (("llama", 0.0), ("gemma", 0.0), ("gemma", 1.0)):
        fused = partial(functions.liger_rms_norm, eps=eps, offset=offset, casting_mode=casting, in_place=False)
        if not (found := _fault(own, fused, (x, weight), dtype)):
            return partial(_Norm, function=fused), f"the same outputs and gradients (casting as {casting}, offset {offset:g})"
        fault = fault or found
    return None, fault


def _try_mlp(module: nn.Module, functions: Any, dtype: torch.dtype, device: torch.device) -> Trial:
    gate, up = (torch.randn(2, 5, 64, device=device).to(dtype) for _ in range(2))

    def own(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # The layer's own forward, with projections that give these two.
        parts: dict[str, nn.Module] = {"gate_proj": _Give(gate), "up_proj": _Give(up), "down_proj": nn.Identity()}
        return _twin(module, modules=parts).forward(gate)

    fault = ""
    for name in ("liger_swiglu", "liger_geglu"):
        fused = getattr(functions, name)
        # Liger's backward writes into what it was given.
        if not (found := _fault(own, lambda a, b, f=fused: f(a.clone(), b.clone()), (gate, up), dtype)):
            return partial(_GatedMLP, function=fused), f"{name} has the same outputs and gradients"
        fault = fault or found
    return None, fault


def _try_rope(module: nn.Module, functions: Any, dtype: torch.dtype, device: torch.device) -> Trial:
    own = cast("Callable[..., Any]", _rope_of(type(module).forward))
    query, key = (torch.randn(1, heads, 7, 16, device=device).to(dtype) for heads in (4, 2))
    angles = torch.randn(1, 7, 8, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    given = (query, key)
    fused = functions.liger_rope
    if fault := _fault(lambda q, k: own(q, k, cos, sin), lambda q, k: fused(q.clone(), k.clone(), cos, sin), given, dtype):
        return None, fault
    return partial(_Rotating, function=fused), "the same outputs and gradients"


_TRIALS = {"RMSNorm": _try_norm, "SwiGLU": _try_mlp, "RoPE": _try_rope}


class _Norm(ReplacedForward):
    """RMSNorm by one kernel."""

    def __init__(self, module: nn.Module, *, function: Callable[..., torch.Tensor]) -> None:
        super().__init__(module)
        self._function = function

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._function(hidden_states, self.module.weight)


class _GatedMLP(ReplacedForward):
    """MLP whose activation and product are one kernel."""

    def __init__(self, module: nn.Module, *, function: Callable[..., torch.Tensor]) -> None:
        super().__init__(module)
        self._function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.module
        return mlp.down_proj(self._function(mlp.gate_proj(x), mlp.up_proj(x)))


class _Rotating(ReplacedForward):
    """Attention layer whose forward finds Liger's function where it looks for its own."""

    def __init__(self, module: nn.Module, *, function: Callable[..., Any]) -> None:
        super().__init__(module)
        self._forward = _rotating_by(type(module).forward, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)


class _Give(nn.Module):
    """Layer that gives one tensor, whatever it is asked."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self._given = [given]

    def forward(self, _x: torch.Tensor) -> torch.Tensor:
        return self._given[0]


def _twin(module: nn.Module, *, weight: torch.Tensor | None = None, modules: dict[str, nn.Module] | None = None) -> Any:
    """Copy a layer with other weights and parts in place of its own."""
    twin = copy.copy(module)
    parts = vars(twin)
    parts["_parameters"] = {}
    parts["_modules"] = {**vars(module)["_modules"], **(modules or {})}
    if weight is not None:
        parts["weight"] = weight
    return twin


def _fault(own: Callable[..., Any], fused: Callable[..., Any], tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> str:
    """Return how two functions' outputs and gradients differ; empty where they do not."""
    results = []
    for function in (own, fused):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        try:
            out = function(*leaves)
            parts = out if isinstance(out, tuple) else (out,)
            weights = [torch.linspace(-1, 1, part.numel(), device=part.device).view(part.shape) for part in parts]
            torch.stack([(part.float() * weight).sum() for part, weight in zip(parts, weights, strict=True)]).sum().backward()
        except Exception as error:  # noqa: BLE001 - a kernel that does not run is not taken, whatever it says
            return f"{'it' if function is own else 'Liger'} fails with {type(error).__name__}: {error}".partition("\n")[0]
        results.append([*(part.detach() for part in parts), *(leaf.grad for leaf in leaves)])
    limit, worst = _TOLERANCE.get(dtype, 2e-2), 0.0
    for theirs, ours in zip(*results, strict=True):
        if theirs is None or ours is None:
            return "Liger gives no gradient where it does"
        difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-30))
        if not isfinite(difference):
            # NaN is above no limit: `max` would pass it over.
            return "Liger gives NaN or infinity, or a difference without a bound"
        worst = max(worst, difference)
    return "" if worst <= limit else f"Liger differs by {worst:.1e} of the norm"
