"""Progress of a preparation → a callable, or a line on stderr if that is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | Callable[[int, int], None]
"""True shows a line on a terminal, False nothing; a callable gets (row reached, last row)."""

_EVERY_SECONDS = 0.1
_WIDTH = 30


def is_shown(progress: Progress) -> bool:
    """Tell whether anything is shown; counting rows beforehand takes a pass over the file."""
    return callable(progress) or (progress and sys.stderr.isatty())


@contextmanager
def reporter(progress: Progress, last: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the row reached; `last` is the last row, None if unknown."""
    if callable(progress):
        yield lambda row: progress(row, last or row)
    elif is_shown(progress):
        line = _Line(last)
        try:
            yield line.show
        finally:
            line.end()
    else:
        yield lambda _: None


class _Line:
    """A line that is overwritten."""

    def __init__(self, last: int | None) -> None:
        self._last = last
        self._began = time.monotonic()
        self._shown = 0.0

    def show(self, row: int) -> None:
        now = time.monotonic()
        if now - self._shown < _EVERY_SECONDS:
            return
        self._shown = now
        rate = row / max(now - self._began, 1e-9)
        text = f"tokenising: row {row:,}"
        if self._last:
            done = min(row / self._last, 1.0)
            left = (self._last - row) / max(rate, 1e-9)
            bar = "#" * round(done * _WIDTH)
            text += f" of {self._last:,} [{bar:.<{_WIDTH}}] {max(0, round(left)):,} s left"
        sys.stderr.write(f"\r{text}, {rate:,.0f} rows/s\x1b[K")
        sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
