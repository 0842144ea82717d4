"""An elastic run whose nodes come and go: two network namespaces as hosts, a launcher killed, one preempted, both replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge

from .conftest import conversations, write_rows
from .starts import metrics
from .test_launched import SETTINGS, command, ended, hosts, losses, until  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.lane]


def node(host: str, settings: dict[str, Any], **more: str) -> subprocess.Popen[str]:
    """Start the launcher of a node in a namespace, as every other."""
    line = ("ip", "netns", "exec", host, sys.executable, "-m", "forge")
    return command(settings, *line, PET_NNODES="1:2", PET_RDZV_ENDPOINT="10.214.7.1:29400", PET_RDZV_ID="elastic", **more)


def sizes(run: Path) -> list[int]:
    """How many ranks each start had, from the log."""
    lines = (run / "log.txt").read_text().splitlines() if (run / "log.txt").exists() else []
    return [int(line.partition("  ranks: ")[2].partition(",")[0]) for line in lines if "  ranks: " in line]


def test_nodes_come_and_go(hosts: Any, hanging: Any, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Killed, added, preempted, replaced: each time the ranks that are there go on from the newest state, with equal losses."""
    variables, _ = hanging
    rows = write_rows(tmp_path / "rows.jsonl", conversations(96))
    given = {"model_path": str(model_dir), "data_path": str(rows), **SETTINGS, "num_epochs": 30}
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, "max_restarts": 5, "connect_seconds": 40, "keep_full_state": True}
    slowly = variables(0, 1, "slowly")
    (first, _), (second, _) = hosts
    nodes = [node(first, settings, **slowly), node(second, settings, **slowly)]
    told = []
    try:
        until(lambda: sizes(run) == [2] and len(metrics(run)) > 5, 240)
        nodes[1].kill()
        nodes[1].communicate()
        told.append(len(metrics(run)))
        until(lambda: sizes(run) == [2, 1] and len(metrics(run)) > told[-1] + 3, 240)
        nodes[1] = node(second, settings, **slowly)
        until(lambda: sizes(run) == [2, 1, 2] and len(metrics(run)) > told[-1] + 6, 240)
        nodes[1].terminate()
        status, _, err = ended(nodes[1], 240)
        assert status == 75, err
        told.append(len(metrics(run)))
        until(lambda: sizes(run) == [2, 1, 2, 1] and len(metrics(run)) > told[-1] + 3, 240)
        nodes[1] = node(second, settings, **slowly)
        for process in nodes:
            status, _, err = ended(process, 590)
            assert status == 0, err
    finally:
        for process in nodes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert sizes(run)[:4] == [2, 1, 2, 1]
    whole = forge.sft(**given, ckpt_output_dir=tmp_path / "whole").output_dir
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)
    assert [line["samples"] for line in metrics(run)] == [line["samples"] for line in metrics(whole)]
