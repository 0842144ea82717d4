"""Error of writing a file → its reason and what to do about it, in words."""

import errno
import re

_REMEDIES = {
    errno.ENOSPC: "its disk is full: make room",
    errno.EDQUOT: "the quota there is used up: remove files of this user, or have it raised",
    errno.EROFS: "its file system is read-only, as one whose disk fails may have become: make it writable again",
    errno.EFBIG: "the file would be larger than one may be there (`ulimit -f`, or the file system): raise that limit",
    errno.EMFILE: "this process may open no more files (`ulimit -n`): raise that limit",
    errno.ENFILE: "this machine may open no more files (`fs.file-max`): raise that limit",
}
_NUMBER = re.compile(r"\(os error (\d+)\)")
"""How a library written in Rust has the number of an error in its text."""


def unwritten(error: Exception) -> str:
    """Describe why a file cannot be written, with what lets it be written.

    >>> unwritten(OSError(errno.ENOSPC, "No space left on device"))
    'No space left on device; its disk is full: make room'
    """
    reason, number = str(error), None
    if isinstance(error, OSError):
        reason, number = error.strerror or reason, error.errno
    elif found := _NUMBER.search(reason):
        number = int(found[1])
    remedy = _REMEDIES.get(number or 0)
    return f"{reason}; {remedy}" if remedy else reason
