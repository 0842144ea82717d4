"""Standard output of a command → one that takes any text, whatever its encoding."""

from __future__ import annotations

import codecs
import io
import sys

_NAME = "forge-any-text"


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
