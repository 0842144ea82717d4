"""`--dry-run --cluster`: the nodes of a run meet and are compared before any of them trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge
from forge.cli._app import main
from forge.run._preflight import _faults, preflight
from forge.settings._recipe import read_recipe
from forge.settings._settings import resolve

from .fake_clusters import environment, free_port

ALIKE: dict[str, Any] = {
    "host": "a",
    "seen": True,
    "versions": {"forge": "1", "torch": "2"},
    "devices": 8,
    "processes": 8,
    "missing": [],
}


@pytest.fixture
def recipe(model_dir: Path, chats: Path, tmp_path: Path) -> Path:
    """A recipe of three steps."""
    file = tmp_path / "recipe.yaml"
    settings = {
        "effective_batch_size": 8,
        "max_steps": 3,
        "connect_seconds": 30,
        "ckpt_output_dir": str(tmp_path / "runs" / "one"),
    }
    file.write_text(yaml.safe_dump({"model_path": str(model_dir), "data_path": str(chats), **settings}))
    return file


@pytest.mark.slow
def test_one_node_is_checked_too(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what the dry run says, and leaves nothing behind."""
    assert main(["sft", str(recipe), "--dry-run", "--cluster"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cluster: 1 node (")
    assert "forge sft would write" in out
    assert sorted(entry.name for entry in recipe.parent.iterdir()) == ["recipe.yaml"]
    assert "cluster: 1 node" in forge.dry_run(forge.sft, recipe, cluster=True)


def test_what_it_needs(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--dry-run beside it, a process a node, and nodes with numbers."""
    assert main(["sft", str(recipe), "--cluster"]) == 2
    assert "give --dry-run with it" in capsys.readouterr().err
    assert main(["sft", str(recipe), "--dry-run", "--cluster", "--nnodes", "1:2", "--rdzv-endpoint", "h:1"]) == 2
    assert "needs nodes with numbers" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["sft", str(recipe), "--dry-run", "--cluster"]) == 2
    assert "one process on each node" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_is_an_error(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run refuses it, alone and on a cluster, with the figures and what to set, as the run itself does."""
    monkeypatch.setattr("forge.saving._room.shutil.disk_usage", lambda _: type("Usage", (), {"free": 3})())
    for words in (["--dry-run"], ["--dry-run", "--cluster"], []):
        assert main(["sft", str(recipe), *words]) == 2
        assert "has less room than the run takes: at least 0." in (printed := capsys.readouterr().err)
        # One state is saved surely: to keep one helps nothing.
        assert "take less (--save-dtype bfloat16)" in printed


def test_memory_that_does_not_suffice_is_an_error_where_it_is_known(recipe: Path) -> None:
    """With `--for` the plan is for the devices that will train; what a container without accelerators sees is none of them."""
    s = resolve(forge.sft.task.settings, ("recipe", read_recipe(recipe)))
    lacks = forge.DryRun("forge sft would write", {"fits": False, "phases": []})
    with pytest.raises(forge.SettingsError, match="would not fit into memory"):
        preflight(forge.sft.task, s, lambda: lacks, for_others=True)
    found = preflight(forge.sft.task, s, lambda: lacks)
    assert "would write" in found
    assert (found.fits, found.memory) == (False, lacks.memory)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({}, ""),
        ({"seen": False}, "node 1 (b) does not see what node 0 wrote for"),
        ({"missing": ["/data/x.jsonl"]}, "node 1 (b) has no /data/x.jsonl"),
        ({"processes": 4}, "would start 4 processes and node 0 8"),
        ({"devices": 4}, "has 4 accelerators for 8 processes"),
        ({"devices": 0}, "has 0 accelerators and node 0 has 8"),
        ({"versions": {"forge": "1", "torch": "3"}}, "has torch 3 and node 0 has 2"),
    ],
)
def test_what_differs_is_named(other: dict[str, Any], named: str) -> None:
    """Each difference is a line, with the node, its host, and what to do."""
    lines = list(_faults(1, {**ALIKE, "host": "b", **other}, ALIKE, Path("/runs/one")))
    assert (named in lines[0] and len(lines) == 1) if named else lines == []


@pytest.mark.slow
@pytest.mark.lane
def test_two_nodes_meet_and_answer_alike(recipe: Path, tmp_path: Path) -> None:
    """Both print the plan for all four ranks; bad rows end both, a node that does not come ends the other with 1."""

    def start(node: int, port: int, *words: str) -> subprocess.Popen[str]:
        env = {
            "PET_NNODES": 2,
            "PET_NPROC_PER_NODE": 2,
            "PET_NODE_RANK": node,
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
        }
        line = [sys.executable, "-m", "forge", "sft", str(recipe), "--dry-run", "--cluster", *words]
        return subprocess.Popen(
            line, env=environment(tmp_path, **env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    port = free_port()
    nodes = [start(node, port) for node in range(2)]
    answers = [node.communicate(timeout=480) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert "cluster: 2 nodes" in answers[0][0]
    assert "on each of 4 ranks" in answers[0][1]

    (tmp_path / "broken.jsonl").write_text('{"messages": 3}\n')
    port = free_port()
    nodes = [start(node, port, "--data-path", str(tmp_path / "broken.jsonl")) for node in range(2)]
    errors = [node.communicate(timeout=480)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 1], errors
    assert all("broken.jsonl:1" in error for error in errors)

    alone = start(0, free_port(), "--connect-seconds", "3")
    _, error = alone.communicate(timeout=480)
    assert (alone.returncode, "rank 1 of 2 did not come" in error) == (1, True), error
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["broken.jsonl", "recipe.yaml"]
