"""`forge.sft` in a program that has a process group of its own, as Ray Train's workers and notebooks have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ..ranks import run_on_ranks
from .starts import RUN, metrics, sft

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: dict[str, Any] = {**RUN, "max_steps": 3, "num_epochs": None}


def in_a_group(settings: dict[str, Any]) -> list[Any]:
    """Make a group, and run `forge.sft` twice in a thread, as Ray Train does; the second call finds the finished run."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group, found = dist.group.WORLD, []

    def train() -> None:
        found.extend(sft(settings)["steps"] for _ in range(2))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    total = torch.ones(1)
    dist.all_reduce(total)
    same = dist.group.WORLD is group
    dist.destroy_process_group()
    return [found, same, total.item()]


@pytest.mark.slow
def test_a_run_in_a_program_with_a_group(model_dir: Path, chats: Path, tmp_path: Path) -> None:
    """Two ranks of the program are two ranks of the run; losses are those of one process, and the group is whole afterwards."""
    settings = {**SETTINGS, "model_path": str(model_dir), "data_path": str(chats)}
    found = run_on_ranks(in_a_group, 2, {**settings, "ckpt_output_dir": str(tmp_path / "two")}, joined=False)
    assert found == [[[3, 3], True, 2.0]] * 2
    assert "ranks: 2" in (tmp_path / "two" / "log.txt").read_text()
    sft({**settings, "ckpt_output_dir": str(tmp_path / "one")})
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
