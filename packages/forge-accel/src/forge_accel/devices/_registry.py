"""Registry of accelerators: one row for each that is built in, and those of entry points."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import torch

from forge_accel._errors import AccelError
from forge_accel.devices._accelerator import Accelerator

GROUP = "forge.accelerators"
"""Entry-point group; a name is a value of the setting `device`, its value a subclass of Accelerator."""

_BUILT_IN = {
    name: EntryPoint(name, f"forge_accel.devices.{path}", GROUP)
    for name, path in {
        "cpu": "_cpu:CPUAccelerator",
        "cuda": "_cuda:CUDAAccelerator",
        "hpu": "_hpu:HPUAccelerator",
        "mps": "_mps:MPSAccelerator",
        "npu": "_npu:NPUAccelerator",
        "rocm": "_rocm:ROCMAccelerator",
        "xpu": "_xpu:XPUAccelerator",
    }.items()
}

_ALIASES = {
    "hip": "use rocm",
    "amd": "use rocm",
    "gaudi": "use hpu",
    "habana": "use hpu",
    "ascend": "use npu",
    "intel": "use xpu",
    "metal": "use mps",
    "mlx": "use backend=mlx: it is no device of torch",
}
"""Names that people try, and what the error suggests."""


def accelerator(name: str = "auto") -> Accelerator:
    """Return the accelerator to compute on.

    Args:
        name: `auto` (the available one of the highest priority), `cpu`, `cuda`, `rocm`, `xpu`, `hpu`, `npu`, `mps`, a plug-in's
            name; with an index (`cuda:1`) for one device of several. `cuda` is `rocm` where torch is built for that.

    Raises:
        AccelError: there is no such accelerator, or this machine does not have it.

    >>> accelerator("cpu").device
    Choice(value=device(type='cpu'), reason='cpu: asked for by name')
    """
    found, index, why = _find(name)
    return found(index=index) if why is None else found(why=why)


def device_count(name: str = "auto") -> int:
    """Count the devices of `device=name` that can each serve a process; 0 for the shared CPU.

    None is opened: a launcher that counts must not hold one (a Gaudi HPU serves one process).

    Raises:
        AccelError: as `accelerator`, as far as it is known without opening a device.

    """
    return 1 if ":" in str(name) else _find(name)[0].count()


def _find(name: str) -> tuple[type[Accelerator], int | None, str | None]:
    """Find (class, index, reason) of a device; the reason is None for one asked for by name."""
    known, name = _known(), str(name)  # a torch.device is written as its name
    if name == "auto":
        best, why = _best(known)
        return best, None, why
    kind, index = _parse(name)
    if kind not in known:
        hint = f" For {kind} {_ALIASES[kind]}." if kind in _ALIASES else ""
        raise AccelError(f"device={name!r} is unknown; known are auto, {', '.join(sorted(known))}.{hint}")
    found = _load(known[kind])
    available = found.available()
    if kind == "cuda" and not available.value:
        # torch itself calls AMD's GPUs so.
        amd = _load(known["rocm"])
        if amd.available().value:
            return amd, index, None
    if not available.value:
        raise AccelError(f"device={name!r} is not there: {available.reason}.")
    return found, index, None


def _known() -> dict[str, EntryPoint]:
    known = dict(_BUILT_IN)
    for entry in entry_points(group=GROUP):
        if entry.name in known or entry.name == "auto":
            # A package that is merely installed must not replace what a run computes on.
            _warn(f"the entry point {entry.name} = {entry.value} is ignored: that name is taken")
        else:
            known[entry.name] = entry
    return known


def _parse(name: str) -> tuple[str, int | None]:
    kind, colon, index = name.partition(":")
    if not colon:
        return kind, None
    if not (index.isascii() and index.isdigit()):
        raise AccelError(f"device={name!r}: after the colon comes a device's number, as in {kind}:1.")
    return kind, int(index)


def _load(entry: EntryPoint) -> type[Accelerator]:
    module, _, attribute = entry.value.partition(":")
    try:
        found = getattr(import_module(module.strip()), attribute.strip())
    except (ImportError, AttributeError, OSError) as error:
        raise AccelError(f"device={entry.name!r}: {entry.value} could not be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Accelerator)):
        raise AccelError(f"device={entry.name!r}: {entry.value} is no subclass of forge_accel.Accelerator.")
    return found


def _best(known: dict[str, EntryPoint]) -> tuple[type[Accelerator], str]:
    candidates: list[type[Accelerator]] = []
    for entry in known.values():
        try:
            candidates.append(_load(entry))
        except AccelError as error:
            _warn(f"{error} Going on without it.")
    candidates.sort(key=lambda found: found.priority, reverse=True)
    missing: list[str] = []
    for found in candidates:
        available = found.available()
        if available.value:
            if found is candidates[-1] and not missing:
                missing.append(f"torch {torch.__version__} is built for no other device")
            return found, "; ".join([*missing, available.reason])
        if found.possible():
            missing.append(available.reason)
    raise AccelError(f"no accelerator is available: {'; '.join(missing)}.")  # pragma: no cover - the CPU always is


def _warn(message: str) -> None:
    warnings.warn(f"{GROUP}: {message}", RuntimeWarning, stacklevel=5)
