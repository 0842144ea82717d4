"""End of a run whose steps another library made: the export, and the result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import forge_algos
import forge_dist
from forge._progress import Reporter
from forge._result import RunResult, write_result
from forge.run._adaptation import exported_as
from forge.run._precision import dtype_of_exports
from forge.run._run_directory import NoDirectory, RunDirectory
from forge.saving._exports import note_exported
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
    dtype, as_plain = dtype_of_exports(task, s, adaptation.writes), exported_as(task, adaptation)
    beside = task.export_files(s, adaptation.model)
    forge_dist.export_model(
        adaptation.model, directory, tokenizer=tokenizer, dtype=dtype, strategy=strategy, beside=beside, **as_plain
    )
    samples = train.short_samples()
    check = forge_dist.check_export(
        adaptation.model, directory, samples, strategy=strategy, attach=adaptation.attach, **as_plain
    )
    files = hash_export(directory, strategy.ranks)
    strategy.ranks.first(lambda: record_hashes(out.path, name, files))
    note_exported(report, directory, task.model_task(s), len(samples), check, files)
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
