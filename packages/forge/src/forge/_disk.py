"""Error of the operating system on writing → what to do about it, in words."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forge._error_chain import error_chain

_REMEDIES = {
    errno.ENOSPC: "its disk is full: make room",
    errno.EDQUOT: "the quota there is used up: remove files of this user, or have it raised",
    errno.EROFS: "its file system is read-only, as one whose disk fails may have become: make it writable again",
    errno.EFBIG: "the file would be larger than one may be there (`ulimit -f`, or the file system): raise that limit",
    errno.EMFILE: "this process may open no more files (`ulimit -n`): raise that limit",
    errno.ENFILE: "this machine may open no more files (`fs.file-max`): raise that limit",
    errno.EACCES: "this user may not write there any more: give the permission back",
    errno.EPERM: "this user may not write there any more: give the permission back",
    errno.EIO: "its disk, or the server behind it, fails: see to it",
    errno.ESTALE: "its disk, or the server behind it, fails: see to it",
    errno.ETIMEDOUT: "its disk, or the server behind it, fails: see to it",
}
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""How Python and Rust write the number of an error into its text."""


def error_number(error: BaseException | str) -> int | None:
    """Return the errno of an error, of its cause or named in its text; None without."""
    for link in [error] if isinstance(error, str) else error_chain(error, implicit=False):
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno
        if found := _NUMBER.search(str(link)):
            return int(found[1] or found[2])
    return None


def what_stays(*, begun: bool) -> str:
    """Say what a run has left that cannot write a file; `begun` once its directory is a run."""
    if begun:
        return "What was saved before is whole, and the same command goes on from there"
    return "The directory is as it was before, and the same command starts again"


def write_remedy(error: Exception | str | None) -> str:
    """Say what lets a file be written after an error, by its errno.

    >>> write_remedy("step_6 cannot be written: [Errno 30] Read-only file system").partition(":")[0]
    'its file system is read-only, as one whose disk fails may have become'
    """
    return known_remedy(error) or "see to what the error names"


def known_remedy(error: Exception | str | None) -> str | None:
    """Say what lets a file be written after an error of a known errno; None for another."""
    return None if error is None else _REMEDIES.get(error_number(error) or 0)


def is_everywhere(error: Exception | str | None) -> bool:
    """Return whether limits of this process forbid the file on any disk."""
    number = None if error is None else error_number(error)
    if number == errno.EFBIG:
        return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return number in (errno.EMFILE, errno.ENFILE)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let an OSError of the block name the file that was to be written.

    The system names no file where a write fails, and a hidden one where it is written beside its place.
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
