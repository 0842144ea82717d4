"""A drawn fault → a run of `forge.sft` that it strikes, the same command again, and a comparison with an undisturbed run.

`hatch run chaos` draws many of them (tools/chaos.py); a few run in CI. What strikes runs in the run's own process, on the rank
that is drawn; `run_on_ranks` calls it there.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from forge._errors import RunInterruptedError
from forge.saving._damage import damage_of

from ..ranks import run_on_ranks
from .conftest import conversations, write_model, write_rows
from .starts import metrics, sft, signal_at, untimed, weights

CLOSE = 1e-5
"""Largest relative difference of a loss where the second start divides the work otherwise."""
WAYS: dict[str, tuple[str, int]] = {
    "single": ("single", 1),
    "ddp x2": ("ddp", 2),
    "fsdp2 x2": ("fsdp2", 2),
    "zero2 x2": ("zero2", 2),
    "zero3 x2": ("zero3", 2),
    "ddp x3": ("ddp", 3),
    "fsdp2 x3": ("fsdp2", 3),
    "ddp x4": ("ddp", 4),
    "fsdp2 x4": ("fsdp2", 4),
}
"""Name → strategy and ranks."""
SHARES = {
    "single": 9,
    "ddp x2": 4,
    "fsdp2 x2": 4,
    "zero2 x2": 1,
    "zero3 x2": 1,
    "ddp x3": 2,
    "fsdp2 x3": 2,
    "ddp x4": 2,
    "fsdp2 x4": 3,
}
"""How often each is drawn."""
KINDS = ("kill", "kill at a file", "stop", "cut link", "full disk", "flipped byte", "clock jump")
MOMENTS = {
    "forward": 24,
    "backward": 24,
    "optimizer": 8,
    "saving: write": 4,
    "saving: rename": 4,
    "exporting": 3,
    "checking": 3,
}
"""Moment of `starts.MOMENTS` → how often a run comes by, or a little less."""
BASE: dict[str, Any] = {
    "num_epochs": 2,
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 128,
    "learning_rate": 1e-2,
    "save_samples": 12,
    "eval_every_steps": 3,
    "keep_best": True,
    "logging_steps": 100,
}
"""Two epochs of four steps, with exports between, held-out rows and a best model."""
SAVING = ({"full_state_every_steps": 1}, {"full_state_every_steps": 3}, {}, {"async_save": False, "full_state_every_steps": 2})
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "lora": {"adapter": "lora", "lora_r": 4},
    "lora with dropout": {"adapter": "lora", "lora_r": 4, "lora_dropout": 0.3},
}
RECORDS = ("log.txt", "events.jsonl", "metrics.jsonl", "report.html")
"""Files that nobody trains from: a flipped byte in one changes itself alone."""
SECONDS = 2.0
"""How long a link is cut."""
JUMPS = (-3e8, -4000.0, 4000.0, 3e8)
MOST_SECONDS = 240


class Fault(NamedTuple):
    """A drawn case."""

    way: str
    again: str
    """Way of the second start."""
    kind: str
    moment: str
    """Of `MOMENTS`, or `file` for a file operation of the first rank in the run directory."""
    count: int
    """Which of them, from 1."""
    rank: int
    adapter: str
    saving: int
    """Index in SAVING."""
    seed: int

    def __str__(self) -> str:
        where = f"{self.moment} {self.count}" + (f", rank {self.rank}" if WAYS[self.way][1] > 1 else "")
        return f"{self.way}, {self.adapter}: {self.kind} at {where}" + (
            f"; again by {self.again}" if self.again != self.way else ""
        )


def draw(seed: int, number: int) -> Fault:
    """Draw a case; the same for the same seed and number."""
    by = random.Random(f"{seed}/{number}")
    way = by.choices([*SHARES], [*SHARES.values()])[0]
    kind = KINDS[number % len(KINDS)]
    on_files = kind in ("kill at a file", "full disk") or (kind in ("flipped byte", "clock jump") and by.random() < 0.5)
    moment = "file" if on_files else by.choice([*MOMENTS])
    count = by.randrange(1, 120) if on_files else by.randrange(1, MOMENTS[moment] + 1)
    ranks = WAYS[way][1]
    # Only the first rank writes the run's own files.
    rank = 0 if on_files or moment in ("exporting", "checking") else by.randrange(ranks)
    other = [name for name in WAYS if name != way and not name.startswith("zero")]
    again = by.choice(other) if by.random() < 0.25 else way
    return Fault(
        way=way,
        again=again,
        kind=kind,
        moment=moment,
        count=count,
        rank=rank,
        # Which numbers dropout draws follows from how the work is divided.
        adapter=by.choice(("none", "lora with dropout" if again == way else "lora")),
        saving=by.randrange(len(SAVING)),
        seed=by.randrange(2**31),
    )


class Ground:
    """Model, rows and undisturbed runs that all cases share, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._undisturbed: dict[tuple[str, str], Path] = {}
        self.given = {
            "model_path": str(write_model(folder / "model")),
            "data_path": str(write_rows(folder / "chats.jsonl", conversations())),
            "eval_data_path": str(write_rows(folder / "held_out.jsonl", conversations(30)[24:])),
            **BASE,
        }

    def settings(self, way: str, adapter: str, saving: int, run: Path) -> dict[str, Any]:
        """Settings of a run."""
        adapted = ADAPTERS[adapter]
        return {**self.given, **adapted, **SAVING[saving], "strategy": WAYS[way][0], "ckpt_output_dir": str(run)}

    def undisturbed(self, way: str, adapter: str) -> Path:
        """Return the run that nothing struck; saving changes none of its numbers."""
        with self._lock:
            if (way, adapter) not in self._undisturbed:
                run = self.folder / f"undisturbed {way} {adapter}"
                run_on_ranks(plain, WAYS[way][1], self.settings(way, adapter, 0, run), joined=False, timeout=MOST_SECONDS)
                self._undisturbed[way, adapter] = run
            return self._undisturbed[way, adapter]

    def case(self, fault: Fault) -> dict[str, Any]:
        """Run a case; return what it came to: `says`, `failed`, `outcome`, and how each start ended."""
        run = self.folder / f"run {fault.seed}"
        while True:
            try:
                found = self._case(fault, run)
            except Exception as error:
                return {
                    "failed": True,
                    "outcome": "failed",
                    "kind": fault.kind,
                    "says": f"FAILED: {fault}: {type(error).__name__}: {_line(error)}",
                }
            finally:
                shutil.rmtree(run, ignore_errors=True)
                mark = _mark(run)
                struck_it = mark.exists()
                mark.unlink(missing_ok=True)
            if struck_it or fault.count == 1:
                # Where this machine keeps its temporary files is nobody's concern.
                return json.loads(json.dumps(found).replace(f"{self.folder}/", ""))
            fault = fault._replace(count=fault.count // 2)

    def _case(self, fault: Fault, run: Path) -> dict[str, Any]:
        undisturbed, same = self.undisturbed(fault.way, fault.adapter), fault.again == fault.way
        first = self.settings(fault.way, fault.adapter, fault.saving, run)
        ended = [_started(struck, WAYS[fault.way][1], first, tuple(fault))]
        if ended[0].startswith("failed"):
            raise AssertionError(f"it ended in an error that is no answer: {ended}")
        flipped = flip(run, fault.seed) if fault.kind == "flipped byte" and run.exists() else None
        second = self.settings(fault.again, fault.adapter, fault.saving, run)
        ended.append(_started(plain, WAYS[fault.again][1], second))
        said, outcome = "", "bit-equal" if same else "within 1e-5"
        if flipped is not None and ended[-1] != "finished":
            # Refused by name, and nothing lost: with the byte put back the same command goes on.
            said, outcome = f"refused ({ended[-1]}), and whole once {flipped.name} was put back; ", "refused by name"
            if not flipped.put_back():
                raise AssertionError(f"{flipped.name} was changed by a start that was refused: {ended}")
            ended.append(_started(plain, WAYS[fault.again][1], second))
        if ended[-1] != "finished":
            raise AssertionError(f"the same command did not finish: {ended}")
        if flipped is not None and flipped.now == flipped.bytes_now() and flipped.name.startswith("hf_format/"):
            # An export of earlier steps is not made again: it is named, and the run is not called finished.
            if Path(flipped.name).name not in str(damage_of(run)):
                raise AssertionError(f"{flipped.name} is damaged, and nobody says so: {ended}")
            flipped.put_back()
            said, outcome = f"{flipped.name} named as damaged, the rest ", "refused by name"
        record_damaged = flipped is not None and flipped.name in RECORDS
        largest = compare(run, undisturbed, same=same, lines=not record_damaged, all_exports=fault.kind != "full disk")
        left = [file.name for file in run.rglob(".*")]
        if left:
            raise AssertionError(f"left behind: {left}")
        return {
            "failed": False,
            "outcome": outcome,
            "kind": fault.kind,
            "way": fault.way,
            "ended": ended,
            "says": f"{said}{'bit-equal' if same else f'losses within {largest:.0e}'}: {fault} ({ended[0]})",
        }


class Flipped(NamedTuple):
    """A file of which a byte was changed."""

    path: Path
    name: str
    former: bytes
    now: bytes

    def bytes_now(self) -> bytes:
        """Return what the file holds now; nothing where it is gone."""
        return self.path.read_bytes() if self.path.exists() else b""

    def put_back(self) -> bool:
        """Write the former content; whether nobody changed the file meanwhile."""
        untouched = self.bytes_now() == self.now
        self.path.write_bytes(self.former)
        return untouched


def flip(run: Path, seed: int) -> Flipped | None:
    """Change one bit of a drawn file of a run; the larger a file, the no likelier."""
    by = random.Random(seed)
    files = sorted(file for file in run.rglob("*") if file.is_file() and file.stat().st_size and "logs" not in file.parts)
    if not files:
        return None
    file = by.choice(files)
    former = file.read_bytes()
    now = bytearray(former)
    now[by.randrange(len(now))] ^= 1 << by.randrange(8)
    file.write_bytes(bytes(now))
    return Flipped(file, file.relative_to(run).as_posix(), former, bytes(now))


def compare(run: Path, undisturbed: Path, *, same: bool, lines: bool = True, all_exports: bool = True) -> float:
    """Compare two finished runs; return the largest relative difference of their losses.

    Args:
        run: that was struck.
        undisturbed: that was not.
        same: whether the work was divided in one way: then all is equal to the bit.
        lines: whether metrics.jsonl is compared.
        all_exports: whether those between are; while a disk is full training goes on without them, with a warning.

    Raises:
        AssertionError: they differ.

    """
    largest = 0.0
    if lines:
        found, wanted = _losses(run), _losses(undisturbed)
        if [step for step, _ in found] != [step for step, _ in wanted]:
            raise AssertionError(f"steps {[step for step, _ in found]}, and not {[step for step, _ in wanted]}")
        largest = max(abs(one - other) / abs(other) for (_, one), (_, other) in zip(found, wanted, strict=True))
        if largest > CLOSE:
            raise AssertionError(f"losses differ by {largest:.1e}")
        if same and untimed(run) != untimed(undisturbed):
            raise AssertionError("metrics.jsonl differs")
    exports, others = weights(run), weights(undisturbed)
    last = max(others, key=lambda name: (len(name.split("/")[1]), name))
    if last not in exports or (all_exports and sorted(exports) != sorted(others)):
        raise AssertionError(f"exports {sorted(exports)}, and not {sorted(others)}")
    if same and any(others[name] != found for name, found in exports.items()):
        raise AssertionError("exported weights differ")
    return largest


def _losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


def _started(function: Any, ranks: int, *given: Any) -> str:
    """Start a run; return how it ended, in a few words."""
    try:
        run_on_ranks(function, ranks, *given, joined=False, timeout=MOST_SECONDS)
    except RunInterruptedError as stopped:
        return f"stopped, status {stopped.exit_status}"
    except Exception as error:
        if isinstance(error, TimeoutError):
            raise
        status = getattr(error, "exit_status", None)
        if status is not None:
            return f"status {status}: {_line(error)}"
        if "ended with status -9" in str(error):
            return "killed"
        return f"failed: {type(error).__name__}: {_line(error)}"
    return "finished"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Run `forge.sft`, whose words nobody reads."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    return sft(settings)


def struck(settings: dict[str, Any], fault: tuple[Any, ...]) -> dict[str, Any]:
    """Run `forge.sft`, struck by a fault on the rank that it is drawn for."""
    drawn, path = Fault(*fault), Path(settings["ckpt_output_dir"])
    if int(os.environ.get("RANK", "0")) == drawn.rank:
        act = {
            "kill": _kill,
            "kill at a file": _kill,
            "flipped byte": _kill,
            "stop": _stop,
            "cut link": _cut,
            "full disk": _fill,
            "clock jump": _jump,
        }[drawn.kind]

        def strike() -> None:
            _mark(path).touch()
            act(drawn)

        if drawn.moment == "file":
            at_file(path, drawn.count, strike, lasting=drawn.kind == "full disk")
        else:
            signal_at(drawn.moment, drawn.count, "before", strike)
    return plain(settings)


def _mark(run: Path) -> Path:
    """Return the file beside a run that says that its fault struck."""
    return run.with_name(f"{run.name}.struck")


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault) -> None:
    os.kill(os.getpid(), (signal.SIGTERM, signal.SIGINT)[fault.seed % 2])


def _cut(_: Fault) -> None:
    """Stop this process for a while: to the others it is a link that is cut, and comes back."""
    subprocess.Popen([sys.executable, "-S", "-c", f"import os, time; time.sleep({SECONDS}); os.kill({os.getpid()}, 18)"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill(_: Fault) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _jump(fault: Fault) -> None:
    real, by = time.time, JUMPS[fault.seed % len(JUMPS)]
    time.time = lambda: real() + by  # type: ignore[assignment]


WRITING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")
"""Audited operations of files, beside opening one to write."""


def at_file(root: Path, count: int, strike: Any, *, lasting: bool) -> None:
    """Call `strike` at the `count`-th operation that changes a file below `root`, and at all later ones where it is `lasting`.

    A strike that raises makes the operation fail.
    """
    seen, busy, prefix = 0, False, str(root)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen, busy
        if busy or not (event == "open" or event in WRITING) or not args or not isinstance(args[0], (str, os.PathLike)):
            return
        if not os.fspath(args[0]).startswith(prefix):
            return
        if event == "open" and not (
            len(args) > 2 and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            return
        # A full disk still removes and renames.
        if lasting and event not in ("open", "os.mkdir", "os.link"):
            return
        seen += 1
        if seen == count or (lasting and seen > count):
            busy = True
            try:
                strike()
            finally:
                busy = False

    sys.addaudithook(hook)


def table(results: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table: each kind of fault with what its cases came to."""
    counts = Counter((result["kind"], result["outcome"]) for result in results if not result["failed"])
    failed = Counter(result["kind"] for result in results if result["failed"])
    head = ["fault", "cases", "bit-equal", "another division: losses within 1e-5", "refused by name, nothing lost", "failed"]
    lines = [head, ["---"] * len(head)]
    for kind in KINDS:
        found = [counts[kind, outcome] for outcome in ("bit-equal", "within 1e-5", "refused by name")] + [failed[kind]]
        lines.append([kind, *map(str, [sum(found), *found])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(about: dict[str, Any]) -> str:
    """Return the section of docs/parity.md on the faults of a lane."""
    return (
        "## Random faults\n\n"
        f"{about['origin']}\n\n"
        "Each case draws ranks and strategy, an adapter or none, how often states are saved, the fault, and the rank and\n"
        "the moment that it strikes; then the same command is given again. A disk is full from a drawn file operation on, a\n"
        f"link is cut for {SECONDS:g} s, a byte is flipped in any file of the killed run. Compared with a run that nothing\n"
        "struck: every line of metrics.jsonl and every exported weight to the bit, or the losses to 1e-5 where the second\n"
        "start divides the work otherwise. What is refused names the file, and with the byte put back the same command ends\n"
        "bit-equal.\n\n"
        f"{table(about['results'])}"
    )
