"""An elastic run whose nodes come and go: two network namespaces as hosts, a launcher killed, one preempted, both replaced."""

from __future__ import annotations

import signal
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


def newest(run: Path) -> tuple[int, int]:
    """How many ranks the newest start has, and how many steps it made, from the log."""
    text = (run / "log.txt").read_text() if (run / "log.txt").exists() else ""
    _, found, rest = text.rpartition("  ranks: ")
    return (int(rest.partition(",")[0]), rest.count("  step ") - rest.count("  step 1 of ")) if found else (0, 0)


def test_nodes_come_and_go(hosts: Any, hanging: Any, model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """Killed, added, preempted, replaced: each time the ranks that are there go on from the newest state, with equal losses."""
    variables, quickly = hanging
    rows = write_rows(tmp_path / "rows.jsonl", conversations(96))
    given = {"model_path": str(model_dir), "data_path": str(rows), **SETTINGS, "num_epochs": 16, "learning_rate": 1e-4}
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": run, "max_restarts": 5, "connect_seconds": 120}
    slowly = variables(0, 1, "slowly")
    (first, _), (second, _) = hosts
    nodes = [node(first, settings, **slowly), node(second, settings, **slowly)]

    def until_there_are(ranks: int) -> None:
        """Wait for five steps that so many ranks made; who comes late at the start is a change of its own."""

        def made() -> bool:
            for process in nodes:
                assert process.poll() in (None, -signal.SIGKILL), process.communicate()[1]
            return newest(run)[0] == ranks and newest(run)[1] >= 5

        until(made, 900)

    try:
        until_there_are(2)
        nodes[1].kill()
        nodes[1].communicate()
        until_there_are(1)
        nodes[1] = node(second, settings, **slowly)
        until_there_are(2)
        nodes[1].terminate()
        status, _, err = ended(nodes[1], 240)
        assert status == 75, err
        nodes.pop()
        until_there_are(1)
        nodes.append(node(second, settings, **slowly))
        until_there_are(2)
        quickly.touch()
        for process in nodes:
            status, _, err = ended(process, 900)
            assert status == 0, err
    finally:
        for process in nodes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    whole = forge.sft(**given, ckpt_output_dir=tmp_path / "whole").output_dir
    # One rank and two add in different orders, and each step starts from what the others left: the difference grows.
    np.testing.assert_allclose(losses(run)[:60], losses(whole)[:60], rtol=1e-5)
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-4)
    assert [line["samples"] for line in metrics(run)] == [line["samples"] for line in metrics(whole)]
