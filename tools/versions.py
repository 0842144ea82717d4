"""The suite at one end of the declared ranges: `hatch run matrix:lowest` and `hatch run matrix:newest`.

Lowest is the greatest lower bound that the six packages declare for each dependency, as a constraints file; where one of these,
at its own lowest, asks for a higher one, that. Newest is what pip finds by itself. torch is pinned at both ends to a build
without CUDA (`--torch`, by default the one that hatch.toml pins): an open range brings gigabytes of CUDA packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import environments
import lane
import suite
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository import LANES, RESULTS, Package, packages

TITLE = "Tests at both ends of the declared ranges"


def main(arguments: list[str]) -> int:
    """Install one end of the ranges, run what is not done yet, write the section; return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run matrix:lowest", description=__doc__.splitlines()[0])
    parser.add_argument("end", choices=["lowest", "newest"])
    parser.add_argument("--fresh", action="store_true", help="install anew and repeat what an interrupted lane had done")
    parser.add_argument(
        "--torch", default=environments.pins()["torch"], help="version of torch, of which pip finds a CPU build"
    )
    options = parser.parse_args(arguments)
    folder = LANES / f"versions-{options.end}"
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    constraints, raised = {}, {}
    if options.end == "lowest":
        constraints, raised = reachable(floors(packages()) | {"torch": Version(options.torch)})
    python = environment(folder, {name: str(version) for name, version in constraints.items()} | {"torch": options.torch})
    state = lane.Lane(f"versions-{options.end}", fresh=options.fresh)
    cases = {}
    # Old libraries warn of their own use of a torch that is younger than they are; that is no fault of these packages.
    warnings = ["-W", "default"] if options.end == "lowest" else []
    for part in (*packages(), "whole", "tools"):
        arguments = [str(python), f"tests/{part}", *warnings, *suite.TWO_PROCESSES]
        cases[part] = partial(lane.tests, *arguments, environ=environments.clean(), report=folder / f"{part}.xml")
    state.run(cases)
    results = {part: state.done[part] for part in cases}
    write(options.end, report(declared(packages()), environments.installed(python), raised, results))
    return int(any(result["failed"] for result in results.values()))


def requirements(package: Package) -> list[Requirement]:
    """Return what a package declares for this Python, other packages of the repository aside."""
    parsed = [Requirement(line) for line in package.requirements]
    own = {other.distribution for other in packages(package.root).values()}
    return [line for line in parsed if line.name not in own and (line.marker is None or line.marker.evaluate())]


def floors(known: dict[str, Package]) -> dict[str, Version]:
    """Return the greatest lower bound of each dependency over all packages; one without a bound is refused."""
    found: dict[str, Version] = {}
    for package in known.values():
        for line in requirements(package):
            bounds = [Version(part.version) for part in line.specifier if part.operator in {">=", "==", "~="}]
            if not bounds:
                raise SystemExit(f"packages/{package.folder}/pyproject.toml: {line} has no lower bound")
            name = canonicalize_name(line.name)
            found[name] = max([*bounds, *([found[name]] if name in found else [])])
    return dict(sorted(found.items()))


def reachable(bounds: dict[str, Version]) -> tuple[dict[str, Version], dict[str, str]]:
    """Return bounds that can be installed together, and why some are higher than declared.

    Each dependency's own metadata, at its bound, is asked what it needs of the others; a raised one is asked again. torch stays
    as it is.
    """
    bounds, raised = dict(bounds), {}
    while True:
        higher = {}
        for asking, lines in metadata(bounds).items():
            for line in map(Requirement, lines):
                name = canonicalize_name(line.name)
                if name not in bounds or name == "torch" or (line.marker and not line.marker.evaluate({"extra": ""})):
                    continue
                needed = [Version(part.version) for part in line.specifier if part.operator in {">=", "==", "~="}]
                if needed and max(needed) > max(bounds[name], higher.get(name, bounds[name])):
                    higher[name] = max(needed)
                    raised[name] = f"{asking} {bounds[asking]} asks for {max(needed)}"
        if not higher:
            return bounds, raised
        bounds |= higher


def metadata(bounds: dict[str, Version]) -> dict[str, list[str]]:
    """Return what each dependency requires at a version: name → lines of its metadata."""
    wanted = [f"{name}=={version}" for name, version in bounds.items()]
    only = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"]
    printed = environments.run(sys.executable, "-m", "pip", "install", *only, *wanted, quiet=True)
    found = [entry["metadata"] for entry in json.loads(printed)["install"]]
    return {canonicalize_name(entry["name"]): entry.get("requires_dist", []) for entry in found}


def declared(known: dict[str, Package]) -> dict[str, str]:
    """Return each dependency's declared ranges, with the packages that declare them."""
    found: dict[str, dict[str, list[str]]] = {}
    for package in known.values():
        for line in requirements(package):
            ranges = found.setdefault(canonicalize_name(line.name), {})
            folders = ranges.setdefault(str(line.specifier), [])
            if package.folder not in folders:
                folders.append(package.folder)
    return {
        name: "; ".join(f"`{text}` {', '.join(folders)}" for text, folders in ranges.items()) for name, ranges in found.items()
    }


def environment(folder: Path, constraints: dict[str, str]) -> Path:
    """Make a virtual environment of the six packages, editable, with all extras; return its Python.

    One that was made from the same requirements is used again.
    """
    members = [f"-e{package.path}{package.extras}" for package in packages().values()]
    lines = [f"{name}=={version}" for name, version in sorted(constraints.items())]
    wanted = "\n".join([*lines, *(line for package in packages().values() for line in package.requirements), sys.version])
    stamp, python = folder / "requirements.sha256", folder / "venv" / "bin" / "python"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    constraining = folder / "constraints.txt"
    folder.mkdir(parents=True, exist_ok=True)
    constraining.write_text("\n".join(lines) + "\n", encoding="utf-8")
    environments.make(folder, *members, *environments.RUNNERS, constraints=constraining)
    stamp.write_text(digest)
    return python


def report(ranges: dict[str, str], tested: dict[str, str], raised: dict[str, str], results: dict[str, lane.Result]) -> str:
    """Return a section's text: what was installed, what passed, what failed."""
    rows = [[name, ranges[name], tested.get(name, "not installed"), raised.get(name, "")] for name in sorted(ranges)]
    text = lane.table(["dependency", "declared", "tested", "higher than declared, for"], rows)
    text += "\ntorch is the build without CUDA that was at hand.\n\n"
    rows = [[f"tests/{part}", str(result["passed"]), str(len(result["failed"]))] for part, result in results.items()]
    text += lane.table(["tests", "passed", "failed"], rows)
    failed = [f"- `{test}`" for result in results.values() for test in result["failed"]]
    return text + ("\nFailed:\n\n" + "\n".join(failed) + "\n" if failed else "")


def write(end: str, section: str, home: Path = RESULTS) -> None:
    """Put one end's section into the page and leave the other's as it is."""
    path = home / "versions.md"
    page = path.read_text(encoding="utf-8") if path.is_file() else f"# {TITLE}\n\n{__doc__.partition(chr(10) * 2)[2]}"
    section = f"## {end}\n\n{lane.origin(f'hatch run matrix:{end}')}\n\n{section}"
    without = re.sub(rf"^## {end}$.*?(?=^## |\Z)", "", page, flags=re.MULTILINE | re.DOTALL).rstrip()
    home.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{without}\n\n{section.rstrip()}\n", encoding="utf-8")
    print(f"\n{section}\n{path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
