"""The Slurm array file of docs/data-shards.md prepares parts that merge into the store of one process."""

from __future__ import annotations

import filecmp
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import forge_data

from .repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "data-shards.md").read_text()
PARTS = 3


def command(folder: Path, name: str, script: str) -> None:
    """Put a command of a shell into a folder of PATH."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.mark.lane
def test_the_array_file_of_the_page(chats: Path, model_dir: Path, tmp_path: Path) -> None:
    """Run once for each SLURM_ARRAY_TASK_ID, then merged as the page says, it makes the very same files."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (merge,) = re.findall(r'--wrap "(forge data merge [^"]*)"', PAGE)
    (tmp_path / "bin").mkdir()
    command(tmp_path / "bin", "srun", 'exec "$@"')
    command(tmp_path / "bin", "forge", f'shift; exec {sys.executable} -m forge_data "$@"')
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "DATA": str(chats),
        "MODEL": str(model_dir),
        "SLURM_ARRAY_TASK_COUNT": str(PARTS),
        "SLURM_CPUS_PER_TASK": "1",
    }
    printed = [
        subprocess.run(
            ["bash", "-e", "-c", words],
            cwd=tmp_path,
            env=environment | {"SLURM_ARRAY_TASK_ID": str(part)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for part, words in [(part, script) for part in range(1, PARTS + 1)] + [(0, merge)]
    ]
    assert printed[1].startswith("part 2 of 3: chats.jsonl:9 to chats.jsonl:16\n")
    store = forge_data.prepare(chats, model_dir, tmp_path / "alone", progress=False)
    assert f"fingerprint {store.fingerprint}" in printed[-1]
    names = [path.name for path in store.path.iterdir() if path.is_file()]
    assert filecmp.cmpfiles(store.path, tmp_path / "store", names, shallow=False)[0] == names


def test_the_array_has_the_parts_of_the_page() -> None:
    """The count of the array file is the one that Ray's example has too."""
    assert "#SBATCH --array=1-16" in PAGE
    assert 'shard=f"{part}/16"' in PAGE
    assert "ray.data.range(16," in PAGE
