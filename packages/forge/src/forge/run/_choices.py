"""Settings left open → what fits the machine, the data and the model, each with its reason."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

import forge_accel
import forge_algos
import forge_dist
import forge_packing
from forge._errors import SettingsError
from forge._progress import Reporter
from forge.run._precision import for_low_precision, trained_dtype
from forge.saving._directories import last_export
from forge.tasks._answers import is_prompt_file
from forge.tasks._task import Task
from forge.tasks.items._items import Items, places


def choose_sizes(s: Any, machine: forge_accel.Accelerator, parts: list[Items]) -> Any:
    """Choose epochs, tokens of a micro-batch and learning rate where they are left open.

    Raises:
        SettingsError: a sample, named by file and row, is longer than the `max_tokens_per_gpu` that was given.

    """
    if s.plan.num_epochs is None and s.plan.epochs is not None:
        s = s.resolved("num_epochs", s.plan.epochs, "neither num_epochs nor max_steps nor max_tokens was given")
    longest = max(int(places(s, items).max()) for items in parts)
    given, chosen = s.plan.max_tokens_per_gpu, s.origins["max_tokens_per_gpu"].startswith("chosen: ")
    sharing = s.strategy.cp_size
    least = -(-longest // sharing)
    if given is not None and not (chosen and least > given):
        for items in parts:
            taken = places(s, items)
            row = int(taken.argmax())
            if taken[row] > given * sharing:
                over = "" if sharing == 1 else f" on each of the {sharing} ranks that share a row (cp_size)"
                over += f" ({taken[row]:,} with virtual tokens and padding)" if taken[row] != items.lengths[row] else ""
                raise SettingsError(
                    f"{items.size(row)}, more than max_tokens_per_gpu={given:,}{over}, and is never cut to fit. "
                    f"Set max_tokens_per_gpu to {least:,} or more, or {items.shorter}."
                )
    elif least > machine.default_tokens:
        s = s.resolved("max_tokens_per_gpu", least, "the longest sample")
    else:
        s = s.resolved("max_tokens_per_gpu", machine.default_tokens, f"what suits {machine.name}")
    if s.optimizer.learning_rate is None:
        rate = s.optimizer.resolve(s.adapter.adapter).learning_rate
        s = s.resolved("learning_rate", rate, f"the default with adapter={s.adapter.adapter}")
    return s


def check_shards(s: Any, shards: int) -> None:
    """Raise SettingsError for a step with fewer samples than there are ranks."""
    if s.plan.effective_batch_size < shards:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} is less than the {shards} ranks: some would never have a "
            f"sample. Set effective_batch_size to {shards} or more, or start fewer processes."
        )


def check_warmup(s: Any, num_steps: int | None) -> None:
    """Raise SettingsError for a warm-up that is longer than the run."""
    if num_steps is not None and s.optimizer.warmup_steps > num_steps:
        raise SettingsError(
            f"warmup_steps={s.optimizer.warmup_steps} is more than the {num_steps} steps of this run: the learning rate would "
            "never reach learning_rate. Lower warmup_steps, or train longer."
        )


class _Way(NamedTuple):
    """A way to run the model: its attention, and whether rows are packed."""

    attention: forge_accel.Choice[forge_accel.Attention]
    packing: Literal["on", "off"]


def load_with_attention(
    task: Task,
    s: Any,
    path: str,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    longest: int,
) -> tuple[Any, Any, tuple[str, str]]:
    """Load the model of `path` so that its samples are kept apart: packed, or alone.

    Not every attention computes every architecture (soft-capped scores, for example), so the loaded model is probed; with
    `attention="auto"` eager is tried next. Where rows cannot be packed at all, `packing="auto"` runs samples alone.

    Returns:
        The settings with the choices, the model, and the reasons: of the attention, and of packing.

    """
    try:
        return _load_in_some_way(task, s, path, machine, dtype, strategy, longest)
    except forge_algos.ForgeAlgosError as error:
        if strategy.autocasts:
            raise
        _without_frames(error)
    # Some architectures multiply by numbers that stay float32 (XGLM, GPT, MiniMax), which weights gathered in 16 bits cannot.
    strategy.autocasts = True
    return _load_in_some_way(task, s, path, machine, dtype, strategy, longest)


def _load_in_some_way(
    task: Task,
    s: Any,
    path: str,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    longest: int,
) -> tuple[Any, Any, tuple[str, str]]:
    """Load the model in the first way that keeps its samples apart, with autocast or without."""
    refusals: list[Exception] = []
    for way in _ways(s, machine, dtype):
        try:
            model, packed, why = _loaded(task, s, path, machine, dtype, way, strategy, longest)
        except Exception as error:
            refused = getattr(error, "exit_status", None) == forge_algos.ForgeAlgosError.exit_status
            # Whatever comes later, the first refusal is the answer to what was asked for.
            if not refused and not refusals:
                raise
            refusals.append(_without_frames(error))
            continue
        name, reason = way.attention.value.name, way.attention.reason
        if refusals:
            # Without what to do about it, which was done.
            refusal = str(refusals[0]).partition(". ")[0]
            reason = f"{name}: the first choice does not fit this model ({refusal})"
            why = why if packed else f"{refusal}; {why}"
        if s.device.attention == "auto":
            s = s.resolved("attention", name, reason)
        if s.packing.packing == "auto":
            s = s.resolved("packing", "on" if packed else "off", why)
        return s, model, (reason, why)
    leaks = [error for error in refusals if isinstance(error, forge_algos.PackedBatchError)]
    if (s.packing.packing == "on" or s.strategy.cp_size > 1) and leaks:
        raise _no_packing(s, leaks[0]) from leaks[0]
    if leaks and leaks[-1] is refusals[-1] and len(refusals) > 1:
        first = str(refusals[0]).partition(". ")[0]
        raise forge_algos.PackedBatchError(f"{first}. Its samples cannot run alone either: {leaks[-1]}") from leaks[-1]
    raise refusals[0]


def try_packing(task: Task, s: Any, machine: forge_accel.Accelerator, report: Reporter) -> Tried:
    """Try on a small random model whether samples can share a row, before they are tokenized.

    The loaded model is tried again. What cannot be tried so is left to that.

    Raises:
        PackedBatchError: `packing=on`, and no attention keeps the samples of a row apart.

    """
    tried = try_ways(task, s, machine)
    if tried.model is None and s.packing.packing == "on" and tried.leak is None:
        report.note("packing=on is tried once the model is loaded: no small model of its configuration can be made")
    elif tried.model is not None and not tried.packed:
        report.note(f"packing: samples will run alone, as a small random model of this configuration shows ({tried.why})")
    if (s.packing.packing == "on" or s.strategy.cp_size > 1) and tried.model is None and tried.leak is not None:
        raise _no_packing(s, tried.leak) from tried.leak
    if s.strategy.cp_size > 1 and tried.model is not None and (layers := forge_algos.layers_apart(tried.model)):
        raise _no_packing(s, forge_algos.PackedBatchError(f"{layers[0]} carries a state from token to token"))
    return tried


class Tried(NamedTuple):
    """First way in which a small random model of the configuration keeps samples apart."""

    attention: forge_accel.Attention
    packed: bool
    model: Any
    """The small model; None where none can be made, or none keeps samples apart."""
    why: str
    leak: Exception | None
    """Why samples cannot share a row, where no way was found."""


def try_ways(task: Task, s: Any, machine: forge_accel.Accelerator) -> Tried:
    """Try the ways to run the model on a small random one, the first choice first."""
    refusals: list[Exception] = []
    ways = _ways(s, machine, machine.dtype(s.device.dtype))
    for way in ways:
        try:
            found = _try_way(task, s, machine, way)
        except (forge_algos.PackedBatchError, forge_dist.ModelError) as error:
            refusals.append(_without_frames(error))
            continue
        if found is None:
            break
        draft, packed, why = found
        return Tried(way.attention.value, packed, draft, why, None)
    leaks = [error for error in refusals if s.strategy.cp_size > 1 or isinstance(error, forge_algos.PackedBatchError)]
    return Tried(ways[0].attention.value, ways[0].packing == "on", None, "", leaks[0] if leaks else None)


def _try_way(task: Task, s: Any, machine: forge_accel.Accelerator, way: _Way) -> tuple[Any, bool, str] | None:
    """Try one way on a small random model, which is returned; None where none can be made."""
    dtype, device = machine.dtype(s.device.dtype).value, machine.device.value
    request = forge_dist.LoadRequest(
        model_path=s.model.model_path,
        dtype=dtype,
        attention=way.attention.value.name,
        attention_function=way.attention.value.function,
        task=task.model_task(s),
    )
    draft = forge_dist.draft_model(request, device=device)
    if draft is None:
        return None
    packed, why = forge_algos.keep_documents_apart(
        draft, device=device, packing=way.packing, longest=1, autocast=partial(machine.autocast, dtype)
    )
    return draft, packed, why


def _no_packing(s: Any, leak: Exception) -> Exception:
    if (sharing := s.strategy.cp_size) > 1:
        why = str(leak).partition(". ")[0].partition(": use ")[0]
        return forge_algos.PackedBatchError(
            f"cp_size={sharing} cuts packed rows over ranks, which this model does not allow: {why}. "
            "Leave cp_size out; tp_size and activation_checkpointing=true make room in other ways."
        )
    return forge_algos.PackedBatchError(f"packing=on: {leak}. With packing=auto its samples run alone.")


def _without_frames(error: Exception) -> Exception:
    """Clear the frames that an error and its causes hold: the refused model is in them."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    # The modules of a model refer to each other.
    gc.collect()
    return error


def _ways(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any]) -> list[_Way]:
    """List the ways to run the model, the first choice first."""
    auto, packing = s.device.attention == "auto", s.packing.packing
    chosen = machine.attention(s.device.attention, dtype.value)
    if s.strategy.cp_size > 1:
        # Ranks can share no other row than a packed one, and only this attention gathers its keys.
        return [_Way(chosen, "on")]
    packed = [chosen, *([machine.attention("eager", dtype.value)] if auto and chosen.value.name != "eager" else [])]
    # A forward of whole lines needs no attention that knows documents.
    alone = [machine.attention(name, dtype.value) for name in ("sdpa", "eager")] if auto else [chosen]
    return [_Way(attention, "on") for attention in packed if packing != "off"] + [
        _Way(attention, "off") for attention in alone if packing != "on"
    ]


def _loaded(
    task: Task,
    s: Any,
    path: str,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    way: _Way,
    strategy: forge_dist.Strategy,
    longest: int,
) -> tuple[Any, bool, str]:
    """Load the model in one way, and check that it supports the objective."""
    model = strategy.load(
        path,
        # Trained weights have a dtype of their own, whatever that of the computation; a frozen base needs only the latter.
        dtype=trained_dtype(s) if s.adapter.adapter in ("none", "osft") else dtype.value,
        attention=way.attention.value.name,
        attention_function=way.attention.value.function,
        task=task.model_task(s),
        **quantized(s, machine, dtype.value),
    )
    forge_algos.score_rows_at_once(model, machine.head_rows)
    # Probed now, while a refusal still leaves nothing behind: does this model keep packed samples apart?
    with strategy.computing(model):
        packed, why = keep_apart(model, machine, dtype, strategy, way.packing, longest)
        with computing(machine, dtype, strategy)():
            task.probe_objective(s).bind(model, device=machine.device.value)
    strategy.settle(model)
    return model, packed, why


def keep_apart(
    model: Any,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    packing: Literal["auto", "on", "off"],
    longest: int,
) -> tuple[bool, str]:
    """Have a loaded model keep samples apart: in a row, or alone where `packing` allows it."""
    agree = strategy.ranks.largest if strategy.divides else int
    return forge_algos.keep_documents_apart(
        model,
        device=machine.device.value,
        packing=packing,
        longest=longest,
        agree=agree,
        autocast=computing(machine, dtype, strategy),
    )


def computing(
    machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any], strategy: forge_dist.Strategy
) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of a forward.

    Autocast, or none where weights are gathered in the dtype.
    """
    return partial(machine.autocast, dtype.value) if strategy.autocasts else nullcontext


def gathered(strategy: forge_dist.Strategy) -> str:
    """Return the dtype in which a strategy gathers weights, with the reason.

    Empty where it is the weights' own.
    """
    if strategy.settings.gather_dtype == "auto":
        return ""
    why = (
        "this model computes with numbers in float32 too, which autocast brings together"
        if strategy.autocasts
        else "weights travel in the dtype of the computation, so nothing is cast on the way and kept for the backward pass"
    )
    return f"{strategy.settings.gather_dtype}: {why}; gradients are summed in float32"


_COUNTED_STEPS = 32


def cost_alone(model: Any, plan: forge_packing.BatchPlan, items: Items) -> str:
    """Say what samples that run alone cost, over the first steps of the plan."""
    lift = "a packed row needs layers that start anew where position_ids or cu_seq_lens say so"
    if items.lengths is not items.longest:
        return f"each row takes as many forwards as its samples have unlike lengths; {lift}"
    steps = range(_COUNTED_STEPS if plan.endless else min(plan.num_steps, _COUNTED_STEPS))
    rows = [items.lengths[row].tolist() for step in steps for row in plan.micro_batches(step, 0) if len(row)]
    forwards, places = np.sum([forge_algos.places_alone(model, row) for row in rows], axis=0).tolist()
    return (
        f"{forwards:,} forwards of the decoder for {len(rows):,} micro-batches, {places / sum(map(sum, rows)):.2f} places a "
        f"token with padding, in the first {len(steps)} steps; {lift}"
    )


def quantized(s: Any, machine: forge_accel.Accelerator, dtype: Any) -> dict[str, Any]:
    """Return the loading options of adapter=qlora, none for another adapter.

    Raises:
        forge_accel.AccelError: this machine cannot compute with a base in 4 bits.

    """
    if s.adapter.adapter != "qlora":
        return {}
    machine.quantization(s.adapter.quant_type)
    return {"quantization": forge_algos.quantization_config(s.adapter, compute_dtype=dtype)}


def load_frozen(
    path: str,
    s: Any,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    longest: int,
    report: Reporter,
) -> Any:
    """Load a frozen model for the same ranks, with the attention of the first where it fits."""
    refusals: list[Exception] = []
    same = machine.attention(s.device.attention, dtype.value)
    ways = [_Way(same, "on")] if s.packing.packing == "on" else []
    ways += [_Way(same, "off"), *(_Way(machine.attention(name, dtype.value), "off") for name in ("sdpa", "eager"))]
    for way in ways:
        try:
            with report.taking(f"loading {path}", f"loaded {path}"):
                model = strategy.load_frozen(
                    path, dtype=dtype.value, attention=way.attention.value.name, attention_function=way.attention.value.function
                )
            forge_algos.score_rows_at_once(model, machine.head_rows)
            with strategy.computing(model):
                keep_apart(model, machine, dtype, strategy, way.packing, longest)
        except (forge_algos.PackedBatchError, forge_dist.ModelError) as error:
            refusals.append(_without_frames(error))
        else:
            return model
    raise refusals[0]


def choose_machine(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any]) -> Any:
    """Write what the machine chose, and what bfloat16 weights need, into the settings."""
    if s.device.weights == "bfloat16":
        s = for_low_precision(s)
    if s.device.device == "auto":
        s = s.resolved("device", machine.name, machine.device.reason)
    if s.device.dtype == "auto":
        s = s.resolved("dtype", str(dtype.value).removeprefix("torch."), dtype.reason)
    # Both refuse what this machine has not, before anything is prepared.
    compiling, kernels = machine.compiling(s.device.compile), machine.kernels(s.device.kernels)
    if s.device.compile == "auto":
        s = s.resolved("compile", "off" if compiling.value is None else "blocks", compiling.reason)
    if s.device.kernels == "auto":
        s = s.resolved("kernels", kernels.value or "none", kernels.reason)
    return s


def report_routers(report: Reporter, s: Any, model: Any, plan: forge_packing.BatchPlan, device: Any) -> None:
    """Log the auxiliary loss of the model's routers and what it costs; every rank calls this.

    Raises:
        SettingsError: moe_aux_loss=trl, and there is none.

    """
    kind = s.moe.moe_aux_loss
    if kind == "off":
        return
    routers, why = forge_algos.routers_of(model, device=device)
    if routers is None:
        if kind == "trl":
            reason = why or "this model's configuration has no router_aux_loss_coef, or 0"
            raise SettingsError(f"moe_aux_loss=trl has no effect: {reason}. Leave it out.")
        if why:
            report.note(f"WARNING: no auxiliary loss of the routers: {why}")
        return
    steps = range(_COUNTED_STEPS if plan.endless else min(plan.num_steps, _COUNTED_STEPS))
    several = sum(len(plan.micro_batches(step)) > 1 for step in steps)
    cost = (
        f"; {several} of the first {len(steps)} steps have several micro-batches a rank, each of which takes one more forward "
        "without gradients (a higher max_tokens_per_gpu makes fewer)"
        if kind == "global" and several
        else ""
    )
    report.note(f"moe_aux_loss: {kind}: {why}{cost}")


def warn_of_rounding(report: Reporter, before: float | None, trained: float | None, exported: float | None, dtype: str) -> None:
    """Log a warning where the dtype of the export lost a tenth or more of the held-out gain."""
    if before is None or trained is None or exported is None or trained >= before:
        return
    lost = (exported - trained) / (before - trained)
    if lost >= 0.1:
        report.note(
            f"WARNING: {100 * lost:.0f} % of the held-out gain was lost by writing the model in {dtype}: the weights "
            "moved by less than its digits. Export with save_dtype=float32, train longer or with a higher learning_rate, or "
            "with adapter=lora, whose adapters stay float32."
        )


def absolute_paths(task: Task, s: Any) -> Any:
    """Make the paths in the settings absolute: config.yaml repeats the run from anywhere.

    Hub names and URLs stay. A run directory in the place of a model stands for its last export.
    """
    s = s.with_value("model", "model_path", _absolute(last_export(s.model.model_path)))
    for name in ("osft_cache", "osft_calibration_path"):
        if (path := getattr(s.adapter, name)) is not None:
            s = s.with_value("adapter", name, os.path.abspath(os.path.expanduser(path)))
    for name, path in task.other_models(s).items():
        s = s.with_value("objective", name, _absolute(last_export(path)))
    s = s.with_value("data", "data_path", _absolute_sources(s.data.data_path))
    if s.data.eval_data_path is not None:
        s = s.with_value("data", "eval_data_path", _absolute_sources(s.data.eval_data_path))
    if (prompts := s.evaluation.eval_prompts) is not None:
        found = tuple(os.path.abspath(each) if is_prompt_file(each) else each for each in prompts)
        s = s.with_value("evaluation", "eval_prompts", found)
    if (folder := s.tracking.tensorboard_log_dir) is not None:
        s = s.with_value("tracking", "tensorboard_log_dir", os.path.abspath(os.path.expanduser(folder)))
    if (folder := s.checkpoints.emergency_dir) is not None:
        s = s.with_value("checkpoints", "emergency_dir", os.path.abspath(os.path.expanduser(folder)))
    if (url := s.storage.checkpoint_storage) is not None and "://" not in url:
        s = s.with_value("storage", "checkpoint_storage", os.path.abspath(os.path.expanduser(url)))
    if getattr(s.data, "chat_template", None) is not None:
        s = s.with_value("data", "chat_template", _absolute(s.data.chat_template))
    return s.with_value("checkpoints", "ckpt_output_dir", os.path.abspath(os.path.expanduser(s.checkpoints.ckpt_output_dir)))


def _absolute_sources(path: Any) -> Any:
    """Make one path, a list of paths or the keys of a mapping absolute."""
    if isinstance(path, str):
        return _absolute(path)
    if isinstance(path, Mapping):
        return {_absolute(one): share for one, share in path.items()}
    return tuple(_absolute(one) for one in path)


def _absolute(path: str) -> str:
    """Make a path absolute where something is there; of `name:split` the part before the colon."""
    full = os.path.abspath(os.path.expanduser(path))
    pattern = "://" not in path and any(sign in path for sign in "*?[")
    return full if pattern or os.path.exists(full) or os.path.exists(full.rpartition(":")[0] or full) else path
