"""Settings left open → what fits the machine, the data and the model, each with its reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._counted import counted, figure, first_of
from forge._errors import SettingsError
from forge._progress import Reporter
from forge._result import BEST
from forge._turn_end import former_turn_end
from forge.run._loading import gathered
from forge.run._precision import for_low_precision, for_qat
from forge.run._resume import former_run
from forge.saving._best import Best
from forge.saving._directories import last_export
from forge.settings._data_sets import with_paths
from forge.tasks._answers import is_prompt_file
from forge.tasks._task import Evaluation, Task
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
    if s.adapter.adapter == "osft" and s.adapter.osft_directions is None:
        beside = "with osft_calibration_path" if s.adapter.protects == "inputs" else "without rows to measure inputs on"
        if s.adapter.osft_rank == "adaptive":
            beside = "with osft_rank=adaptive"
        s = s.resolved("osft_directions", s.adapter.protects, f"the default {beside}")
    return s


def check_shards(s: Any, shards: int) -> None:
    """Raise SettingsError for a step with fewer samples than there are ranks."""
    if s.plan.effective_batch_size < shards:
        raise SettingsError(
            f"effective_batch_size={s.plan.effective_batch_size} is less than the {shards} ranks: some would never have a "
            f"sample. Set effective_batch_size to {shards} or more, or start fewer processes."
        )


def moved_run(s: Any) -> str | None:
    """Say that a run's record, given as a recipe, sends this run where that one was before.

    None where the directory was given beside it.
    """
    origin = s.origins["ckpt_output_dir"]
    file = Path(origin.removeprefix("recipe ")).expanduser()
    if not origin.startswith("recipe ") or file.name != "config.yaml" or not (file.parent / "run.json").is_file():
        return None
    here, there = file.parent.resolve(), s.checkpoints.ckpt_output_dir
    if here == Path(there).resolve():
        return None
    return (
        f"WARNING: {file} is of the run in {here}, and its ckpt_output_dir is {there}, to which this run writes. To go on with "
        f"the run in {here} give it as ckpt_output_dir"
    )


def few_steps(s: Any, num_steps: int | None) -> str | None:
    """Say that a run of default length and batches has few steps.

    None where it has enough of them, or where somebody gave length or batch size.
    """
    given = s.plan.max_steps is not None or s.plan.max_tokens is not None or s.origins["effective_batch_size"] != "default"
    if given or num_steps is None or num_steps >= _FEW_STEPS or not s.origins["num_epochs"].startswith("chosen: "):
        return None
    return (
        f"the rows make {counted(num_steps, 'steps')} with effective_batch_size={s.plan.effective_batch_size} and one epoch, "
        "which teach little: a smaller effective_batch_size or more num_epochs make more"
    )


def report_packing(
    report: Reporter, s: Any, model: Any, strategy: forge_dist.Strategy, reasons: tuple[str, str], plan: Any, items: Items
) -> None:
    """Log how the loaded model computes its rows: the `reasons` of its attention and of packing."""
    report.note(f"attention: {reasons[0]}")
    if experts := forge_dist.unaligned_experts(model):
        report.note(f"experts: {experts}")
    if gathering := gathered(strategy):
        report.note(f"gather_dtype: {gathering}")
    report.note(f"packing: {s.packing.packing}: {reasons[1]}")
    if s.packing.packing == "off":
        report.note(f"packing: {cost_alone(model, plan.alone(), items)}")


_FEW_STEPS = 10
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
        f"{counted(forwards, 'forwards')} of the decoder for {counted(len(rows), 'micro-batches')}, "
        f"{places / sum(map(sum, rows)):.2f} places a token with padding, in {first_of(len(steps), 'steps')}; {lift}"
    )


COMPILED = ("none", "lora", "rslora")
"""Adapters with which compiled blocks were measured to win: of LoRA's kinds those that compute alike."""


def choose_machine(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any]) -> Any:
    """Write what the machine chose, and what bfloat16 weights need, into the settings."""
    # For the memory plan: what libraries take with their first product shows before there has been one.
    machine.library_bytes()
    if s.device.weights == "bfloat16":
        s = for_low_precision(s)
    s = for_qat(s)
    if s.device.device == "auto":
        s = s.resolved("device", machine.name, machine.device.reason)
    if s.device.dtype == "auto":
        s = s.resolved("dtype", str(dtype.value).removeprefix("torch."), dtype.reason)
    # Both refuse what this machine has not, before anything is prepared.
    s = s.resolved("compile", *found) if (found := choose_compile(s, machine)) is not None else s
    kernels = machine.kernels(s.device.kernels)
    if s.device.kernels == "auto":
        s = s.resolved("kernels", kernels.value or "none", kernels.reason)
    return s


def choose_compile(
    s: Any, machine: forge_accel.Accelerator, operations: float = 0.0, *, before: tuple[str, str] | None = None
) -> tuple[str, str] | None:
    """Choose what compile=auto is, with the reason; None where it was given.

    Args:
        s: the settings.
        machine: the accelerator of this process.
        operations: floating-point operations of all its steps, as far as they are known.
        before: what the run had on this device before it was resumed, with the reason; it stays, given or chosen.

    Raises:
        SettingsError: compile=blocks, and ranks compute a block together.
        forge_accel.AccelError: this machine cannot compile.

    """
    sizes = {name: getattr(s.strategy, name) for name in ("tp_size", "cp_size", "ep_size")}
    shared = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if s.device.compile != "auto" and not s.origins["compile"].startswith("chosen: "):
        if machine.compiling(s.device.compile).value is not None and shared:
            raise SettingsError(
                f"compile={s.device.compile} with {shared}: ranks compute a block together, and would wait for one whose "
                "compiler fails. Leave compile out, or divide the weights alone (strategy=fsdp2)."
            )
        return None
    if before is not None and (before[0] == "off" or not shared):
        try:
            machine.compiling(before[0])
        except forge_accel.AccelError as error:
            return "off", str(error)
        return before
    found = machine.compiling("auto", operations=operations)
    if found.value is not None and s.adapter.adapter not in COMPILED:
        return "off", f"measured to win without an adapter or with LoRA, not with adapter={s.adapter.adapter}"
    if found.value is not None and shared:
        return "off", f"with {shared} ranks compute a block together"
    return "off" if found.value is None else "blocks", found.reason


def operations_of(task: Task, s: Any, plan: forge_packing.BatchPlan, model_path: str) -> float:
    """Estimate the floating-point operations of a rank's steps; 0 for a run without end.

    Six for each weight and token (Kaplan et al. 2020, Scaling Laws for Neural Language Models, section 2.1).
    """
    if plan.endless:
        return 0.0
    width = forge_dist.base_dtype(model_path, task=task.model_task(s)).itemsize
    tokens = plan.num_samples * float(plan.lengths.mean()) / plan.world_size
    return 6 * forge_dist.weight_bytes(model_path) / width * tokens


def refuse_unread(s: Any, why: str) -> None:
    """Refuse settings of an auxiliary loss that a model has not, for the reason `why`."""
    coefficient = s.moe.router_aux_loss_coef
    named = "moe_aux_loss=trl" if coefficient is None else f"router_aux_loss_coef={coefficient:g}"
    if coefficient is not None or s.moe.moe_aux_loss == "trl":
        reason = why or "this model's configuration has no router_aux_loss_coef, or 0"
        raise SettingsError(f"{named} has no effect: {reason}. Leave it out.")


def report_routers(report: Reporter, s: Any, model: Any, plan: forge_packing.BatchPlan, device: Any) -> None:
    """Log the auxiliary loss of the model's routers and what it costs; every rank calls this.

    Raises:
        SettingsError: moe_aux_loss=trl or router_aux_loss_coef, and there is none.

    """
    kind = s.moe.moe_aux_loss
    if kind == "off":
        return
    routers, why = forge_algos.routers_of(model, device=device, coefficient=s.moe.router_aux_loss_coef)
    if routers is None:
        refuse_unread(s, why)
        if why:
            report.note(f"WARNING: no auxiliary loss of the routers: {why}")
        return
    steps = range(_COUNTED_STEPS if plan.endless else min(plan.num_steps, _COUNTED_STEPS))
    several = sum(len(plan.micro_batches(step)) > 1 for step in steps)
    cost = (
        f"; {several} of {first_of(len(steps), 'steps')} {'has' if several == 1 else 'have'} several micro-batches a rank, "
        "each of which takes one more forward without gradients (a higher max_tokens_per_gpu makes fewer)"
        if kind == "global" and several
        else ""
    )
    report.note(f"moe_aux_loss: {kind}: {why}{cost}")


def warn_of_higher_loss(report: Reporter, before: float | None, after: float | None, *, best_step: int | None) -> None:
    """Log a warning where the held-out loss is higher than it was before training.

    Args:
        report: gets the warning.
        before: loss before the first step.
        after: loss after the last one.
        best_step: of `keep_best`, 0 where no step was better than none; None without it.

    """
    if before is None or after is None or after <= before:
        return
    best = f"the best step's model is in hf_format/{BEST}" if best_step else "keep_best=true keeps the best step's model"
    best = "no step was better than none, and keep_best has kept no model" if best_step == 0 else best
    report.note(
        f"WARNING: the held-out loss is higher than before training, {figure(after)} after {figure(before)}: lower "
        f"learning_rate, or train for fewer steps; {best}"
    )


def note_best(report: Reporter, best: Best, last_step: int, after: Evaluation, *, kept: bool) -> None:
    """Log where the held-out figure was best, if after an earlier step than the last one."""
    now = None if best.metric is None else after.value(best.metric)
    if best.value is None or now is None or not 0 < best.step < last_step:
        return
    model = f"hf_format/{BEST} is that model" if kept else "keep_best=true keeps the best step's model"
    report.note(f"held out, best after step {best.step}: {best.metric} {figure(best.value)}, {figure(now)} at the end; {model}")


def warn_of_rounding(
    report: Reporter, s: Any, before: float | None, trained: float | None, exported: float | None, dtype: str
) -> None:
    """Log a warning where the dtype of the export lost a tenth or more of the held-out gain."""
    if before is None or trained is None or exported is None or trained >= before:
        return
    lost = (exported - trained) / (before - trained)
    if lost >= 0.1:
        lora = ", or with adapter=lora, whose adapters stay float32" if s.adapter.accepts("adapter", "lora") else ""
        report.note(
            f"WARNING: {100 * lost:.0f} % of the held-out gain was lost by writing the model in {dtype}: the weights "
            f"moved by less than its digits. Export with save_dtype=float32, or train longer or with a higher "
            f"learning_rate{lora}."
        )


def choose_turn_end(task: Task, s: Any, store: Any, tokenizer: Any, path: Path | None) -> str | None:
    """Return the token that ends answers beside the EOS, or None: turn_end, or the template's.

    Without a template of a name, what a run of an earlier version samples ended without it, and it is resumed to the bit.

    Args:
        task: the verb.
        s: the settings.
        store: the rows, with the template.
        tokenizer: of the model.
        path: directory of a run that is resumed.

    """
    if task.model_task(s) != "causal" or not hasattr(s.data, "chat_template"):
        return None
    if (former := former_run(s, path)) is None:
        # A turn_end is refused where the template ends every turn itself.
        return getattr(s.data, "turn_end", None) or forge_data.turn_end(store.chat_template, tokenizer)
    # Earlier versions recorded none, and knew those of the templates with names.
    named = getattr(s.data, "chat_template", None) in forge_data.chat_templates()
    return former_turn_end(former) or (forge_data.turn_end(store.chat_template) if named else None)


def absolute_paths(task: Task, s: Any) -> Any:
    """Make the paths in the settings absolute: config.yaml repeats the run from anywhere.

    Hub names and URLs stay. A run directory in the place of a model stands for its last export.
    """
    s = s.with_value("model", "model_path", _absolute(last_export(s.model.model_path)))
    if (path := s.adapter.adapter_path) is not None:
        s = s.with_value("adapter", "adapter_path", os.path.abspath(os.path.expanduser(last_export(path))))
    for name in ("osft_cache", "osft_calibration_path"):
        if (path := getattr(s.adapter, name)) is not None:
            s = s.with_value("adapter", name, os.path.abspath(os.path.expanduser(path)))
    for name, path in task.other_models(s).items():
        s = s.with_value("objective", name, _absolute(last_export(path)))
    s = s.with_value("data", "data_path", with_paths(s.data.data_path, _absolute))
    if s.data.eval_data_path is not None:
        s = s.with_value("data", "eval_data_path", with_paths(s.data.eval_data_path, _absolute))
    if (prompts := s.evaluation.eval_prompts) is not None:
        found = tuple(os.path.abspath(each) if is_prompt_file(each) else each for each in prompts)
        s = s.with_value("evaluation", "eval_prompts", found)
    if (folder := s.tracking.tensorboard_log_dir) is not None:
        s = s.with_value("tracking", "tensorboard_log_dir", os.path.abspath(os.path.expanduser(folder)))
    if (folder := s.checkpoints.emergency_dir) is not None:
        s = s.with_value("checkpoints", "emergency_dir", os.path.abspath(os.path.expanduser(folder)))
    if (url := s.storage.checkpoint_storage) is not None and "://" not in url:
        s = s.with_value("storage", "checkpoint_storage", os.path.abspath(os.path.expanduser(url)))
    if getattr(s.data, "chat_template", None) not in (None, *forge_data.chat_templates()):
        s = s.with_value("data", "chat_template", _absolute(s.data.chat_template))
    return s.with_value("checkpoints", "ckpt_output_dir", os.path.abspath(os.path.expanduser(s.checkpoints.ckpt_output_dir)))


def _absolute(path: str) -> str:
    """Make a path absolute where something is there; of `name:split` the part before the colon."""
    if "://" in path or any(sign in path for sign in "*?["):
        return path if "://" in path else os.path.abspath(os.path.expanduser(path))
    for begin in begins_of(path):
        if os.path.exists(full := os.path.abspath(os.path.expanduser(begin))):
            return full + path[len(begin) :]
    return path


def begins_of(path: str) -> list[str]:
    """List what of a path may be there: all of it, or up to `:split` or a data set's name.

    >>> begins_of("data/dataset_info.json:a:b")
    ['data/dataset_info.json:a:b', 'data/dataset_info.json:a', 'data/dataset_info.json']
    """
    folder, described, _ = path.partition("dataset_info.json:")
    begins = [path.rpartition(":")[0], f"{folder}dataset_info.json" if described else ""]
    return [path, *dict.fromkeys(begin for begin in begins if begin)]
