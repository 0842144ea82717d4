"""A finished directory to its name: a new one, or in the place of the token store that was there, whole at every moment."""

import contextlib
import os
import shutil
from pathlib import Path

from forge_data._errors import StoreError
from forge_data.store._files import undisturbed
from forge_data.store._manifest import READABLE, own_files, read_manifest

# Each is lost to another process that took the name between two calls.
_TRIES = 1000


def require_room(directory: Path) -> None:
    """Make sure that a store may be written at a place: nothing is there, an empty directory, or a store of ours.

    Raises:
        StoreError: something else is there, a store that is torn, or one with files that are not its own; or there is no such place.
    """
    if directory.name in ("", ".."):
        raise StoreError(f"{directory} names no directory that can be made; give a new directory for the token store")
    try:
        str(directory).encode()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            directory.lstat()
        undisturbed(directory, lambda: _require_room(directory))
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        # Too long a name, a null byte, one that is no UTF-8, a folder that may not be looked into.
        raise StoreError(f"{str(directory)!r} can hold no token store: {error}; give another directory") from error


def _require_room(directory: Path) -> None:
    if not directory.is_dir():
        if os.path.lexists(directory):
            raise StoreError(f"{directory} exists already and is no directory; give a new directory for the token store")
        return
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if not there:
        return
    ours = own_files(directory)
    if ours is None:
        raise StoreError(
            f"{directory} exists already and is not a token store; give a new directory for the token store, or remove this one"
        )
    version, known = ours
    if version in READABLE:
        read_manifest(directory)
    if strangers := sorted(there - known):
        raise StoreError(
            f"{directory} holds {strangers[0]!r} beside the token store, which would be lost; "
            "move it away, or give another directory for the token store"
        )


def put_in_place(new: Path, directory: Path) -> None:
    """Give `new` the name `directory`. A token store that has the name already makes room.

    It is moved aside first and removed last, so that its name leads to a whole store but for the moment between two renames,
    over which readers wait.
    """
    aside: list[Path] = []
    try:
        for tries_left in reversed(range(_TRIES)):
            try:
                new.rename(directory)  # onto an empty directory too; onto a full one it fails, and so it should
                break
            except OSError:
                # Nothing there now is another process between its two renames; what stands there at a second look too is in the way.
                in_the_way = own_files(directory) is None and os.path.lexists(directory) and own_files(directory) is None
                if in_the_way or not tries_left:
                    raise
            aside.append(new.with_name(f"{new.name}.replaced-{len(aside)}"))
            # Where another process moved it aside first, the name is free: try again.
            with contextlib.suppress(FileNotFoundError):
                directory.rename(aside[-1])
    except OSError:
        if aside and not directory.exists():
            with contextlib.suppress(OSError):
                aside.pop().rename(directory)
        raise
    finally:
        for each in aside:
            shutil.rmtree(each, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Have the disk take the names in a directory; a rename that is not on disk is undone by a power cut."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a directory
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
