"""Identity of a model directory: a digest of its configuration and its weights."""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

_HASHED_WHOLE = 8 * 2**30
"""Size in bytes up to which a weight file is hashed completely: some seconds."""

_WINDOW = 4096
"""Bytes hashed at each place of a tensor in larger files."""

_THREADS = 4
"""Files hashed at a time; hashing releases the GIL, and with more of them the disk is the limit."""

_Seen = tuple[Path, int, int, int, int]
"""A file with its size, the times of its last modification and change, and its inode; nobody sets that of the change."""


def model_identity(model_path: str) -> str:
    """Return the sha256 (hex) of a model (or adapter) directory's configuration and weights.

    A hub name gives "hub:org/name". Of a weight file above 8 GiB the header is read, and both ends and the middle of each
    tensor: any training changes those. Files that did not change since this process last read them are not read again.

    Raises:
        OSError: a file cannot be read.
    """
    found = _files(model_path)
    return f"hub:{model_path}" if found is None else _digest(*found)


class ModelIdentities:
    """Identities of several models (`model_identity`), computed by threads from now on.

    What was begun is read to its end, unless the process ends before: a later `model_identity` knows it.

    Args:
        paths: name → model directory or hub name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = dict(paths)
        self._found: dict[str, str] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read, name="model identities", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> dict[str, str] | None:
        """Return name → identity; None where they are not known after so many seconds.

        Raises:
            OSError: a file cannot be read.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return dict(self._found)

    def _read(self) -> None:
        try:
            self._found = {name: model_identity(path) for name, path in self._paths.items()}
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error


def _files(model_path: str) -> tuple[int, tuple[_Seen, ...]] | None:
    """Return the number of a directory's configurations, and its files, these first.

    None for a hub name.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        return None
    configs = [file for name in ("config.json", "adapter_config.json") if (file := folder / name).is_file()]
    files = [*configs, *sorted(folder.glob("*.safetensors"))]
    return len(configs), tuple(
        (file, (seen := file.stat()).st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino) for file in files
    )


@lru_cache(maxsize=16)
def _digest(configs: int, files: tuple[_Seen, ...]) -> str:
    digest = hashlib.sha256(b"".join(file.read_bytes() for file, *_ in files[:configs]))
    for (file, size, *_), content in zip(files[configs:], _contents(files[configs:]), strict=True):
        digest.update(f"{file.name} {size}".encode())
        digest.update(content)
    return digest.hexdigest()


def _contents(files: Sequence[_Seen]) -> list[bytes]:
    """Return what each weight file adds to the digest, in the order of the files."""
    found: dict[int, bytes] = {}
    errors: list[Exception] = []
    left = iter(range(len(files)))

    def work() -> None:
        for position in left:
            try:
                found[position] = _content(files[position])
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                return

    # No executor: at the end of the process Python would wait for all that is left to be read.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_THREADS, len(files)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[position] for position in range(len(files))]


def _content(file: _Seen) -> bytes:
    path, size, *_ = file
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest() if size <= _HASHED_WHOLE else _by_tensor(opened)


def _by_tensor(opened: BinaryIO) -> bytes:
    header = opened.read(int.from_bytes(opened.read(8), "little"))
    begins, parts = opened.tell(), [header]
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            for place in (start, (start + end) // 2, max(start, end - _WINDOW)):
                opened.seek(begins + place)
                parts.append(opened.read(min(_WINDOW, end - place)))
    return b"".join(parts)
