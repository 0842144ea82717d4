"""Guard process beside one without a launcher, which it ends where that cannot end itself.

`python -m forge_dist.watching._guard PID RANK WORLD_SIZE BOARD LOG_DIR`. The watched process writes on the guard's standard
input the number of each signal that it gets, as Python's signal handler does by itself even while native code runs, 255 where
it answered one itself, and a zero when it needs no guard any more. The guard answers on standard output with lines of JSON.
"""

import json
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from forge_dist.watching._stacks import stacks_of, traces_of
from forge_dist.watching._watch import TICK_SECONDS, AwakeClock, Stall, Watch, Watched

SIGNAL_SECONDS = 5.0
"""Time that a process has to end after its second signal, and then to leave by a thread of its own."""
ANSWER_SECONDS = 0.5
"""Time after which the sender of a first signal hears that it came, where the process has not said so.

One in native code says nothing until it is out.
"""
ANSWERED = 255
"""What the watched process writes, beside a signal's number, once it has said itself what becomes of the run."""
STALL_SECONDS = 20.0
"""Time that a process which stands still has to raise an exception, and to write why it ends."""
_LEAVE_SECONDS = 2.0
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def main(pid: int, rank: int, world_size: int, board: Path, log_dir: Path) -> None:
    """Guard a process until it ends or says that it needs no guard."""
    # A terminal sends its signals to both; what becomes of them is the other's affair.
    for number in (*_STOPPING, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(alone=lambda: world_size == 1, named=world_size > 1)
    watched, signals = [Watched(rank, board, pid)], _Signals()
    while True:
        gone = os.getppid() != pid
        if select.select([0], [], [], 0 if gone else TICK_SECONDS)[0]:
            received = os.read(0, 64)
            if 0 in received:
                return
            if not received:
                break
            signals.take(received)
        elif gone:  # what it forked holds the pipe open
            break
        if gone:
            continue
        if signals.unanswered():
            _say(
                f"{signal.Signals(signals.last).name}: the run ends where it can, after its step or once its state is saved; a "
                "second signal ends it at once."
            )
        if signals.overdue():
            name = signal.Signals(signals.last).name
            _end(pid, {"second": name}, _LEAVE_SECONDS, f"a second {name} did not end the run within {SIGNAL_SECONDS:g} s")
            return
        found = watch.look(watched)
        if isinstance(found, Stall):
            kept = keep_stacks([(rank, board)], log_dir)
            text = f"{found.text}. {kept}" if kept else found.text
            _end(pid, {"stall": text}, STALL_SECONDS, text)
            return
        if found:
            _say(found)
    of_rank = f"rank {rank}, " if world_size > 1 else ""
    _say(
        f"{of_rank}process {pid} ended before its run was over, and said nothing: os._exit() "
        "in it or in a library, or a kill. Its exit status may be 0 all the same; the same command goes on, or begins anew."
    )


class _Signals:
    """Signals that the watched process got."""

    def __init__(self) -> None:
        self._clock = AwakeClock()
        self._count, self._since = 0, 0.0
        self._told = False
        self.last: int = signal.SIGTERM

    def take(self, received: bytes) -> None:
        """Count the signals that ask for an end."""
        self._told = self._told or ANSWERED in received
        for number in received:
            if number in _STOPPING:
                self._count += 1
                self.last = number
                if self._count <= 2:
                    self._since = self._clock.tick()

    def unanswered(self) -> bool:
        """Return, once, whether a first one is so long ago that its sender should hear of it."""
        now = self._clock.tick()
        if self._told or self._count != 1 or now - self._since <= ANSWER_SECONDS:
            return False
        self._told = True
        return True

    def overdue(self) -> bool:
        """Return whether the second one is so long ago that the process should have ended."""
        now = self._clock.tick()
        return self._count > 1 and now - self._since > SIGNAL_SECONDS


def keep_stacks(boards: list[tuple[int, Path]], log_dir: Path) -> str:
    """Copy the stacks of ranks to the logs; return a sentence that names them, or ""."""
    kept: list[Path] = []
    for rank, board in boards:
        with suppress(OSError):
            if stacks_of(board).stat().st_size:
                log_dir.mkdir(parents=True, exist_ok=True)
                kept.append(Path(shutil.copyfile(stacks_of(board), log_dir / f"stacks_rank_{rank}.txt")))
                for traces in board.parent.glob(f"{traces_of(board).name}*[0-9]"):
                    shutil.copyfile(traces, log_dir / f"collectives_rank_{rank}")
    if not kept:
        return ""
    return (
        f"The stacks of its threads: {kept[0]}" if len(kept) == 1 else f"The stacks of all ranks: {log_dir}/stacks_rank_*.txt"
    )


def _end(pid: int, message: dict[str, str], seconds: float, text: str) -> None:
    """Ask a process to end, and kill it where it cannot even be asked."""
    with suppress(OSError):
        os.write(1, (json.dumps(message) + "\n").encode())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != pid:
            return
        time.sleep(0.05)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    _say(f"{text}; its process did not answer and was killed")


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"forge: {text}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    os._exit(0)
