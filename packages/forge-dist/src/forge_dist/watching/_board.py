"""What a rank is doing, in a small file that it writes and that another process reads.

The file is mapped into memory, so that a beat costs no system call. A record is written to the slot that nobody reads, then the
number of the slot changes: a reader sees the old record or the new one.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

_RECORD = struct.Struct("<Qqdd160s")
_NUMBER = struct.Struct("<Q")
# Number of the newest record, then the count that others report, then two records.
_NEWEST, _ELSEWHERE, _SLOTS = 0, 8, 16
_SIZE = _SLOTS + 2 * _RECORD.size


class Beat(NamedTuple):
    """One record of a rank."""

    count: int
    """Number of beats so far."""
    step: int
    """Optimizer steps made; -1 before the run knows."""
    bound: float
    """Seconds that may pass until the next beat; 0: any number."""
    stopped: float
    """Seconds for which the process may be stopped (SIGSTOP); 0: any number."""
    doing: str
    """What it is doing."""
    elsewhere: int = 0
    """Beats of the ranks on other nodes, as far as this one heard of them."""

    @property
    def moved(self) -> tuple[int, int]:
        """Counts of which one changes while the run moves."""
        return self.count, self.elsewhere


class Board:
    """Writer and reader of one rank's file."""

    def __init__(self, path: Path, *, make: bool) -> None:
        """Open the file, and make it if `make`.

        Raises:
            OSError: it cannot be made, or is not there.
        """
        self.path = path
        """The file."""
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        try:
            if make:
                # Written and not only made longer: on a full disk the mapped memory could not be written later, which kills.
                os.write(descriptor, bytes(_SIZE))
            elif os.fstat(descriptor).st_size < _SIZE:
                raise OSError(f"{path} is not written yet")
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    def write(self, beat: Beat) -> None:
        """Write a record; `elsewhere` is left as it is."""
        text = beat.doing.encode("utf-8", "replace")[:160]
        at = _SLOTS + (beat.count % 2) * _RECORD.size
        _RECORD.pack_into(self._memory, at, beat.count, beat.step, beat.bound, beat.stopped, text)
        _NUMBER.pack_into(self._memory, _NEWEST, beat.count)

    def write_elsewhere(self, count: int) -> None:
        """Write the count of beats on other nodes."""
        _NUMBER.pack_into(self._memory, _ELSEWHERE, count)

    def read(self) -> Beat | None:
        """Return the newest record; None before the first."""
        while True:
            (number,) = _NUMBER.unpack_from(self._memory, _NEWEST)
            if not number:
                return None
            count, step, bound, stopped, text = _RECORD.unpack_from(self._memory, _SLOTS + (number % 2) * _RECORD.size)
            (elsewhere,) = _NUMBER.unpack_from(self._memory, _ELSEWHERE)
            if count == number:
                return Beat(count, step, bound, stopped, text.rstrip(b"\0").decode("utf-8", "ignore"), elsewhere)

    def close(self) -> None:
        """Unmap the file."""
        self._memory.close()
