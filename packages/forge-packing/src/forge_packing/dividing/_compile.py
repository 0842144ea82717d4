"""Execution of the kernels: by Python for small inputs, by numba for large ones.

The kernels are plain functions on integers. Python runs them as they stand, on lists. Once a process has asked for many
samples the same code objects are compiled, on int64 arrays; numba is imported then and not before. Compiled code is cached
on disk where numba finds a directory that may be written (NUMBA_CACHE_DIR, beside the source, the user's cache), else in
memory alone; and where numba itself is missing or broken, Python goes on.
"""

import hashlib
import logging
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from forge_packing._checks import Int64Array
from forge_packing.dividing.kernels import _best_fit, _divide, _fill, _heap, _makespan, _refine, _spread, _waiting

_MODULES = (_heap, _waiting, _spread, _best_fit, _fill, _makespan, _refine, _divide)
_NAMES = {name: value for module in _MODULES for name, value in vars(module).items()}
_KERNELS = {name: value for name, value in _NAMES.items() if isinstance(value, FunctionType)}
_CONSTANTS = {name: value for name, value in _NAMES.items() if isinstance(value, int)}
# The kernels called from outside, with fixed types, so that everything is compiled, or loaded, at one known moment.
_ARRAY = "int64[::1]"
_ENTRIES = {
    "divide_all": f"none({_ARRAY}, {_ARRAY}, {_ARRAY}, {_ARRAY}, int64, {_ARRAY}, {_ARRAY}, {_ARRAY})",
    "pack": f"int64({_ARRAY}, int64, int64, {_ARRAY})",
}

COMPILE_FROM = 32_768
"""Samples of one process from which on compiled code is used.

Python takes about a second for so many. Loading compiled code takes half of that, and compiling, once for an installation,
ten times as much; so a process that plans a few steps never waits, and one that plans millions hardly notices.
"""

_log = logging.getLogger(__name__)
_seen = dict.fromkeys(_ENTRIES, 0)
"""Samples that each entry was called with in this process."""


def run(name: str, arrays: tuple[Int64Array, ...], numbers: tuple[int, ...], *results: Int64Array) -> Any:
    """Call a kernel with (*arrays, *numbers, *results), filling the results; return its value."""
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
    """Return a compiled kernel, or None where numba cannot be imported or is switched off.

    An import fails beside a numpy that numba does not know, for example.
    """
    try:
        import numba
    except ImportError as error:
        _log.warning("forge_packing goes on uncompiled, about twenty times slower: numba cannot be imported (%s)", error)
        return None
    if getattr(numba.config, "DISABLE_JIT", 0):  # it would run the same Python, on arrays, which is slower than on lists
        return None
    # Cache files torn by another process or a full disk can fail in any way when they are read; under a second name they
    # are written anew, and without a cache nothing is read or written at all.
    for cache_name in (_digest(), f"{_digest()}_anew"):
        try:
            return _build(numba, name, cache_name)
        except Exception as error:  # noqa: BLE001 - see above; an error in a kernel itself is raised again below
            _log.info("compiled kernels cannot be cached on disk under %s: %r", cache_name, error)
    return _build(numba, name, None)


def _build(numba: Any, name: str, cache_name: str | None) -> Any:
    """Compile copies of all kernels in one namespace, and return the one called `name`.

    Only the entry is cached on disk, with all that it calls in it. numba looks for changes in the entry's file alone, so
    the name in the cache contains the digest of all kernels.
    """
    namespace: dict[str, Any] = dict(_CONSTANTS)
    copies = {kernel: FunctionType(function.__code__, namespace, kernel) for kernel, function in _KERNELS.items()}
    for kernel, copy in copies.items():
        copy.__module__ = _KERNELS[kernel].__module__
        namespace[kernel] = numba.njit(_int64_zeros if kernel == "zeros" else copy)
    copies[name].__qualname__ = f"{name}_{cache_name}"
    return numba.njit(_ENTRIES[name], cache=cache_name is not None, nogil=True)(copies[name])


def _int64_zeros(size: int) -> Any:
    """Replace `zeros` in compiled kernels."""
    return np.zeros(size, dtype=np.int64)


@cache
def _digest() -> str:
    """Return a digest of all kernels, 12 characters: instructions, names and constants."""
    digest = hashlib.sha256(repr(sorted(_CONSTANTS.items())).encode())
    for name, function in sorted(_KERNELS.items()):
        code = function.__code__
        digest.update(repr((name, code.co_code, code.co_names, code.co_varnames, code.co_consts)).encode())
    return digest.hexdigest()[:12]
