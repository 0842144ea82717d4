"""Compiles forge's Triton kernels for a GPU that need not be there, and prints a line of JSON for each variant.

    python compiled_kernels.py cuda 90 32

The arguments are Triton's: backend, architecture, and lanes of a warp. Launches go as far as the machine's code and no further.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from forge_algos.losses import _likelihood_kernel, _score_rows
from forge_algos.optimizers import _adamw_8bit_kernel

HALVES = (torch.float32, torch.bfloat16)


class Absent:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target):
        self._target = target

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel):
    """Let launches of a kernel end when it is compiled; return the list of what they made."""
    run, made = kernel.run, []
    kernel.run = lambda *given, **flags: made.append(run(*given, **{**flags, "warmup": True}))
    return made


def launch_losses():
    """Launch the losses' kernel with and without weights and slopes, those in 32 bits and in 16."""
    for weighted, slope, dtype in itertools.product((True, False), (True, False), HALVES):
        logits, rows = torch.zeros(4, 128_256), [torch.zeros(4) for _ in range(4)]
        tensors = (logits, torch.zeros(4, dtype=torch.long), rows[0], logits.to(dtype), *rows[1:])
        flags = {"weighted": weighted, "slope": slope, "block": _score_rows._BLOCK, "warps": _score_rows._WARPS}
        _likelihood_kernel.launch(tensors, (0.0, 0.0, 0.0), **flags)


def launch_adamw():
    """Launch the optimizer's kernel with weights and gradients in 32 bits and in 16."""
    for weight, grad in itertools.product(HALVES, HALVES):
        numbers = [torch.zeros(4, 1000, dtype=dtype) for dtype in (weight, grad)]
        codes, scales, values = (
            tuple(torch.zeros(*size, dtype=dtype) for _ in range(2))
            for size, dtype in (((4, 1000), torch.uint8), ((4, 4), torch.float32), ((256,), torch.float32))
        )
        _adamw_8bit_kernel.launch(*numbers, codes, scales, values, (0.9, 0.99, 1e-8, 1e-3, 1.0, 1.0), (0, 1, 2))


def spilled(made):
    """Return the bytes that a thread keeps in memory for want of registers (AMD: the registers so kept)."""
    if "amdgcn" in made.asm:
        return sum(map(int, re.findall(r"_spill_count:\s+(\d+)", made.asm["amdgcn"])))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", shown)))


def main():
    backend, architecture, lanes = sys.argv[1:]
    target = GPUTarget(backend, int(architecture) if architecture.isdecimal() else architecture, int(lanes))
    driver.set_active(Absent(target))
    for kernel, launch in ((_likelihood_kernel._score_row, launch_losses), (_adamw_8bit_kernel._move, launch_adamw)):
        made = compile_only(kernel)
        launch()
        for each in made:
            code = each.asm["hsaco" if backend == "hip" else "cubin"]
            print(json.dumps({"kernel": each.metadata.name, "bytes": len(code), "spilled": spilled(each)}))


if __name__ == "__main__":
    main()
