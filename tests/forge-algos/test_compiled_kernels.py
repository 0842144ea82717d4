"""forge's Triton kernels compile for the GPUs that they are for, to the machine's code, on a machine that has none of them."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compiled_kernels.py")


@pytest.mark.lane
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton, which comes with builds of torch for GPUs, is not installed: hatch run triton:test",
)
@pytest.mark.parametrize(
    "target",
    ["cuda 80 32", "cuda 90 32", "cuda 100 32", "hip gfx90a 64", "hip gfx942 64"],
    ids=["A100", "H200", "B200", "MI250", "MI300"],
)
def test_kernels_compile_and_keep_their_numbers_in_registers(target, tmp_path):
    """Each of 12 variants is code for the chip; what a thread has beyond its registers is 16 bytes at most."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *target.split()], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(line["kernel"] for line in found) == {"_score_row": 8, "_move": 4}
    assert all(line["bytes"] > 1000 and line["spilled"] <= 16 for line in found), found
