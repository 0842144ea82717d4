"""Settings `kernels` and `compile` → a model of fused layers and compiled blocks."""

from __future__ import annotations

from typing import Any

import forge_accel
import forge_algos
from forge._progress import Reporter


def fuse_layers(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any], model: Any, report: Reporter) -> None:
    """Let layers compute by fused kernels, where those give the same as torch's own."""
    chosen = machine.kernels(s.device.kernels)
    if chosen.value is None:
        return
    report.note(f"kernels: {chosen.reason}")
    found = forge_accel.use_liger(model, dtype=dtype.value, device=machine.device.value)
    for layers in found:
        report.note(f"kernels: {layers.kind}: {layers.number} {layers.layers}: {layers.why}")
    if not any(layers.number for layers in found):
        report.note(f"WARNING: kernels={s.device.kernels} has no effect: no layer of this model is computed by them")


def compile_blocks(s: Any, machine: forge_accel.Accelerator, model: Any, report: Reporter) -> None:
    """Compile the repeated blocks of a model, where the settings ask for it."""
    chosen = machine.compiling(s.device.compile)
    if chosen.value is None:
        return
    # What nobody asked for is no warning when it cannot be had.
    by_itself = s.origins.get("compile", "").partition("chosen: ")[2]
    warning = "" if by_itself else "WARNING: "
    blocks = forge_algos.repeated_blocks(model)
    if not blocks:
        report.note(f"{warning}compile={s.device.compile} has no effect: no repeated blocks were found in this model")
        return
    report.note(f"compile: {f'blocks: {by_itself}' if by_itself else chosen.reason}")
    note = (lambda line: report.note(line.removeprefix("WARNING: "))) if by_itself else report.note
    forge_accel.CompiledBlocks(blocks, backend=chosen.value, note=note)
