"""Temporary folders with their process's number: the next one removes a killed one's."""

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_NAME = re.compile(r"forge-(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-\w+")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder of this process in the machine's temporary folder, removed at the end.

    Those that killed processes of this user left there are removed first.
    """
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=f"forge-{_machine()}-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _remove_left() -> None:
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            found = _NAME.fullmatch(path.name)
            if found and found["machine"] == _machine() and _is_own(path) and _has_ended(int(found["process"])):
                shutil.rmtree(path, ignore_errors=True)


def _is_own(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
    except OSError:
        return False


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
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]
