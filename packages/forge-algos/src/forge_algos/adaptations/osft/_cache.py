"""Files of singular vectors, named by their matrix; written whole, checked when read.

Files are safetensors: tensors U, S and Vh; measurements stand in the metadata, with a checksum over all of it.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from forge_algos._errors import AdapterError

_VERSION = "osft bases 1"
"""Version of the numbers: another method for the same matrix is another version."""


def key_of(weight: torch.Tensor, svd: str, protected: int) -> str:
    """Compute the name of a matrix's file.

    It is the sha256 of the matrix's bytes, its shape and type, the method, and the number of directions where the method
    depends on it.
    """
    wanted = protected if svd == "randomized" else "all"
    found = hashlib.sha256(f"{_VERSION}, {weight.dtype}, {list(weight.shape)}, {svd}, {wanted}\n".encode())
    found.update(_bytes_of(weight))
    return found.hexdigest()


def fingerprint_of(*tensors: torch.Tensor) -> str:
    """Compute the sha256 over shapes and bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}, {list(tensor.shape)}\n".encode())
        found.update(_bytes_of(tensor))
    return found.hexdigest()


def write(path: Path, tensors: dict[str, torch.Tensor], words: dict[str, str]) -> None:
    """Write a file under a temporary name, make it durable, then rename it.

    `words` go into the metadata, the tensors' `fingerprint` among them.
    """
    content = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    words = {**words, "key": path.stem}
    metadata = {**words, "checksum": _checksum(words)}
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem[:8]}.", dir=path.parent)
        os.close(handle)
        save_file(content, temporary, metadata=metadata)
        # mkstemp makes files that only their owner may read, and a cache may be shared: the umask's mode.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        _make_durable(temporary)
        Path(temporary).replace(path)
        _make_durable(path.parent)
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            f"singular vectors cannot be kept in {path.parent}: {error}; make room there, or set osft_cache to another "
            "directory"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]] | str:
    """Return (tensors on the CPU, words) of a file, or why there are none: "" without a file."""
    if not path.exists():
        return ""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            words: dict[str, str] = dict(file.metadata() or {})
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in ("U", "S", "Vh")}
    except (OSError, SafetensorError) as error:
        return f"{path.name} in the cache is not whole ({error})"
    checksum = words.pop("checksum", "")
    if words.get("key") != path.stem:
        return f"{path.name} in the cache belongs to another matrix"
    if checksum != _checksum(words) or words.get("fingerprint") != fingerprint_of(*tensors.values()):
        return f"{path.name} in the cache was altered"
    return tensors, words


def _checksum(words: dict[str, str]) -> str:
    return hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()


def _make_durable(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return a view of the tensor's bytes if it is contiguous on the CPU, else of a copy's."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
