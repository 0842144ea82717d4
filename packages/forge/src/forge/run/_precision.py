"""Number formats of a run: of its computation, and of the weights that it trains."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import forge_accel
import forge_algos
import forge_dist
from forge._counted import counted
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.tasks._task import Task


def trained_dtype(s: Any) -> Any:
    """Return the torch dtype of the weights that train."""
    return getattr(forge_accel, s.device.weights)


def choose_dtype(s: Any, machine: forge_accel.Accelerator) -> forge_accel.Choice[Any]:
    """Choose the dtype of the computation: that of bfloat16 weights, the device's for others."""
    if s.device.weights == "bfloat16" and s.device.dtype == "auto":
        found = machine.dtype("bfloat16")
        return forge_accel.Choice(found.value, found.reason.replace("asked for", "the dtype of the weights"))
    return machine.dtype(s.device.dtype)


def dtype_of_exports(task: Task, s: Any, writes: str) -> Any:
    """Return the torch dtype of an exported model: its directory's, or save_dtype.

    None for an adapter, which stays in the float32 of its training.
    """
    if writes != "model":
        return None
    asked = s.checkpoints.save_dtype
    return forge_dist.base_dtype(s.model.model_path, task=task.model_task(s)) if asked is None else getattr(forge_accel, asked)


def for_low_precision(s: Any) -> Any:
    """Return settings for bfloat16 weights, which one optimizer rounds stochastically.

    Raises:
        SettingsError: another optimizer was given, or weights that must stay exact, or a strategy that trains float32 ones.

    """
    if s.adapter.adapter == "osft":
        raise SettingsError(
            "weights=bfloat16 with adapter=osft: weights that are rounded at random move in the directions that OSFT protects. "
            f"Leave weights out{', or train with adapter=none' if s.adapter.accepts('adapter', 'none') else ''}."
        )
    if s.strategy.strategy.startswith("zero"):
        raise SettingsError(
            f"weights=bfloat16 with strategy={s.strategy.strategy}, which moves float32 weights by torch's AdamW: use "
            "strategy=fsdp2."
        )
    name = s.optimizer.optimizer
    if name == "adamw" and s.origins["optimizer"] == "default":
        s = s.resolved("optimizer", "adamw_8bit", "what moves weights=bfloat16")
    elif name != "adamw_8bit":
        raise SettingsError(
            f"weights=bfloat16 with optimizer={name}, which rounds to the nearest and would lose small steps: leave optimizer "
            "out (adamw_8bit, which needs bitsandbytes), or train with weights=float32."
        )
    return s


def report_weights(report: Reporter, s: Any) -> None:
    """Log what bfloat16 weights are."""
    if s.device.weights == "bfloat16":
        report.note(
            f"weights: bfloat16, and no float32 copy of them: each step is rounded stochastically (seed {s.plan.seed}), and "
            "moments have 8 bits. Losses are not those of float32 weights, and drift from them as docs/memory.md measures"
        )


def for_qat(s: Any) -> Any:
    """Return settings whose exports keep the digits of the weights that `qat` rounds."""
    kind = s.qat.qat
    if kind is None or s.checkpoints.save_dtype is not None or s.adapter.adapter != "none":
        return s  # an adapter stays in float32
    return s.resolved("save_dtype", "float32", f"forge export then rounds to {kind} the very weights that qat rounds")


def check_qat_model(s: Any, model_path: str, tokenizer: Any) -> None:
    """Raise SettingsError where GGUF cannot hold the model of `qat`; no weights are read."""
    if (kind := s.qat.qat) is None:
        return
    try:
        forge_dist.refuse_gguf(model_path, tokenizer=tokenizer, dtype=kind, where=Path(model_path).name)
    except forge_dist.ModelError as error:
        why = str(error).replace("; use format=hf", "").removesuffix(".")
        raise SettingsError(f"qat={kind} is for a GGUF file, which this model cannot be: {why}. Leave `qat` out.") from error


def rounded_weights(task: Task, s: Any, model: Any, report: Reporter) -> forge_algos.QuantizedWeights | None:
    """Return what rounds a model's weights while it computes, and log it; None without `qat`."""
    if (kind := s.qat.qat) is None:
        return None
    kinds = forge_dist.rounded_weights(model, kind, without=task.extra_modules)
    numbers = ", ".join(f"{number} to {each}" for each, number in Counter(each for each, _ in kinds.values()).items())
    moved = "unrounded ones move, and are exported"
    if s.adapter.adapter != "none":
        moved = "the adapter is merged into them before, moves unrounded, and is exported"
    report.note(f"qat: {kind}: {counted(len(kinds), 'weights')} are rounded wherever the model computes ({numbers}); {moved}")
    return forge_algos.QuantizedWeights(model, kinds)
