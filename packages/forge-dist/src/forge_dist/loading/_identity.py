"""Identity of a model directory: a digest of its configuration and its weights."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

_HASHED_WHOLE = 8 * 2**30
"""Size in bytes up to which a weight file is hashed completely: some seconds."""

_WINDOW = 4096
"""Bytes hashed at each place of a tensor in larger files."""


def model_identity(model_path: str) -> str:
    """Return the sha256 (hex) of a model (or adapter) directory's configuration and weights.

    A hub name gives "hub:org/name". Of a weight file above 8 GiB the header is read, and both ends and the middle of each
    tensor: any training changes those. Files that did not change since this process last read them are not read again.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return f"hub:{model_path}"
    configs = [file for name in ("config.json", "adapter_config.json") if (file := folder / name).is_file()]
    files = [*configs, *sorted(folder.glob("*.safetensors"))]
    return _digest(len(configs), tuple((file, (seen := file.stat()).st_size, seen.st_mtime_ns, seen.st_ino) for file in files))


@lru_cache(maxsize=16)
def _digest(configs: int, files: tuple[tuple[Path, int, int, int], ...]) -> str:
    digest = hashlib.sha256(b"".join(file.read_bytes() for file, *_ in files[:configs]))
    for file, size, *_ in files[configs:]:
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            if size <= _HASHED_WHOLE:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            else:
                _update_by_tensor(digest, opened)
    return digest.hexdigest()


def _update_by_tensor(digest: Any, opened: BinaryIO) -> None:
    header = opened.read(int.from_bytes(opened.read(8), "little"))
    digest.update(header)
    begins = opened.tell()
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            for place in (start, (start + end) // 2, max(start, end - _WINDOW)):
                opened.seek(begins + place)
                digest.update(opened.read(min(_WINDOW, end - place)))
