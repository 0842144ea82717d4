"""Standard error of a run → the same text, dropped once nobody reads it any more."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class StandardError(io.TextIOBase):
    """Text stream to `sys.stderr` that outlives its reader.

    The reader may be a `tee` that Ctrl-C ended first, or a terminal that was closed. A run does not end for that: its log.txt
    has every line.
    """

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of `sys.stderr`."""
        return getattr(_stream(), "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write `text`, or drop it."""
        with _dropping():
            _stream().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        with _dropping():
            _stream().flush()

    def isatty(self) -> bool:
        """Return whether `sys.stderr` is a terminal."""
        return _stream().isatty()

    def fileno(self) -> int:
        """Return the descriptor of `sys.stderr`."""
        return _stream().fileno()


def _stream() -> Any:
    """Return `sys.stderr`, and not rich's proxy of it, which would write here again."""
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr) or io.StringIO()


@contextmanager
def _dropping() -> Iterator[None]:
    try:
        yield
    except OSError:
        # What stays in the buffer would be tried again, at the latest when Python ends, which would then end with status 120.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, _stream().fileno())
            os.close(null)
