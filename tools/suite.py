"""A run of pytest → how many tests passed, which failed, and how long each file took."""

from __future__ import annotations

import os
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from repository import ROOT

TWO_PROCESSES = ("-n", "2", "--dist", "worksteal")
"""pytest-xdist's arguments: two processes, and one that has done its own tests takes some of the other's."""

MEMORY = Path("/dev/shm")  # noqa: S108 - a file system, below which a folder of a new name is made
LEAST_BYTES = 6 << 30
"""Free bytes of MEMORY from which on the tests' folders lie there."""


@contextmanager
def temporary_folder(memory: Path = MEMORY) -> Iterator[dict[str, str]]:
    """Yield the variables that put temporary folders in memory where there is room; remove what is left there.

    A tiny run waits forty times for the disk (fsync), 3 ms each time on a virtual one, which is a third of such a run.
    """
    if not memory.is_dir() or (free := os.statvfs(memory)).f_bavail * free.f_frsize < LEAST_BYTES:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="tests-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield {"TMPDIR": folder}


@dataclass
class Report:
    """Counts of one or several runs of pytest."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    """`file::test` of each failure and error."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """File → seconds of its tests, set-up and tear-down included."""
    tests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """File → number of its tests."""

    def add(self, other: Report) -> None:
        """Add another run's counts."""
        self.passed += other.passed
        self.skipped += other.skipped
        self.failed += other.failed
        for file, seconds in other.seconds.items():
            self.seconds[file] += seconds
            self.tests[file] += other.tests[file]

    def __str__(self) -> str:
        parts = [f"{self.passed} passed"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(parts + ([f"{self.skipped} skipped"] if self.skipped else []))


def run(
    python: str, *arguments: str, report: Path, environ: dict[str, str], root: Path = ROOT, output: Path | None = None
) -> Report:
    """Run pytest in a checkout and return its report; what it prints may go to a file. `environ` is the whole environment."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *writing(report), *arguments]
    with temporary_folder() as variables, ExitStack() as files:
        out = files.enter_context(output.open("w", encoding="utf-8")) if output else None
        stderr = subprocess.STDOUT if output else None
        subprocess.run(command, cwd=root, env=environ | variables, stdout=out, stderr=stderr, check=False)
    return read(report)


def writing(report: Path) -> list[str]:
    """Return the arguments with which pytest writes a report that names files."""
    return [f"--junitxml={report}", "-o", "junit_family=xunit1"]


def read(path: Path) -> Report:
    """Read the report; a run that wrote none, such as one that was killed, is one failure."""
    if not path.is_file():
        return Report(failed=["pytest ended without a report"])
    report = Report()
    root = ET.parse(path).getroot()  # noqa: S314 - pytest wrote it a moment ago
    for case in root.iter("testcase"):
        file = case.get("file") or case.get("classname", "?")
        report.seconds[file] += float(case.get("time", 0))
        report.tests[file] += 1
        if case.find("failure") is not None or case.find("error") is not None:
            report.failed.append(f"{file}::{case.get('name')}")
        elif case.find("skipped") is not None:
            report.skipped += 1
        else:
            report.passed += 1
    if not (report.passed or report.failed or report.skipped):
        report.failed.append("no test ran")
    return report
