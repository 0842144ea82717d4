"""End of a run whose steps another library made: the export, and the result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import forge_accel
import forge_algos
import forge_dist
from forge._counted import counted
from forge._progress import Reporter
from forge._result import RunResult, write_result
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.saving._hashes import hash_export, record_hashes
from forge.tasks._task import Task


def export_trained(
    task: Task,
    s: Any,
    out: RunDirectory | NoDirectory,
    adaptation: forge_algos.Adaptation,
    tokenizer: Any,
    strategy: forge_dist.Strategy,
    train: Any,
    name: str,
    report: Reporter,
) -> Path:
    """Write the model, load it back and compare it with the one in memory."""
    directory = out.path / "hf_format" / name
    report.doing(f"exporting {name} and loading it back")
    stored = forge_dist.base_dtype(s.model.model_path, task=task.model_task(s))
    asked = s.checkpoints.save_dtype
    dtype = None if adaptation.writes != "model" else stored if asked is None else getattr(forge_accel, asked)
    as_plain: Any = {"without": (*task.extra_modules, *adaptation.additions), "plain": adaptation.plain}
    forge_dist.export_model(adaptation.model, directory, tokenizer=tokenizer, dtype=dtype, strategy=strategy, **as_plain)
    samples = train.short_samples()
    check = forge_dist.check_export(
        adaptation.model, directory, samples, strategy=strategy, attach=adaptation.attach, **as_plain
    )
    files = hash_export(directory, strategy.ranks)
    strategy.ranks.first(lambda: record_hashes(out.path, name, files))
    what = "mean reward" if task.model_task(s) == "reward" else "loss"
    report.note(
        f"exported {directory}: loaded back, on {counted(len(samples), 'short samples')} its {what} is {check.reloaded:.4f}, "
        f"{check.in_memory:.4f} in memory",
        event="exported",
        export=name,
        measure=what,
        on=len(samples),
        reloaded=check.reloaded,
        in_memory=check.in_memory,
        files=files,
    )
    return directory


def write_finished(
    out: RunDirectory | NoDirectory,
    model_dir: Path,
    report: Reporter,
    *,
    steps: int,
    samples: int,
    loss: float,
    began: float,
    unit: str,
    first: bool = True,
) -> RunResult:
    """Write the result of a run on its first rank, log it, and return it.

    Args:
        out: the run directory.
        model_dir: the last export.
        report: the log.
        steps: optimizer steps made.
        samples: rows, or blocks, that they took.
        loss: of the last step.
        began: `time.perf_counter()` before the first step.
        unit: what samples are called in the log.
        first: whether this is the first rank.

    """
    seconds = time.perf_counter() - began
    result = RunResult(output_dir=out.path, model_dir=model_dir, steps=steps, samples=samples, loss=loss, seconds=seconds)
    report.finished(result, unit)
    if first:
        write_result(result)
    return result
