"""Finished directory or file → its final name, perhaps another's, complete at every moment."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from forge_data._disk import unwritten
from forge_data._errors import StoreError
from forge_data._paths import expand_user
from forge_data.store._files import stable
from forge_data.store._manifest import READABLE, own_files, read_manifest

# Attempts; each fails if another process takes the name between two calls.
_TRIES = 1000


def require_room(directory: Path) -> None:
    """Make sure that a store may be written: nothing is there, an empty directory, or a store.

    Raises:
        StoreError: something else is there, a store that is torn, or one with other files beside it; or there is no such place.
    """
    if directory.name in ("", ".."):
        raise StoreError(f"{directory} names no directory that can be made; give a new directory for the token store")
    try:
        str(directory).encode()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            directory.lstat()
        stable(directory, lambda: _require_room(directory))
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        # A name too long, with a null byte or not UTF-8; a directory without permission.
        raise StoreError(f"{str(directory)!r} can hold no token store: {error}; give another directory") from error


def _require_room(directory: Path) -> None:
    if not directory.is_dir():
        if os.path.lexists(directory):
            raise StoreError(f"{directory} exists already and is no directory; give a new directory for the token store")
        return
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if not there:
        return
    own = own_files(directory)
    if own is None:
        raise StoreError(
            f"{directory} exists already and is not a token store; give a new directory for the token store, or remove this one"
        )
    version, known = own
    if version in READABLE:
        read_manifest(directory)
    if others := sorted(there - known):
        raise StoreError(
            f"{directory} holds {others[0]!r} beside the token store, which would be lost; "
            "move it away, or give another directory for the token store"
        )


def put_in_place(new: Path, directory: Path) -> None:
    """Rename `new` to `directory`; a token store that has the name makes room.

    It is moved old first and removed last, so that its name leads to a complete store except between two renames, over which
    readers wait.
    """
    old: list[Path] = []
    try:
        for tries_left in reversed(range(_TRIES)):
            try:
                new.rename(directory)  # replaces an empty directory too; a full one makes it fail
                break
            except OSError:
                # No store there now: another process is between its two renames. What is there at a second look too is in the
                # way.
                in_the_way = own_files(directory) is None and os.path.lexists(directory) and own_files(directory) is None
                if in_the_way or not tries_left:
                    raise
            old.append(new.with_name(f"{new.name}.replaced-{len(old)}"))
            # Where another process moved it old first, the name is free: try again.
            with contextlib.suppress(FileNotFoundError):
                directory.rename(old[-1])
    except OSError:
        if old and not directory.exists():
            with contextlib.suppress(OSError):
                old.pop().rename(directory)
        raise
    finally:
        for each in old:
            shutil.rmtree(each, ignore_errors=True)


@contextlib.contextmanager
def new_file(file: str | os.PathLike[str], store: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes `file` once it is complete; not within a store.

    Raises:
        StoreError: the file cannot be written.
    """
    path = expand_user(file, StoreError)
    if not path.name or store.resolve() in path.resolve().parents:
        raise StoreError(f"{str(path)!r} cannot be written: it must be a file, and outside of the store {store}")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"{path} could not be written: {unwritten(error)}") from error
    finally:
        partial.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to disk; else a power cut could undo a rename."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a directory
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
