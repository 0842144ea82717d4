"""URL of a store → directory of this machine with the same store, fetched once and verified.

Whole files are fetched, and no ranges of them: a store is read sample by sample in another order every epoch, which would be a
request each, and what is on disk is memory-mapped by all processes of the machine.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from forge_data._disk import unwritten
from forge_data._errors import DataError, StoreError
from forge_data._paths import expand_user
from forge_data.reading._file import filesystem
from forge_data.store._manifest import MANIFEST, parse_manifest
from forge_data.store._partial import partial_of, remove_leftovers

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_BLOCK = 1 << 20


def local_directory(place: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of a store; that of a URL is fetched into the cache once.

    Raises:
        StoreError: there is no store at the URL, it cannot be fetched, or what was fetched is not what was written.
    """
    url = os.fspath(place)
    if "://" not in url:
        return expand_user(place, StoreError)
    try:
        system, root = filesystem(url.rstrip("/"))
        with system.open(f"{root}/{MANIFEST}", "rb") as file:
            text: Any = file.read()
    except FileNotFoundError as error:
        raise StoreError(f"{url} is not a token store: it holds no {MANIFEST}; prepare makes one") from error
    except (DataError, OSError) as error:
        raise StoreError(f"{url} cannot be read: {error}") from error
    # Named by its content: one that was prepared anew at the same URL is another.
    directory = _cache(cache_dir) / hashlib.sha256(text).hexdigest()[:32]
    with _locked(directory.with_suffix(".lock")):
        if not directory.exists():
            remove_leftovers(directory)
            _fetch(system, root, url, text, directory)
    return directory


def _fetch(system: "AbstractFileSystem", root: str, url: str, text: bytes, directory: Path) -> None:
    """Copy every file that a `store.json` names; the directory is there when it is complete."""
    manifest = parse_manifest(text.decode("utf-8", "replace"), f"{url}/{MANIFEST}")
    partial = partial_of(directory)
    try:
        partial.mkdir()
        for name, expected in manifest.sha256.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            with system.open(f"{root}/{name}", "rb") as source, (partial / name).open("wb") as target:
                while block := cast("BinaryIO", source).read(_BLOCK):
                    digest.update(block)
                    target.write(block)
            if digest.hexdigest() != expected:
                raise StoreError(
                    f"{url}/{name} does not hold what was written to it: its SHA-256 is {digest.hexdigest()}, and {expected} "
                    "was written; copy the store there again"
                )
        (partial / MANIFEST).write_bytes(text)
        partial.rename(directory)
    except OSError as error:
        raise StoreError(f"{url} could not be fetched to {directory.parent}: {unwritten(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cache(given: str | os.PathLike[str] | None) -> Path:
    """Make the folder of fetched stores; the default one, in a public place, is this user's."""
    own = getattr(os, "getuid", lambda: 0)()
    folder = expand_user(given, StoreError) if given is not None else Path(tempfile.gettempdir()) / f"forge-data-stores-{own}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o777 if given is not None else 0o700)
        if given is None and os.name == "posix" and folder.stat().st_uid != own:
            raise StoreError(f"{folder} belongs to another user; give another folder for fetched stores as cache_dir")
    except OSError as error:
        raise StoreError(f"no store can be fetched to {folder}: {error.strerror or error}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process of the machine at a time fetch a store; the others find it."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
