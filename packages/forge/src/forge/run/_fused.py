"""Settings `kernels` and `compile` → fused layers, compiled blocks, and what the log says."""

from __future__ import annotations

from typing import Any

import forge_accel
import forge_algos
import forge_dist
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


def compile_blocks(s: Any, machine: forge_accel.Accelerator, model: Any, report: Reporter) -> forge_accel.CompiledBlocks | None:
    """Compile the repeated blocks of a model, where the settings ask for it.

    Returns:
        The blocks; None where none are compiled.

    """
    chosen = machine.compiling(s.device.compile)
    if chosen.value is None:
        return None
    # What nobody asked for is no warning when it cannot be had.
    by_itself = s.origins.get("compile", "").partition("chosen: ")[2]
    warning = "" if by_itself else "WARNING: "
    blocks = forge_algos.repeated_blocks(model)
    if not blocks:
        report.note(f"{warning}compile={s.device.compile} has no effect: no repeated blocks were found in this model")
        return None
    report.note(f"compile: {f'blocks: {by_itself}' if by_itself else chosen.reason}")
    note = (lambda line: report.note(line.removeprefix("WARNING: "))) if by_itself else report.note
    # Nobody else has had the model: what hooks its layers have are a wrapper's.
    return forge_accel.CompiledBlocks(blocks, backend=chosen.value, note=note, own_hooks=True)


class StepsMade:
    """What follows from the steps of a run, once they are made.

    After the first one, in which blocks were tried, ranks agree on whether they run compiled. The kernels that forge has of its
    own are told as they are first asked for.
    """

    def __init__(self, strategy: forge_dist.Strategy, report: Reporter) -> None:
        self._strategy, self._report, self._told = strategy, report, set[str]()
        self.compiled: forge_accel.CompiledBlocks | None = None
        """Blocks that ranks have to agree on."""
        forge_algos.asked_kernels()  # by a former run of this process

    def made(self) -> None:
        """Tell what a step has shown; *collective*."""
        if self.compiled is not None:
            self.compiled.agree(self._problem_of_all)
            self.compiled = None
        found = [line for line in map(str, forge_algos.asked_kernels()) if line not in self._told]
        if found:
            self._told.update(found)
            self._report.note(f"kernels: {'; '.join(found)}")

    def _problem_of_all(self, problem: str | None) -> str | None:
        """Return the problem of the first rank that has one, with its number."""
        found = self._strategy.ranks.gather(problem)
        return next((f"{why} (rank {rank})" for rank, why in enumerate(found) if why is not None), None)
