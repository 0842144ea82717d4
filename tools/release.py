"""One package's release: `hatch run release NAME` checks it, builds it, and tests it beside what is released already.

Checks: the working tree is clean; `__version__` heads the CHANGELOG, which says something about it; the tag NAME-vVERSION is
free and follows the last one; the facade's declared range holds the versions that it would meet. Tests, with the facade's own
tests of the commit that the facade comes from: the new package beside the last released versions of the other five; and its
last released version beside the other five as they are here. "Last released" is the last tag `DISTRIBUTION-vX.Y.Z`. So each
package is released when it is ready, and no two need each other's release. It tags and uploads nothing; its last lines say how
to.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import environments
import suite
import wheels
from packaging.requirements import Requirement
from packaging.version import VERSION_PATTERN, Version
from repository import FACADE, LAWS, ROOT, Package, git, packages

NOT_OF_A_PAIR = (*LAWS, "tests/whole/test_doctests.py", "tests/whole/test_benchmarks.py")
"""Tests of the checkout, not of what is installed."""


def main(arguments: list[str]) -> int:
    """Check, build and test one package; return whether it may be released."""
    parser = argparse.ArgumentParser(
        prog="hatch run release", description=__doc__.splitlines()[0], epilog="Further arguments are pytest's: -m 'not slow'."
    )
    parser.add_argument("name", help="folder or distribution: forge-data, ..., forge")
    parser.add_argument("--check", action="store_true", help="neither build nor test")
    options, more = parser.parse_known_args(arguments)
    known = packages()
    try:
        package = next(package for package in known.values() if options.name in {package.folder, package.distribution})
    except StopIteration:
        parser.error(f"no package is called {options.name!r}: {', '.join(known)}")
    tag = f"{package.distribution}-v{package.version}"
    if wrong := problems(package):
        print(f"{tag} cannot be released:\n" + "\n".join(f"- {line}" for line in wrong))
        return 1
    print(f"{tag}: version, changelog, tag and ranges agree")
    if options.check:
        return 0
    wheel = wheels.build(package, ROOT / "dist" / tag)
    failed = test_beside_released(package, more)
    if failed:
        print(f"\n{tag} should not be released: {len(failed)} tests failed\n" + "\n".join(f"- {test}" for test in failed))
        return 1
    print(f"\nTo release it:\n  git tag {tag} && git push origin {tag}\n  hatch publish {wheel.parent.relative_to(ROOT)}")
    return 0


def problems(package: Package) -> list[str]:
    """Return why a package cannot be released as it is, if so."""
    root, tag = package.root, f"{package.distribution}-v{package.version}"
    found = []
    status = git("status", "--porcelain", root=root)
    if status is None:
        return ["git does not answer here: releases are tags of a git checkout"]
    if status:
        found.append("the working tree has uncommitted changes")
    heading, _, notes = (package.path / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].partition("\n")
    if heading.split()[:1] != [package.version]:
        found.append(f"__version__ is {package.version}, and CHANGELOG.md begins with {heading or 'no version'}")
    elif not notes.partition("\n## ")[0].strip():
        found.append(f"CHANGELOG.md says nothing about {package.version}")
    last = last_release(package)
    if git("rev-parse", "--verify", "--quiet", f"refs/tags/{tag}", root=root):
        found.append(f"the tag {tag} is there already")
    elif last and Version(package.version) <= Version(version_of(last)):
        found.append(f"{package.version} does not follow {last}")
    elif last and not (git("diff", "--name-only", last, "HEAD", "--", f"packages/{package.folder}", root=root) or "").strip():
        found.append(f"nothing in packages/{package.folder} differs from {last}")
    if package.folder == FACADE:
        found += apart(package, {other.distribution: other.version for other in packages(root).values()})
    return found


def last_release(package: Package) -> str | None:
    """Return the tag of the package's greatest released version; a tag that names no version is none of a release."""
    tags = (git("tag", "--list", f"{package.distribution}-v*", root=package.root) or "").split()
    releases = [tag for tag in tags if re.fullmatch(VERSION_PATTERN, version_of(tag), re.VERBOSE | re.IGNORECASE)]
    return max(releases, key=lambda tag: Version(version_of(tag)), default=None)


def version_of(tag: str) -> str:
    """Return the version that a tag names."""
    return tag.rpartition("-v")[2]


def apart(facade: Package, versions: dict[str, str]) -> list[str]:
    """Return which versions lie outside the facade's declared ranges, as sentences."""
    asked = {line.name: line for line in map(Requirement, facade.requirements) if line.name in versions}
    return [
        f"{facade.distribution} {facade.version} asks for {line}, not for {versions[name]}"
        for name, line in asked.items()
        if not line.specifier.contains(versions[name], prereleases=True)
    ]


def test_beside_released(package: Package, more: Sequence[str]) -> list[str]:
    """Test the new package beside the released others, and the other way round, with `more` for pytest; return what failed."""
    here = packages(package.root)
    if last_release(here[FACADE]) is None:
        name = here[FACADE].distribution
        print(f"Nothing to test it beside: {name} was never released, for no tag is called {name}-vX.Y.Z")
        return []
    failed = []
    with tempfile.TemporaryDirectory(prefix="forge-release-") as scratch:
        folder = Path(scratch)
        sources = {name: released_source(other, folder / "released" / name) for name, other in here.items()}
        released = {name: source for name, source in sources.items() if source.path.is_dir()}
        pairs = {"new beside released": released | {package.folder: package}}
        if package.folder in released:
            pairs["released beside new"] = here | {package.folder: released[package.folder]}
        else:
            print(f"No release beside which the others are tested: {package.distribution} is in no tag")
        for title, mixed in pairs.items():
            versions = {other.distribution: other.version for other in mixed.values()}
            print(f"\n=== {title}: {', '.join(' '.join(pair) for pair in versions.items())}", flush=True)
            if reasons := apart(mixed[FACADE], versions):
                print("They never meet, for pip does not install them together: " + "; ".join(reasons))
            else:
                failed += [f"{title}: {test}" for test in tested(mixed, folder / title.replace(" ", "-"), more)]
    return failed


def released_source(package: Package, folder: Path) -> Package:
    """Lay out the commit of a package's last release in `folder`; one that never was comes from the facade's last release.

    A package that is newer than that is not in it.
    """
    tag = last_release(package) or last_release(packages(package.root)[FACADE])
    done = subprocess.run(["git", "archive", "--format=tar", str(tag)], cwd=package.root, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Package(package.folder, folder)


def tested(mixed: dict[str, Package], folder: Path, more: Sequence[str]) -> list[str]:
    """Install six packages of several commits as wheels, run the facade's tests of its commit, return what failed."""
    requirements = []
    for package in mixed.values():
        out = folder / "wheels" / package.folder
        run = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(package.path)]
        environments.run(*run, quiet=True)
        (wheel,) = out.glob("*.whl")
        requirements.append(f"{wheel}{package.extras}")
    python = environments.make(folder, *requirements, f"torch=={environments.pins()['torch']}", *environments.RUNNERS)
    paths = ["tests/forge", "tests/whole", *(f"--ignore={path}" for path in NOT_OF_A_PAIR)]
    arguments = [*suite.TWO_PROCESSES, *paths, *more]
    report, root = folder / "report.xml", mixed[FACADE].root
    found = suite.run(str(python), *arguments, report=report, environ=environments.clean(), root=root)
    print(found)
    return found.failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
