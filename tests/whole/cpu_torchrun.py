"""A `torchrun` for tests: one process on the CPU, in which a library that asks for CUDA finds gloo instead.

`python cpu_torchrun.py --nnodes=1 ... SCRIPT ARGUMENTS` runs mini_trainer's train.py with what makes the process group and the
device mesh replaced, and two counters of memory. instructlab-training's loop is not run: its own logger writes two made-up
steps, and its arguments and a copy of the model are left.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any


def mini_trainer(script: str) -> None:
    """Run mini_trainer's own loop."""
    import torch
    from mini_trainer import setup_model_for_training, utils

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TESTING="true")
    made: Any = setup_model_for_training.init_device_mesh
    utils.init_distributed_environment = lambda: torch.distributed.init_process_group("gloo")
    setup_model_for_training.init_device_mesh = lambda _kind, *rest, **more: made("cpu", *rest, **more)
    torch.cuda.reset_peak_memory_stats = lambda *_: None
    torch.cuda.max_memory_allocated = lambda *_: 0
    runpy.run_path(script, run_name="__main__")


def instructlab(arguments: dict[str, str]) -> None:
    """Log steps through instructlab-training's own logger."""
    import logging

    from instructlab.training.logger import propagate_package_logs, setup_metric_logger

    propagate_package_logs(True)
    out = Path(arguments["output_dir"])
    setup_metric_logger(str(out))
    metrics = logging.getLogger("instructlab.training.metrics")
    metrics.info(arguments, extra={"hparams": True})
    for step in (1, 2):
        # The names of main_ds.py in 0.16.2.
        figures = {"epoch": 0, "step": step, "rank": 0, "overall_throughput": 3.5, "lr": 1e-3 / step, "cuda_mem_allocated": 0.5}
        figures |= {"cuda_malloc_retries": 0, "num_loss_counted_tokens": 40, "num_tokens_rank0": 160, "batch_size": 4}
        figures |= {"num_minibatches": 1, "avg_loss": 6.0 / step, "samples_seen": 4 * step, "gradnorm": None}
        metrics.info({**figures, "total_samples": 8, "num_epoch_steps": 2}, extra={"step": step})
    (out / "arguments.json").write_text(json.dumps(arguments))
    shutil.copytree(arguments["model_name_or_path"], out / "hf_format" / "last_epoch")
    # Its logger writes in a thread that it never waits for.
    time.sleep(1)


if __name__ == "__main__":
    words = sys.argv[1:]
    place = next(number for number, word in enumerate(words) if word.endswith(".py"))
    sys.argv = words[place:]
    if words[place].endswith("main_ds.py"):
        instructlab({name: value or "true" for name, _, value in (word[2:].partition("=") for word in words[place + 1 :])})
    else:
        mini_trainer(words[place])
