"""Temporary directories of a store and of workers, named after their process; their removal.

An error or Ctrl-C leaves nothing. A process that is killed outright cannot clean up, so the next one that prepares the same
store, or starts workers, does: it removes what ended processes of this machine made. A file system may be shared, so the name
contains the machine too.
"""

import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_NAME = re.compile(r"\.(?P<where>[0-9a-f]{8})\.(?P<process>\d+)-[0-9a-f]{8}\.partial")
_WORKER_NAME = re.compile(r"forge-data-(?P<where>[0-9a-f]{8})\.(?P<process>\d+)-\w+")


def partial_of(directory: Path) -> Path:
    """Make a new name beside the store's, for this process."""
    return directory.with_name(f".{directory.name}.{_machine()}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def remove_leftovers(directory: Path) -> None:
    """Remove what ended processes of this machine left of this store.

    What may be another machine's stays, and so does what cannot be removed.
    """
    mark = f".{directory.name}"
    _remove(directory.parent, lambda name: _NAME.fullmatch(name.removeprefix(mark)) if name.startswith(mark) else None)


@contextmanager
def worker_directory() -> Iterator[str]:
    """Make a temporary directory for workers; remove those of ended processes."""
    _remove(Path(tempfile.gettempdir()), _WORKER_NAME.fullmatch)
    name = f"forge-data-{_machine()}.{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
        yield folder


def _remove(folder: Path, named: Callable[[str], "re.Match[str] | None"]) -> None:
    if os.name != "posix":  # elsewhere, testing whether a process runs may end it
        return
    with suppress(OSError):
        for path in folder.iterdir():
            found = named(path.name)
            if (
                found
                and found["where"] == _machine()
                and path.is_dir()
                and not path.is_symlink()
                and _has_ended(int(found["process"]))
            ):
                shutil.rmtree(path, ignore_errors=True)


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)  # tests, and sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@cache
def _machine() -> str:
    """Identify the machine and the container in which process numbers are unique."""
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]
