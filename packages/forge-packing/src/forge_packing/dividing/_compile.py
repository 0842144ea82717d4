"""The kernels to what runs: Python itself for small inputs, numba for large ones, with the same results.

The kernels are plain functions on integers. Python runs them as they stand, on lists. Once a process has asked for many
samples the very same code objects are compiled, on int64 arrays; numba is imported then and not before. What was compiled
is kept on disk where numba finds a place that may be written (NUMBA_CACHE_DIR, beside the source, the user's cache), else
in memory alone; and where numba itself is missing or broken, Python goes on.
"""

import hashlib
import logging
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from forge_packing._checks import Int64Array
from forge_packing.dividing.kernels import (
    _best_fit as _kernels_rows,
    _divide as _kernels_divide,
    _fill as _kernels_fill,
    _heap as _kernels_heap,
    _makespan as _kernels_makespan,
    _refine as _kernels_refine,
    _spread as _kernels_spread,
    _waiting as _kernels_wait,
)

_MODULES = (
    _kernels_heap,
    _kernels_wait,
    _kernels_spread,
    _kernels_rows,
    _kernels_fill,
    _kernels_makespan,
    _kernels_refine,
    _kernels_divide,
)
_NAMES = {name: value for module in _MODULES for name, value in vars(module).items()}
_KERNELS = {name: value for name, value in _NAMES.items() if isinstance(value, FunctionType)}
_CONSTANTS = {name: value for name, value in _NAMES.items() if isinstance(value, int)}
# What is called from outside, with its types: fixed, so that everything is compiled, or loaded, at one known moment.
_ARRAY = "int64[::1]"
_ENTRIES = {
    "divide_all": f"none({_ARRAY}, {_ARRAY}, {_ARRAY}, int64, int64, {_ARRAY}, {_ARRAY})",
    "pack": f"int64({_ARRAY}, int64, int64, {_ARRAY})",
}

COMPILE_FROM = 32_768
"""Samples in one process from which compiled code is asked for.

Python takes about a second for so many. Loading compiled code takes half of that, and compiling, once for an installation,
ten times as much; so a process that plans a few steps never waits, and one that plans millions hardly notices.
"""

_log = logging.getLogger(__name__)
_seen = dict.fromkeys(_ENTRIES, 0)


def run(name: str, arrays: tuple[Int64Array, ...], numbers: tuple[int, ...], *results: Int64Array) -> Any:
    """Call a kernel with (*arrays, *numbers, *results), which fills the results; returns what it returns."""
    _seen[name] += arrays[0].size
    kernel = compiled(name) if _seen[name] >= COMPILE_FROM else None
    if kernel is not None:
        return kernel(*(np.require(array, np.int64, ("C", "W")) for array in arrays), *numbers, *results)
    lists: list[list[int]] = [result.tolist() for result in results]
    answer = _KERNELS[name](*(array.tolist() for array in arrays), *numbers, *lists)
    for result, filled in zip(results, lists, strict=True):
        result[:] = filled
    return answer


@cache
def compiled(name: str) -> Any:
    """The compiled kernel of this name, or None where numba cannot be imported (say, beside a numpy that it does not know)."""
    try:
        import numba
    except ImportError as error:
        _log.warning("forge_packing goes on uncompiled, about twenty times slower: numba cannot be imported (%s)", error)
        return None
    if getattr(numba.config, "DISABLE_JIT", 0):  # then it would run the same Python, on arrays, which is slower than on lists
        return None
    # Files that another process or a full disk has torn can fail in any way when they are read; under a second name they
    # are written anew, and without a cache nothing is read or written at all.
    for kept_under in (_digest(), f"{_digest()}_anew"):
        try:
            return _build(numba, name, kept_under)
        except Exception as error:  # noqa: BLE001 - see above; what is wrong with a kernel comes up again below
            _log.info("compiled kernels cannot be kept on disk under %s: %r", kept_under, error)
    return _build(numba, name, None)


def _build(numba: Any, name: str, kept_under: str | None) -> Any:
    """Copies of all kernels in a namespace of their own, where they call each other compiled; returns the wanted one.

    Only the entry is kept on disk, with all that it calls in it. numba looks for changes in the entry's file alone, so
    the name that it is kept under has the digest of all kernels in it.
    """
    namespace: dict[str, Any] = dict(_CONSTANTS)
    copies = {kernel: FunctionType(function.__code__, namespace, kernel) for kernel, function in _KERNELS.items()}
    for kernel, copy in copies.items():
        copy.__module__ = _KERNELS[kernel].__module__
        namespace[kernel] = numba.njit(_int64_zeros if kernel == "zeros" else copy)
    copies[name].__qualname__ = f"{name}_{kept_under}"
    return numba.njit(_ENTRIES[name], cache=kept_under is not None, nogil=True)(copies[name])


def _int64_zeros(size: int) -> Any:
    """`zeros` for compiled kernels."""
    return np.zeros(size, dtype=np.int64)


@cache
def _digest() -> str:
    """What all kernels together compute, as 12 characters: instructions, names and constants."""
    digest = hashlib.sha256(repr(sorted(_CONSTANTS.items())).encode())
    for name, function in sorted(_KERNELS.items()):
        code = function.__code__
        digest.update(repr((name, code.co_code, code.co_names, code.co_varnames, code.co_consts)).encode())
    return digest.hexdigest()[:12]
