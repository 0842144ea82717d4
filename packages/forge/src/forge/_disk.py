"""Error of the operating system on writing → what to do about it, in words."""

from __future__ import annotations

import errno
import re

_REMEDIES = {
    errno.ENOSPC: "its disk is full: make room",
    errno.EDQUOT: "the quota there is used up: remove files of this user, or have it raised",
    errno.EROFS: "its file system is read-only, as one whose disk fails may have become: make it writable again",
    errno.EFBIG: "the file would be larger than one may be there (`ulimit -f`, or the file system): raise that limit",
    errno.EACCES: "this user may not write there any more: give the permission back",
    errno.EPERM: "this user may not write there any more: give the permission back",
    errno.EIO: "its disk, or the server behind it, fails: see to it",
    errno.ESTALE: "its disk, or the server behind it, fails: see to it",
    errno.ETIMEDOUT: "its disk, or the server behind it, fails: see to it",
}
_NUMBER = re.compile(r"\[Errno (\d+)\]|\(os error (\d+)\)")
"""How Python and Rust write the number of an error into its text."""


def error_number(error: Exception | str) -> int | None:
    """Return the errno of an error, or the one that its text names; None without."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None


def write_remedy(error: Exception | str | None) -> str:
    """Say what lets a file be written after an error, by its errno.

    >>> write_remedy("step_6 cannot be written: [Errno 30] Read-only file system").partition(":")[0]
    'its file system is read-only, as one whose disk fails may have become'
    """
    number = None if error is None else error_number(error)
    return _REMEDIES.get(number or 0, "see to what the error names")
