"""Beats of some ranks → what a person should hear of them, and the stall that ends them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from forge_dist.watching._board import Beat, Board
from forge_dist.watching._stacks import Place, place_in, request, stacks_of

TICK_SECONDS = 0.5
# How long ranks that all wait for others are left to the node where the cause is, which names it.
_OTHERS_SECONDS = 15.0
_WORD_SECONDS = 30.0
_AGAIN_SECONDS = 60.0
# What a process must have read and written between two looks at a long phase to count as moving: more than its threads do.
_BYTES = 1 << 20


class AwakeClock:
    """Clock that stands still while the process is stopped or swapped out."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def tick(self) -> float:
        """Add the time since the last tick, at most two tick lengths; return the sum in seconds."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * TICK_SECONDS)
        self._last = now
        return self.seconds


class Watched(NamedTuple):
    """One process that is watched."""

    rank: int
    board: Path
    pid: int


class Stall(NamedTuple):
    """Ranks that stand still."""

    rank: int
    """The one that the others wait for."""
    pid: int
    text: str
    """What happened, for a person."""


class _Seen:
    """What was last seen of a process."""

    def __init__(self, now: float) -> None:
        self.board: Board | None = None
        self.beat: Beat | None = None
        self.moved = now
        self.traffic = 0
        self.stopped_since: float | None = None

    @property
    def bound(self) -> float:
        """Seconds that it may stand still; 0 for one that ended, or was not heard of yet."""
        return 0.0 if self.beat is None else self.beat.bound

    @property
    def step(self) -> int:
        """Steps that it made: one that is behind is the one that the others wait for."""
        return -1 if self.beat is None else self.beat.step


class Watch:
    """Watch over the ranks of one node.

    Args:
        alone: returns whether these are all ranks of the run: there is no other node that may name the cause.
        named: whether to speak of ranks; of the run where it is one process.
    """

    def __init__(self, *, alone: Callable[[], bool], named: bool = True) -> None:
        self._alone, self._named = alone, named
        self._clock = AwakeClock()
        self._seen: dict[int, _Seen] = {}
        self._said: float | None = None
        self._asked: float | None = None

    def look(self, processes: Sequence[Watched]) -> str | Stall | None:
        """Look once, about every half second.

        Returns:
            A line for a person on a rank that has not moved for a while, or the stall that ends the run; the stacks of all
            ranks lie beside their files then.
        """
        now = self._clock.tick()
        for process in processes:
            self._see(process, now)
        # One that ended waits for nobody; one that is still being started has not been heard of.
        known = [(each, seen) for each in processes if (seen := self._seen[each.pid]).bound]
        if not known:
            return None
        moved, bound = max(seen.moved for _, seen in known), max(seen.bound for _, seen in known)
        stopped = [
            each
            for each, seen in known
            if seen.beat is not None and seen.stopped_since is not None and now - seen.stopped_since > seen.beat.stopped
        ]
        if stopped or now - moved > bound:
            return self._judge([each for each, _ in known], now)
        self._asked = None
        return self._word(known, now, bound)

    def _see(self, process: Watched, now: float) -> None:
        seen = self._seen.get(process.pid)
        if seen is None:
            seen = self._seen[process.pid] = _Seen(now)
        if seen.board is None:
            with suppress(OSError):
                seen.board = Board(process.board, make=False)
        found = seen.board.read() if seen.board is not None else None
        state, traffic = _state(process.pid), _traffic(process.pid)
        if state in ("T", "t"):
            seen.stopped_since = now if seen.stopped_since is None else seen.stopped_since
        else:
            seen.stopped_since = None
        if found is not None and (seen.beat is None or found.moved != seen.beat.moved):
            seen.beat, seen.moved, seen.traffic = found, now, traffic
        # A long phase reads and writes where it cannot beat: a download, a file of many gigabytes.
        elif found is not None and not found.doing.startswith("step ") and traffic - seen.traffic > _BYTES:
            seen.moved, seen.traffic = now, traffic

    def _word(self, known: Sequence[tuple[Watched, _Seen]], now: float, bound: float) -> str | None:
        """Return a line on the rank that has stood still the longest, from time to time."""
        process, seen = min(known, key=lambda each: (each[1].stopped_since is None, each[1].step, each[1].moved))
        still = now - max(each.moved for _, each in known)
        if still < max(bound / 5, min(bound / 2, _WORD_SECONDS)):
            self._said = None
            return None
        if self._said is not None and now - self._said < min(bound / 4, _AGAIN_SECONDS):
            return None
        self._said = now
        assert seen.beat is not None
        return (
            f"{self._subject(process)} has not moved {_since(seen.beat)} ({still:.0f} s){_state_words(seen)}; after "
            f"{bound:.0f} s the run is ended (stall_timeout)"
        )

    def _subject(self, process: Watched) -> str:
        return f"rank {process.rank}" if self._named else "the run"

    def _judge(self, processes: Sequence[Watched], now: float) -> Stall | None:
        """Find which rank the others wait for; None while another node may know better."""
        stopped = {each.pid for each in processes if self._seen[each.pid].stopped_since is not None}
        if self._asked is None:
            request([(each.pid, each.board) for each in processes])
            self._asked = now
        places = {each.pid: place_in(stacks_of(each.board)) for each in processes}
        waits = {pid: place is not None and place.waits and pid not in stopped for pid, place in places.items()}
        if not self._alone() and all(waits.values()) and now - self._asked < _OTHERS_SECONDS:
            return None

        def order(each: Watched) -> tuple[bool, bool, int, float]:
            seen = self._seen[each.pid]
            count = -1 if seen.beat is None else seen.beat.count
            return each.pid not in stopped, waits[each.pid], count, seen.moved

        first = min(processes, key=order)
        return Stall(first.rank, first.pid, self._describe(first, processes, places, waits, stopped, now))

    def _describe(
        self,
        first: Watched,
        processes: Sequence[Watched],
        places: Mapping[int, Place | None],
        waits: Mapping[int, bool],
        stopped: set[int],
        now: float,
    ) -> str:
        seen = self._seen[first.pid]
        beat, place = seen.beat, places[first.pid]
        since = now - (seen.moved if seen.stopped_since is None else min(seen.moved, seen.stopped_since))
        text = f"{self._subject(first)} has not moved {_since(beat)} for {since:.0f} s"
        if first.pid in stopped:
            text += ": its process is stopped (SIGSTOP)"
        elif waits[first.pid]:
            text += ": it waits for other ranks"
        if place is not None:
            text += f"{' at' if ': ' in text else ': it is at'} {place.where}"
        others = [each.rank for each in processes if each.pid != first.pid and waits[each.pid]]
        if others:
            text += f"; rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))} wait{'s' * (len(others) == 1)} for it"
        return text


def _since(beat: Beat | None) -> str:
    if beat is None:
        return "since it was started"
    if beat.step < 0 or not beat.doing.startswith("step "):
        after = f" after step {beat.step}" if beat.step >= 0 else ""
        return f"in {beat.doing}{after}" if beat.doing != "starting" else "since it began"
    return f"since step {beat.step}" if beat.step else "in its first step"


def _state_words(seen: _Seen) -> str:
    return ": its process is stopped (SIGSTOP)" if seen.stopped_since is not None else ""


def _state(pid: int) -> str:
    """Return the state of a process as Linux names it (T: stopped); "" elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


def _traffic(pid: int) -> int:
    """Return how many bytes a process has read and written; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
        return sum(int(line.partition(": ")[2]) for line in lines if line.startswith(("rchar", "wchar")))
    except (OSError, ValueError):
        return 0
