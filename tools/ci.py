"""All that must pass, in new environments, and where the time went: `.ci/run` calls this.

What a stranger does first, then what a maintainer must: every test but the lanes' once, a leaf's where the leaf is alone and
all others where everything is; lint, format, types, the site, and the six packages as wheels. The tests run in two lanes, over
three processes and over two, for a test often waits for those that it started, and a step's last test for none; the lane of
three is the longer one, so that the end keeps two processors busy. Beside them a third lane makes the environments, in the
order in which the tests want them, and does everything else. A step that fails stops no other one.
Everything that it makes lies in .ci-env (git ignores it) and goes when it ends; CI_KEEP=1 leaves it there.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import suite
from repository import FACADE, ROOT, packages

HOME = ROOT / ".ci-env"
WARMED = "all"
"""Environment in which one process collects all tests, before several would compile what they import at once.

pip compiles no bytecode (hatch.toml): 13 of the 20 seconds of a first import are compilation, and 9 more the tests' own.
"""
TAKE_BYTECODE = ("hatch-test.forge-accel", "hatch-test.forge-dist", "hatch-test.forge-algos")
"""Environments with torch that are made after that one, and take its bytecode."""
MINUTES = 20
"""What this may take on two cores. It is reported, not enforced: no machine is as fast as another."""
THREE = ("-n", "3", *suite.TWO_PROCESSES[2:])
"""pytest-xdist's arguments for the longest step; the others, in the lane beside it, run over two processes.

With three processes and no lane beside them, a quarter of the time of two processors was left over.
"""
TWO = suite.TWO_PROCESSES
LAST_LINES = 40
"""How much of a failed step's output is printed again at the end."""


@dataclass
class Step:
    """A command, and what came of it."""

    name: str
    command: list[str]
    needs: Step | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    state: str = "not run"
    seconds: float = 0.0
    output: str = ""

    @property
    def report(self) -> Path:
        """Where pytest writes its report, if the step runs pytest."""
        return HOME / "reports" / f"{self.name.replace(' ', '_').replace('/', '_')}.xml"

    def run(self, environ: dict[str, str], printing: threading.Lock) -> None:
        """Wait for what it needs, run, print all of its output at once."""
        if self.needs:
            self.needs.ended.wait()
        began = time.monotonic()
        print(f"... {self.name}", flush=True)
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(self.command, cwd=ROOT, env=environ, text=True, errors="replace", check=False, **piped)
        self.seconds, self.output = time.monotonic() - began, done.stdout
        self.state = "FAILED" if done.returncode else "ok"
        with printing:
            print(f"\n=== {self.name}: {' '.join(self.command)}\n{self.output}", end="")
            print(f"=== {self.name}: {self.state} after {self.seconds:.0f} s", flush=True)
        self.ended.set()


def steps() -> list[list[Step]]:
    """Return two lanes of tests, of which the first is longer than all others, and the lane beside them."""
    # The small environments come first, so that the tests begin soon.
    alone = ["forge-packing", "forge-data", "forge-accel", "forge-dist", "forge-algos"]
    assert set(alone) == set(packages()) - {FACADE}
    made = {leaf: environment(leaf, f"hatch-test.{leaf}") for leaf in alone}
    everything = environment("all", "all")
    # A leaf's tests that are skipped where it is alone, for they need DeepSpeed or another leaf.
    together = {leaf: files for leaf in alone if (files := together_files(ROOT / "tests" / leaf))}
    leaves = [f"--only-together=tests/{leaf}" for leaf in together]
    others = ["tests/whole", "tests/forge", "tests/tools", "tests/peers", *chain.from_iterable(together.values()), *leaves]
    longest = testing("everything together", everything, THREE, "hatch", "run", "test", *others)
    tests = [
        testing(f"{leaf} alone", made[leaf], TWO, "hatch", "test", "-i", f"package={leaf}", "--", f"tests/{leaf}")
        for leaf in alone
    ]
    checks = ["hatch check code", "hatch check fmt", "hatch check types", "hatch run wheels", "hatch run docs:build"]
    environments = [made["forge-packing"], made["forge-data"], everything, *(made[leaf] for leaf in alone[2:])]
    return [[longest], tests, [*environments, *(Step(check, check.split()) for check in checks)]]


def environment(name: str, environ: str) -> Step:
    """Return a step that makes an environment of hatch, and gives it bytecode where its tests import much."""
    make = f"hatch env create {environ}"
    then = "-m tests.preload" if environ == WARMED else None
    if environ in TAKE_BYTECODE:
        then = f"tools/bytecode.py {WARMED}"
    command = ["sh", "-c", f"{make} && hatch -e {environ} run python {then}"] if then else make.split()
    return Step(f"environment: {name}", command)


def together_files(folder: Path) -> list[str]:
    """Return a leaf's test files in which a test is marked `together`, there or by a helper of the leaf that is imported."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    marking = [path for path, text in texts.items() if "mark.together" in text]
    helpers = "|".join(path.stem for path in marking if not path.name.startswith("test_"))
    imports = re.compile(rf"^from \.+({helpers}) import " if helpers else r"(?!)", re.MULTILINE)
    found = [path for path, text in texts.items() if path in marking or imports.search(text)]
    return [path.relative_to(folder.parents[1]).as_posix() for path in found if path.name.startswith("test_")]


def testing(name: str, needs: Step, processes: tuple[str, ...], *command: str) -> Step:
    """Return a step that runs pytest over several processes and writes a report."""
    step = Step(name, [], needs)
    step.command = [*command, "-q", *processes, *suite.writing(step.report)]
    return step


def main() -> int:
    """Install hatch, run all lanes, say what came of it and where the time went."""
    began, before = time.monotonic(), busy_seconds()
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "reports").mkdir(parents=True)
    # hatch's environments are made anew: those of an earlier run would hide a dependency that nobody declared.
    path = f"{HOME / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "HATCH_DATA_DIR": str(HOME / "hatch"), "HATCH_INTERACTIVE": "0", "NO_COLOR": "1"}
    # One thread a process, as tests have: several processes whose threads spin for the same processors hold each other up.
    environ |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ.pop("PYTHONPATH", None)
    printing = threading.Lock()
    # The environment that passes commands on is made here, for all lanes use it.
    install = f"'{sys.executable}' -m venv '{HOME / 'venv'}' && pip install --quiet hatch && hatch env create"
    hatch = Step("pip install hatch", ["sh", "-c", install])
    try:
        hatch.run(environ, printing)
        lanes = steps()
        with suite.temporary_folder() as variables, ThreadPoolExecutor(len(lanes)) as pool:
            of_tests = [environ | variables] * (len(lanes) - 1)
            for _ in pool.map(lambda lane, own: [step.run(own, printing) for step in lane], lanes, [*of_tests, environ]):
                pass
        seconds = time.monotonic() - began
        busy = (busy_seconds() - before) / (seconds * (os.cpu_count() or 1))
        return summary([hatch, *chain.from_iterable(lanes)], seconds, busy)
    finally:
        if not os.environ.get("CI_KEEP"):
            shutil.rmtree(HOME, ignore_errors=True)


def busy_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Return how long the processors have worked: those of the machine where it tells, else for what this process started.

    Ranks of tests are forked from servers that nobody waits for, so that what was started is known in part only.
    """
    try:
        user, nice, system, _idle, _waiting, *more = map(int, stat.read_text(encoding="ascii").splitlines()[0].split()[1:8])
    except (OSError, ValueError):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def summary(done: list[Step], seconds: float, busy: float) -> int:
    """Print each step's time, the slowest test files, what failed and the counts; return the exit status."""
    total, lines = suite.Report(), []
    for step in done:
        counts = ""
        if any(argument.startswith("--junitxml") for argument in step.command):
            found = suite.read(step.report)
            if step.state == "FAILED" and not found.failed:
                found.failed.append(f"{step.name}: failed outside of its tests")
            total.add(found)
            counts = str(found)
        elif step.state != "ok":
            total.failed.append(step.name)
        lines.append(f"{step.seconds:6.0f} s  {step.state:7} {step.name:30} {counts}".rstrip())
    slowest = sorted(total.seconds.items(), key=lambda entry: -entry[1])[:20]
    print("\n=== where the time went\n" + "\n".join(lines))
    print("\n=== the 20 slowest test files")
    print("\n".join(f"{spent:6.0f} s  {total.tests[file]:5} tests  {file}" for file, spent in slowest))
    # Whoever sees only the end of this output sees why a step failed.
    for step in (step for step in done if step.state == "FAILED"):
        last = step.output.splitlines()[-LAST_LINES:]
        print(f"\n=== the end of what {step.name} printed\n" + "\n".join(line[:300] for line in last))
    if total.failed:
        print("\n=== failed\n" + "\n".join(total.failed))
    print(f"\n{seconds:.0f} s in all, of {60 * MINUTES} on two cores; {busy:.0%} of the processors' time was used")
    print(f"{total.passed} passed, {len(total.failed)} failed, {total.skipped} skipped")
    return int(bool(total.failed) or any(step.state != "ok" for step in done))


if __name__ == "__main__":
    sys.exit(main())
