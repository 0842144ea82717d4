"""Requirements → a virtual environment that holds them, outside of hatch's: for tools that install what hatch would not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import bytecode
from packaging.utils import canonicalize_name
from repository import ROOT

RUNNERS = ("pytest>=9,<10", "pytest-xdist", "hypothesis", "psutil")
"""What runs the tests; no package declares it."""


def make(folder: Path, *requirements: str, constraints: Path | None = None) -> Path:
    """Make a virtual environment in `folder`/venv; return its Python."""
    print(f"installing into {folder / 'venv'}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    bounds = ["-c", str(constraints)] if constraints else []
    run(*_pip(python), "install", "--quiet", *bounds, *requirements)
    # What the tests' environment has compiled of the same packages; where there is none, Python compiles what is imported.
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    bytecode.reuse(bytecode.beside("all"), Path(sysconfig.get_path("purelib", "venv", paths)))
    return python


def _pip(python: Path) -> tuple[str, ...]:
    """Return the command of this environment's pip for another one, which needs none of its own."""
    return sys.executable, "-m", "pip", "--python", str(python)


def installed(python: Path) -> dict[str, str]:
    """Return what an environment holds beside pip: distribution → version."""
    found = json.loads(run(*_pip(python), "list", "--format=json", quiet=True))
    return {canonicalize_name(entry["name"]): entry["version"] for entry in found if entry["name"] not in {"pip", "setuptools"}}


def pins() -> dict[str, str]:
    """Return what hatch.toml pins in its environment of everything: distribution → version."""
    lines = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]["all"]["dependencies"]
    return dict(line.split("==") for line in lines if "==" in line)


def run(*command: str, folder: Path | None = None, quiet: bool = False) -> str:
    """Run a command outside of the checkout, or in a folder; end where it fails. Return what it printed if `quiet`."""
    cwd = folder or Path(sys.prefix)
    done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=quiet, text=True, check=False)
    if done.returncode:
        print(done.stdout or "", done.stderr or "", end="", flush=True)
        raise SystemExit(f"exit status {done.returncode}: {' '.join(command[:8])}")
    return done.stdout or ""


def clean() -> dict[str, str]:
    """Return the environment's variables without the paths of this Python, and without the hub."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HF_HUB_OFFLINE": "1", "PIP_COMPILE": "0"}
