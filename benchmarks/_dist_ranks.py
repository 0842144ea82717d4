"""Several gloo ranks on this machine: one script in a process for each, and the JSON line that each prints."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def run_ranks(script: str, world_size: int, *arguments: str) -> list[dict[str, Any]]:
    """Run `script` with `arguments` on `world_size` ranks; return the JSON line that each printed, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(world_size):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        started.append(subprocess.Popen([sys.executable, script, *arguments], env=environ, stdout=subprocess.PIPE, text=True))
    try:
        printed = [process.communicate(timeout=1800)[0] for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in started):
        raise SystemExit(f"ranks ended with {[process.returncode for process in started]}")
    return [json.loads(text.strip().splitlines()[-1]) for text in printed]


@contextmanager
def joined() -> Iterator[Any]:
    """Connect a rank with the others, for the block."""
    import torch

    import forge_dist

    with forge_dist.join(forge_dist.topology(forge_dist.LaunchSettings())) as ranks:
        ranks.connect("gloo", torch.device("cpu"))
        yield ranks
