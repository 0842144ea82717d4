"""Parameters and int64 arrays in one .npz file: no pickle, atomic writes, damage refused."""

import json
import os
import secrets
import tokenize
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError

_FORMAT = "forge-packing plan"
_VERSION = 2
# Exceptions of numpy and the standard library for bytes that are no archive of arrays, such as a header that is no Python
# literal, or a size that no memory holds.
_DAMAGE = (
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def write(file: str | os.PathLike[str], parameters: dict[str, Any], arrays: dict[str, Int64Array]) -> None:
    """Write under a temporary name beside `file`, then rename; PackingError where that fails."""
    path = Path(file)
    header = json.dumps({"format": _FORMAT, "version": _VERSION, "parameters": parameters}, sort_keys=True)
    members: dict[str, Any] = {"header": np.frombuffer(header.encode(), dtype=np.uint8), **arrays}
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            # A stream, not a name: numpy would add .npz to a name that lacks it.
            np.savez(stream, **members)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null in it
        raise PackingError(
            f"the plan cannot be written to {path}: {error}. The directory must exist and be writable"
        ) from error
    finally:
        with suppress(OSError, ValueError):  # it was renamed, or never created
            temporary.unlink()


def read(file: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Int64Array]]:
    """Read (parameters, arrays); PackingError for a missing, torn or foreign file."""
    path = Path(file)
    try:
        # An open stream: np.load(path) leaves the file open where it is no zip.
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise zipfile.BadZipFile(f"it is a single array, {loaded.dtype}{list(loaded.shape)}")
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise PackingError(f"the plan {path} cannot be read: {error}") from error
    except _DAMAGE as error:
        if "allow_pickle" in str(error):  # numpy's advice is to load it unsafely
            raise PackingError(f"{path} is not a plan. Give a file that BatchPlan.save wrote") from None
        raise PackingError(f"{path} is not a plan, or only a part of one: {error}. Plan again") from error
    parameters = _parameters(path, arrays.pop("header", None))
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns a member that is no array as bytes
            raise PackingError(f"{path} is not a plan: {name!r} is no array. Give a file that BatchPlan.save wrote")
        if array.dtype != np.int64 or array.ndim != 1:
            raise PackingError(f"{path} is not a plan: {name!r} is {array.dtype}{list(array.shape)}, not int64[n]")
    return parameters, arrays


def _parameters(path: Path, header: object) -> dict[str, Any]:
    if not isinstance(header, np.ndarray) or header.dtype != np.uint8:
        raise PackingError(f"{path} is not a plan: it has no header. Give a file that BatchPlan.save wrote")
    try:
        content = json.loads(header.tobytes())
    except (ValueError, RecursionError) as error:
        raise PackingError(f"{path} is not a plan: its header is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("parameters"), dict):
        raise PackingError(f"{path} is not a plan. Give a file that BatchPlan.save wrote")
    if content.get("version") != _VERSION:
        raise PackingError(f"{path} is a plan of format {content.get('version')!r}; this version reads {_VERSION}. Plan again")
    return content["parameters"]
