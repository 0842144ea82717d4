"""Where a store is written until it is whole, and where workers meet, by names that say whose they are; and what was left there.

Nothing is left by an error or Ctrl-C. A process that is killed outright cannot clean up, so the next one that prepares the same
store, or starts workers, does: whatever a process of this machine made that is gone. A file system may be shared, so the name says
the machine too.
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
_MEETING = re.compile(r"forge-data-(?P<where>[0-9a-f]{8})\.(?P<process>\d+)-\w+")


def partial_of(directory: Path) -> Path:
    """A new name beside the store's, of this process."""
    return directory.with_name(f".{directory.name}.{_here()}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def remove_leftovers(directory: Path) -> None:
    """Take away what processes of this machine that are gone left of this store; what may be another's stays, as does what resists."""
    mark = f".{directory.name}"
    _remove(directory.parent, lambda name: _NAME.fullmatch(name.removeprefix(mark)) if name.startswith(mark) else None)


@contextmanager
def meeting_place() -> Iterator[str]:
    """A temporary folder in which this process and its workers meet; those of processes that are gone are taken away."""
    _remove(Path(tempfile.gettempdir()), _MEETING.fullmatch)
    name = f"forge-data-{_here()}.{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
        yield folder


def _remove(folder: Path, named: Callable[[str], "re.Match[str] | None"]) -> None:
    if os.name != "posix":  # elsewhere asking whether a process is there may end it
        return
    with suppress(OSError):
        for path in folder.iterdir():
            found = named(path.name)
            if found and found["where"] == _here() and path.is_dir() and not path.is_symlink() and _gone(int(found["process"])):
                shutil.rmtree(path, ignore_errors=True)


def _gone(process: int) -> bool:
    try:
        os.kill(process, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@cache
def _here() -> str:
    """The machine, and the container, in which process numbers are told apart."""
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]
