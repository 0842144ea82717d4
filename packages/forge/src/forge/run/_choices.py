"""What the settings leave open → what fits this machine, these data and this model, each choice with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._directories import last_export
from forge.tasks._task import Items, Task


def choose_sizes(task: Task, s: Any, machine: forge_accel.Accelerator, parts: list[Items]) -> Any:
    """Fill in epochs, the micro-batch's tokens and the learning rate.

    Raises SettingsError, naming file and row, where a sample is longer than the `max_tokens_per_gpu` that was given.
    """
    if task.length(s, parts[0]) == (None, None):
        s = s.resolved("num_epochs", 1, "neither num_epochs nor max_steps was given")
    longest = max(int(items.lengths.max()) for items in parts)
    if s.plan.max_tokens_per_gpu is not None:
        for items in parts:
            row = int(items.lengths.argmax())
            if items.lengths[row] > s.plan.max_tokens_per_gpu:
                raise SettingsError(
                    f"{items.size(row)}, more than max_tokens_per_gpu={s.plan.max_tokens_per_gpu:,}, and is never cut to fit. Set "
                    f"max_tokens_per_gpu to {longest:,} or more, or {items.shorter}."
                )
    elif longest > machine.default_tokens:
        s = s.resolved("max_tokens_per_gpu", longest, "the longest sample")
    else:
        s = s.resolved("max_tokens_per_gpu", machine.default_tokens, f"what suits {machine.name}")
    if s.optimizer.learning_rate is None:
        rate = s.optimizer.resolve(s.adapter.adapter).learning_rate
        s = s.resolved("learning_rate", rate, f"the default with adapter={s.adapter.adapter}")
    return s


def check_warmup(s: Any, num_steps: int) -> None:
    """Refuse a warm-up that the run is too short for: its peak and its schedule would have no effect."""
    if s.optimizer.warmup_steps > num_steps:
        raise SettingsError(
            f"warmup_steps={s.optimizer.warmup_steps} is more than the {num_steps} steps of this run: the learning rate would never "
            "reach learning_rate. Lower warmup_steps, or train longer."
        )


def load_fitting(
    task: Task, s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any], strategy: forge_dist.Strategy
) -> tuple[Any, Any, str]:
    """Load the model on the attention that was asked for, or on the first that keeps its packed samples apart.

    Returns the settings with the choice, the model, and the choice's reason. Attention that the machine would choose does not
    fit every architecture (soft-capped scores, say), so the model is asked; with `attention="auto"` eager is tried next.
    """
    choice = machine.attention(s.device.attention, dtype.value)
    model = None
    reason = choice.reason
    try:
        model = _loaded(task, s, machine, dtype, choice, strategy)
    except Exception as error:
        refused = getattr(error, "exit_status", None) == forge_algos.ForgeAlgosError.exit_status
        if s.device.attention != "auto" or choice.value.name == "eager" or not refused:
            raise
        first, choice = choice.value.name, machine.attention("eager", dtype.value)
        reason = f"eager: {first} does not fit this model ({error})"
        try:
            model = _loaded(task, s, machine, dtype, choice, strategy)
        except Exception:  # noqa: BLE001 - whatever it is, the first refusal is the better answer
            # Neither fits: what the usual choice said is the better answer.
            raise error from None
    if s.device.attention == "auto":
        s = s.resolved("attention", choice.value.name, reason)
    return s, model, reason


def _loaded(
    task: Task,
    s: Any,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    attention: forge_accel.Choice[forge_accel.Attention],
    strategy: forge_dist.Strategy,
) -> Any:
    model = strategy.load(
        s.model.model_path,
        # What is trained is held in float32, whatever it is computed in; a frozen base needs no more than it is computed in.
        dtype=forge_accel.float32 if s.adapter.adapter in ("none", "osft") else dtype.value,
        attention=attention.value.name,
        attention_function=attention.value.function,
        task=task.loads,
        **quantized(s, machine, dtype.value),
    )
    # Asked now, while a refusal still leaves nothing behind: does this model keep packed samples apart?
    with strategy.computing(model):
        task.probe(s).bind(model, device=machine.device.value)
    strategy.settle(model)
    return model


def quantized(s: Any, machine: forge_accel.Accelerator, dtype: Any) -> dict[str, Any]:
    """What a load is told for a base in 4 bits; AccelError where this machine cannot compute with one."""
    if s.adapter.adapter != "qlora":
        return {}
    machine.quantization(s.adapter.quant_type)
    return {"quantization": forge_algos.quantization_config(s.adapter, compute_dtype=dtype)}


def load_frozen(
    path: str, s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any], strategy: forge_dist.Strategy
) -> Any:
    """Load a second model for the same ranks, on the attention that was chosen for the first; nothing trains it."""
    attention = machine.attention(s.device.attention, dtype.value)
    return strategy.load_frozen(
        path, dtype=dtype.value, attention=attention.value.name, attention_function=attention.value.function
    )


def choose_machine(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any]) -> Any:
    """Write down the device and the dtype that were chosen."""
    if s.device.device == "auto":
        s = s.resolved("device", machine.name, machine.device.reason)
    if s.device.dtype == "auto":
        s = s.resolved("dtype", str(dtype.value).removeprefix("torch."), dtype.reason)
    return s


def warn_of_positions(report: Reporter, model: Any, parts: list[Items]) -> None:
    """Say so where samples are longer than the positions that the model was made for."""
    limit = getattr(model.config, "max_position_embeddings", None)
    over = sum(int((items.longest > limit).sum()) for items in parts) if isinstance(limit, int) else 0
    if over:
        report.note(
            f"WARNING: {over:,} samples have more tokens than the {limit:,} positions this model was made for "
            f"(max_position_embeddings); max_seq_len={limit} would drop them."
        )


def warn_of_rounding(report: Reporter, before: float | None, trained: float | None, exported: float | None, dtype: str) -> None:
    """Say so where writing the model in its directory's dtype lost a tenth or more of what training had gained."""
    if before is None or trained is None or exported is None or trained >= before:
        return
    lost = (exported - trained) / (before - trained)
    if lost >= 0.1:
        report.note(
            f"WARNING: {100 * lost:.0f} % of the held-out gain was lost by writing the model in {dtype}, the dtype of its directory: the "
            "weights moved by less than its digits. Train longer or with a higher learning_rate, or with adapter=lora, whose adapters stay float32."
        )


def absolute_paths(task: Task, s: Any) -> Any:
    """Make the paths of files absolute, so that config.yaml repeats the run from any directory; hub names and URLs stay.

    A run directory in the place of a model stands for its last export.
    """
    s = s.with_value("model", "model_path", _absolute(last_export(s.model.model_path)))
    for name in ("osft_cache", "osft_calibration_path"):
        if (path := getattr(s.adapter, name)) is not None:
            s = s.with_value("adapter", name, os.path.abspath(os.path.expanduser(path)))
    for name, path in task.paths(s).items():
        s = s.with_value("objective", name, _absolute(last_export(path)))
    s = s.with_value("data", "data_path", _absolute_sources(s.data.data_path))
    if s.data.eval_data_path is not None:
        s = s.with_value("data", "eval_data_path", _absolute_sources(s.data.eval_data_path))
    return s.with_value("checkpoints", "ckpt_output_dir", os.path.abspath(os.path.expanduser(s.checkpoints.ckpt_output_dir)))


def _absolute_sources(path: Any) -> Any:
    if isinstance(path, str):
        return _absolute(path)
    if isinstance(path, Mapping):
        return {_absolute(one): share for one, share in path.items()}
    return tuple(_absolute(one) for one in path)


def _absolute(path: str) -> str:
    """Make a path absolute where it leads to something here; `name:split` by what stands before the colon."""
    full = os.path.abspath(os.path.expanduser(path))
    pattern = "://" not in path and any(sign in path for sign in "*?[")
    return full if pattern or os.path.exists(full) or os.path.exists(full.rpartition(":")[0] or full) else path


def require_same_tokens(model_path: str, name: str, path: str) -> None:
    """Raise SettingsError unless the tokenizers of two models give every token the same id."""
    own, theirs = (forge_data.load_tokenizer(each) for each in (model_path, path))
    if own.get_vocab() != theirs.get_vocab():
        raise SettingsError(
            f"{name} {path}: its tokenizer gives other ids to tokens than that of model_path, so that its predictions are about other "
            "words. Take a model of the same family."
        )
