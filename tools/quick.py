"""A first look at a change: `hatch run quick [PACKAGE ...] [pytest's arguments]`.

Runs, for the packages that are named or that differ from main, every test that is marked neither `slow` nor `lane`, with ten
examples a Hypothesis test, in two processes; and always the laws. It replaces no full run: `hatch run test`, as CI, runs
all but the lanes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import suite
from repository import FACADE, LAWS, ROOT, git, packages

SHARED = ("tests/ranks.py", "tests/lanes.py", "tests/conftest.py", "pytest.ini", "hatch.toml")
"""What every package's tests depend on."""
OF_THE_FACADE = ("tests/whole/", "examples/", "benchmarks/")
QUICK = ["-m", "not slow and not lane", "--hypothesis-profile=quick"]
"""pytest's arguments that select the tests and lower their examples."""
TOOLS = ("tools/", "tests/tools/", ".ci/")


def main(arguments: list[str]) -> int:
    """Choose the tests, say why, run them."""
    known = packages()
    named = []
    while arguments and arguments[0] in known:
        named.append(arguments.pop(0))
    if named:
        chosen, why = tests_of(set(named)), "named: " + ", ".join(named)
    else:
        base, meaning = base_of_change()
        chosen, why = tests_for(None if base is None else changed_since(base), set(known), meaning)
    print(f"{why}\n{' '.join(chosen)}\n", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", *QUICK, *suite.TWO_PROCESSES]
    command += ["--durations=8", "--durations-min=2", *chosen, *arguments]
    with suite.temporary_folder() as variables:
        status = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode
    print(f"{time.monotonic() - began:.0f} s. A test that takes seconds here is marked `slow`, or made faster.")
    return status


def base_of_change(root: Path = ROOT) -> tuple[str | None, str]:
    """Return the commit that the working tree is compared with, and a sentence that says which it is.

    On a branch it is where the branch left main: the local main or origin's, whichever is nearer, for a local one may be old.
    On main itself it is origin's main, and without one the last commit. Without a main there is none.
    """
    if git("rev-parse", "HEAD", root=root) is None:
        return None, "No commit to compare with, so every package runs."
    branch = (git("rev-parse", "--abbrev-ref", "HEAD", root=root) or "").strip()
    nearest = None
    for name in ("main", "origin/main"):
        if name == branch or git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", root=root) is None:
            continue
        base = (git("merge-base", "HEAD", name, root=root) or "").strip()
        if base:
            distance = int(git("rev-list", "--count", f"{base}..HEAD", root=root) or 0)
            nearest = min(nearest or (distance, base, name), (distance, base, name))
    if nearest:
        return nearest[1], f"Compared with {nearest[2]} ({nearest[1][:9]})"
    if branch == "main":
        return "HEAD", "Compared with the last commit of main"
    return None, "This clone has no main to compare with (git fetch origin main brings it), so every package runs."


def changed_since(base: str, root: Path = ROOT) -> list[str]:
    """Return the paths that differ between a commit and the working tree: committed, staged, unstaged and untracked."""
    differing = git("diff", "--name-only", "--no-renames", "-z", base, root=root) or ""
    untracked = git("ls-files", "--others", "--exclude-standard", "-z", root=root) or ""
    return sorted({path for path in (differing + untracked).split("\0") if path})


def tests_for(changed: list[str] | None, known: set[str], meaning: str) -> tuple[list[str], str]:
    """Return which tests a change needs, and a sentence that says why; None stands for an unknown change."""
    if changed is None:
        return tests_of(known), meaning
    if shared := [path for path in changed if path in SHARED]:
        return tests_of(known), f"{meaning}, {shared[0]} differs, so every package runs."
    touched = {FACADE for path in changed if path.startswith(OF_THE_FACADE)}
    touched |= {parts[1] for path in changed if (parts := path.split("/"))[0] in {"packages", "tests"} and parts[1] in known}
    more = [folder for folder, own in (("tests/tools", TOOLS), ("tests/peers", ("tests/peers/",))) if any_below(changed, own)]
    names = [*sorted(touched), *(folder.removeprefix("tests/") for folder in more)]
    return tests_of(touched, *more), f"{meaning}, these differ: {', '.join(names) or 'no package'}."


def any_below(paths: list[str], prefixes: tuple[str, ...]) -> bool:
    """Return whether one of the paths lies below one of the prefixes."""
    return any(path.startswith(prefixes) for path in paths)


def tests_of(touched: set[str], *more: str) -> list[str]:
    """Return the test folders of packages; the facade's include tests/whole, and the laws always run."""
    folders = [*(f"tests/{folder}" for folder in sorted(touched)), *more]
    return [*folders, *(["tests/whole"] if FACADE in touched else LAWS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
