"""Write files and directories atomically: complete under their name, or not there.

Written under a hidden name beside the final one, made durable (fsync), then renamed. A process killed in between leaves a
`.NAME.*.tmp` that nothing reads and that can be deleted; it never leaves half of NAME.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_dist._errors import ExportError

_NO_ROOM = re.compile(rf"\[Errno {errno.ENOSPC}\]|\(os error {errno.ENOSPC}\)")
"""How Python, and Rust under safetensors and tokenizers, write that a disk is full."""

_guards: list[tuple[Path, Callable[[], None]]] = []


@contextmanager
def guarded(root: str | os.PathLike[str], check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before anything under `root` gets its final name or is removed.

    Within the block. For a process that may lose its directory to another one: an exception of `check` keeps the file system
    as it is.

    >>> with guarded("runs/first", lambda: print("still ours")):
    ...     check_guards("runs/first/full_state/step_3")
    ...     check_guards("runs/second")
    still ours
    """
    guard = (Path(os.path.abspath(root)), check)
    _guards.append(guard)
    try:
        yield
    finally:
        _guards.remove(guard)


def check_guards(path: str | os.PathLike[str]) -> None:
    """Call the checks of `guarded` that concern `path`; their exceptions pass."""
    target = Path(os.path.abspath(path))
    for root, check in _guards:
        if target.is_relative_to(root):
            check()


def _hidden_sibling(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sync(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_existing(target: Path) -> None:
    # os.rename silently replaces an empty directory, hence this check, made again right before the rename.
    if os.path.lexists(target):
        raise ExportError(f"{target} exists already, and nothing is written over it: remove it or choose another name")


def _refuse_written(target: Path) -> None:
    """Raise ExportError where a living process holds a temporary directory of `target`."""
    temporary = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for other in target.parent.iterdir():
            if temporary.fullmatch(other.name) and _is_held(other):
                raise ExportError(
                    f"{target} is being written by another process now, in {other.name}: wait for it, or choose another name"
                )


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the kernel's lock of a directory, which a process lets go however it ends."""
    import fcntl  # not on Windows

    descriptor = -1
    with suppress(OSError):  # without a lock, who comes second is refused at the rename
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_held(folder: Path) -> bool:
    import fcntl

    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def file_hash(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Return size in bytes and SHA-256 (hex) of a file. Raises OSError where it cannot be read."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return os.fstat(stream.fileno()).st_size, digest


def unreadable(path: str | os.PathLike[str]) -> str | None:
    """Return why this user may not read a file or directory; None where it may.

    The text names the first part of the path that is closed, whose that is, its mode, and the user of this process. What is
    not there is not closed.
    """
    place = Path(os.path.abspath(path))
    for part in (*reversed(place.parents), place):
        try:
            found = os.stat(part)
        except PermissionError:
            return _closed(part.parent)
        except OSError:
            return None
    try:
        if stat.S_ISDIR(found.st_mode):
            os.scandir(place).close()
        elif stat.S_ISREG(found.st_mode):  # to open a pipe may never end
            place.open("rb").close()
    except PermissionError:
        return _closed(place)
    except OSError:
        return None
    return None


def _closed(place: Path) -> str:
    found = os.stat(place)
    # Windows, which has no such users, gives every file to number 0.
    user = _user_name(os.geteuid()) if hasattr(os, "geteuid") else "this user"
    whose = f"{_user_name(found.st_uid)}, with mode {stat.S_IMODE(found.st_mode):04o}"
    return f"{place} belongs to {whose}, and {user} may not read it"


def _user_name(number: int) -> str:
    try:
        import pwd

        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except (ImportError, KeyError):
        return f"uid {number}"


def size_damage(path: str | os.PathLike[str], size: int) -> str | None:
    """Return what is wrong with a file of which the size was recorded; it is not read.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    found, name = os.stat(path), os.path.basename(path)
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "no file"
        return f"{name} is {what}, and a file of {size} bytes was written there; move it away first"
    return None if found.st_size == size else f"{name} has {found.st_size} bytes and should have {size}"


def file_damage(path: str | os.PathLike[str], size: int, sha256: str) -> str | None:
    """Return what is wrong with a file of which size and SHA-256 were recorded, or None."""
    name = os.path.basename(path)
    try:
        if (wrong := size_damage(path, size)) is not None:
            return wrong
        if file_hash(path)[1] != sha256:
            return f"{name} does not have the bytes that were written (another SHA-256)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory, renamed to `path` after the body, or deleted if it raises.

    Parent directories are created, and removed again with it. Every file is fsynced before the rename and the parent after it.

    Raises:
        ExportError: `path` exists (even if empty), another process of this host is writing it, or it cannot be written; the
            body's own exceptions pass unchanged.
    """
    target = Path(os.path.abspath(path))
    _refuse_existing(target)
    _refuse_written(target)
    temporary = _hidden_sibling(target)
    made = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error
    try:
        with _held(temporary):
            yield temporary
            try:
                for folder, _, files in os.walk(temporary):
                    for name in files:
                        _sync(Path(folder, name))
                    _sync(Path(folder))
                _refuse_existing(target)
                check_guards(target)
                temporary.rename(target)
                _sync(target.parent)
            except OSError as error:
                raise ExportError(f"{target} cannot be written: {error}") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # somebody else's files are in one
            for folder in made:
                folder.rmdir()
        raise


def room_lacking(path: Path, takes: int, why: str) -> str:
    """Return what something takes and what is free, where `why` is of a full disk; else "".

    Args:
        path: of what was not written, of which nothing is left there.
        takes: its bytes.
        why: text of the error.
    """
    if not _NO_ROOM.search(why):
        return ""
    place = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    if place is None:
        return ""
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f"; it takes {_size(takes)}, and {_size(free)} are free there"


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`: a reader sees the old content or the new, never a part.

    UTF-8, newlines as given.

    Raises:
        ExportError: `path` cannot be written; its former content is still there.
    """
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write bytes to `path` as `write_text_atomically` writes text.

    Raises:
        ExportError: `path` cannot be written; its former content is still there.
    """
    target = Path(os.path.abspath(path))
    temporary = _hidden_sibling(target)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check_guards(target)
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise ExportError(f"{target} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
