"""The repository as its tools see it: packages and what they declare, laws, and what git says about the working tree."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FACADE = "forge"
LANES = ROOT / ".lanes"
"""Where lanes keep their state and their environments; git ignores it."""
RESULTS = ROOT / "docs" / "lanes"
"""Where lanes write their dated results, which are committed."""

LAWS = tuple(
    f"tests/whole/test_{name}.py"
    for name in ("laws", "layers", "public_api", "settings_laws", "error_laws", "environments", "pages")
)
"""Tests that read the repository itself: any change may break them, and they are quick."""


@dataclass(frozen=True)
class Package:
    """One folder of packages/."""

    folder: str
    root: Path = ROOT

    @property
    def path(self) -> Path:
        """The package's folder."""
        return self.root / "packages" / self.folder

    @cached_property
    def project(self) -> dict[str, Any]:
        """The `[project]` table of its pyproject.toml."""
        return tomllib.loads((self.path / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    @property
    def distribution(self) -> str:
        """Name on PyPI and in tags: the facade's folder is `forge`, its distribution `forge-llm`."""
        return str(self.project["name"])

    @property
    def import_name(self) -> str:
        """Name that Python imports."""
        return self.folder.replace("-", "_")

    @property
    def version(self) -> str:
        """`__version__` of its `__init__.py`."""
        text = (self.path / "src" / self.import_name / "__init__.py").read_text(encoding="utf-8")
        found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
        if not found:
            raise SystemExit(f"packages/{self.folder}: no __version__ in its __init__.py")
        return found[1]

    @property
    def extras(self) -> str:
        """Its extras as pip takes them behind a path, such as `[s3,zst]`; empty where it has none."""
        names = ",".join(self.project.get("optional-dependencies", {}))
        return f"[{names}]" if names else ""

    @property
    def requirements(self) -> list[str]:
        """What it declares, its extras' requirements included."""
        extras = self.project.get("optional-dependencies", {})
        return [*self.project["dependencies"], *(line for lines in extras.values() for line in lines)]


def packages(root: Path = ROOT) -> dict[str, Package]:
    """Return the packages of a checkout by folder name, the facade last."""
    folders = sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))
    return {folder: Package(folder, root) for folder in sorted(folders, key=lambda folder: folder == FACADE)}


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Return what a git command prints, or None where it fails or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def fingerprint(root: Path = ROOT) -> str:
    """Return a digest of what results follow from: the index, unstaged changes, untracked files."""
    folders = ("packages", "tests", "tools", "examples", "benchmarks/*.py", "hatch.toml", "pytest.ini")
    digest = hashlib.sha256()
    digest.update((git("ls-files", "--stage", "--", *folders, root=root) or "").encode())
    digest.update((git("diff", "--binary", "--", *folders, root=root) or "").encode())
    for name in (git("ls-files", "--others", "--exclude-standard", "-z", "--", *folders, root=root) or "").split("\0"):
        if name:
            digest.update(name.encode() + b"\0" + (root / name).read_bytes())
    return digest.hexdigest()[:16]


def commit(root: Path = ROOT) -> str:
    """Return the short name of the commit, marked where the working tree differs from it."""
    name = (git("rev-parse", "--short", "HEAD", root=root) or "unknown").strip()
    return f"{name} with uncommitted changes" if (git("status", "--porcelain", root=root) or "").strip() else name
