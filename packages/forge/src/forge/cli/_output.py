"""Standard streams of a command → ones that are open, and an output that takes any text."""

from __future__ import annotations

import codecs
import io
import os
import sys

_NAME = "forge-any-text"


def open_closed_streams() -> None:
    """Open the null device in the place of each standard stream that is closed (`<&-`, `>&-`).

    The first file that is opened would take its number, and what libraries and ranks print would be written into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)  # noqa: FBT003 - it has no other form
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as the process


def take_any_text() -> None:
    """Print what standard output's encoding lacks as escapes, as standard error does.

    Python raises UnicodeEncodeError there (`PYTHONIOENCODING=ascii`, a locale of another encoding). A path that is not of the
    encoding is printed as the bytes that it is.
    """
    codecs.register_error(_NAME, _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_NAME)


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    found = (
        bytes([ord(char) - 0xDC00]) if "\udc80" <= char <= "\udcff" else char.encode("ascii", "backslashreplace")
        for char in lacking
    )
    return b"".join(found), error.end
