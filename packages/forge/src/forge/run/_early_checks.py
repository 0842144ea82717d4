"""Settings that a model may refuse → refused before a row is tokenized.

What can be asked of a model without its numbers is asked of its outline; what needs numbers, of a small random model of its
configuration. The loaded model is asked again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
from forge._errors import SettingsError
from forge.memory._forecast import without_measurements
from forge.run._choices import refuse_unread
from forge.run._loading import Tried, quantized
from forge.run._resume import is_finished
from forge.run._rows import SETTINGS, Rows
from forge.run._starting_model import Start, given_adapter_named, with_kept_adapter
from forge.settings._recipe import as_values
from forge.tasks._answers import prompts_of, read_prompts
from forge.tasks._base_kl import check_base_kl
from forge.tasks._parts import adapted_parts, check_parts, check_trained, loaded_parts
from forge.tasks._task import Task
from forge.tasks.items._items import VIRTUAL
from forge.trackers._table import check_trackers


def check_names(task: Task, s: Any, rows: Rows, *, weights: bool = True) -> None:
    """Refuse models, settings, trackers, prompts and columns before anything else is done.

    Nothing is refused where this very run is finished: whatever became of its model and rows, it is answered with its result.
    Without `weights` those of the model need not be here: its configuration suffices for a memory plan.
    """
    if is_finished(Path(s.checkpoints.ckpt_output_dir), s, task.name):
        return
    forge_dist.check_model_path(s.model.model_path, task=task.model_task(s), weights=weights)
    for name, path in {"model_path": s.model.model_path, **task.other_models(s)}.items():
        try:
            forge_dist.check_hub_name(path)
        except forge_dist.ModelError as error:
            raise forge_dist.ModelError(str(error).replace("model_path", name, 1)) from None
    check_parts(task, s)
    _check_qat(task, s)
    task.check_settings(s)
    check_base_kl(s, task.model_task(s))
    _check_calibration(task, s)
    _check_cut(s)
    _check_divided(task, s)
    check_trackers(s.tracking.chosen())
    read_prompts(task, s)
    for setting in SETTINGS:
        if setting not in rows and getattr(s.data, setting) is not None:
            task.check_rows(s, setting)


def _check_calibration(task: Task, s: Any) -> None:
    """Refuse rows to protect that are not given, or cannot be measured on."""
    if s.adapter.protects == "inputs" and s.adapter.osft_calibration_path is None:
        raise SettingsError(
            "osft_directions=inputs protects what layers are given on rows that the model is to keep, and there are none: set "
            "osft_calibration_path to rows of earlier tasks and of general use, or osft_directions=weights."
        )
    if s.adapter.osft_calibration_path is None:
        return
    try:
        forge_data.check_first_row(s.adapter.osft_calibration_path, media=task.media)
    except forge_data.DataError as error:
        raise SettingsError(
            f"osft_calibration_path: {error}. Rows in any format of forge sft are measured on: set it to some."
        ) from error


def _check_cut(s: Any) -> None:
    """Refuse settings with which ranks cannot share packed rows.

    Raises:
        SettingsError: cp_size and one of them.

    """
    if s.strategy.cp_size == 1:
        return
    reasons = {
        "packing": "a sample that runs alone is in no packed row" if s.packing.packing == "off" else "",
        "attention": "only attention=documents gathers the keys of a row"
        if s.device.attention not in ("auto", "documents")
        else "",
        "adapter": "its virtual tokens stand before each sample, where a row has no place"
        if s.adapter.adapter in VIRTUAL
        else "",
        "osft_directions": "inputs are measured on whole rows" if s.adapter.protects == "inputs" else "",
        "osft_rank": "importance is measured on whole rows" if s.adapter.osft_rank == "adaptive" else "",
        "init_lora_weights": "inputs are measured on whole rows" if s.adapter.init_lora_weights == "eva" else "",
        "neftune_alpha": "its noise is drawn for whole rows" if getattr(s.objective, "neftune_alpha", 0) else "",
    }
    for name, why in reasons.items():
        if why:
            given = f"{name}={as_values(s)[name]}"
            if name == "osft_directions" and s.adapter.osft_directions is None:
                given = f"osft_calibration_path={s.adapter.osft_calibration_path}"
            raise SettingsError(
                f"cp_size={s.strategy.cp_size} cuts packed rows over ranks, and with {given} it cannot: {why}. "
                f"Leave one of the two out."
            )


def _check_divided(task: Task, s: Any) -> None:
    """Refuse models and adapters whose layers or experts ranks cannot divide.

    Raises:
        SettingsError: tp_size or ep_size with an adapter that keeps parts of whole weights.
        forge_dist.StrategyError: the model's heads or experts are not divisible, or transformers has no plan for it.

    """
    sizes = {"tp_size": s.strategy.tp_size, "ep_size": s.strategy.ep_size}
    name = next((name for name, size in sizes.items() if size > 1), None)
    if name is None:
        return
    if s.adapter.init_lora_weights not in ("default", "gaussian", "orthogonal"):
        raise SettingsError(
            f"{name}={sizes[name]} divides the matrices, or their inputs, that init_lora_weights={s.adapter.init_lora_weights} "
            f"reads: leave one of the two out; fsdp2 divides the weights under it too."
        )
    if s.adapter.adapter == "osft":
        raise SettingsError(
            f"{name}={sizes[name]} divides the matrices whose singular vectors adapter=osft keeps: leave {name} out; fsdp2 "
            "divides the weights under osft too."
        )
    forge_dist.check_divisible(s.model.model_path, **sizes, task=task.model_task(s))


def _check_qat(task: Task, s: Any) -> None:
    """Refuse verbs whose models are no GGUF file's."""
    if (kind := s.qat.qat) is None:
        return
    if task.model_task(s) != "causal":
        raise SettingsError(
            f"qat={kind} trains for a GGUF file, and such a file holds a causal language model: forge {task.name} trains "
            "another. Leave `qat` out."
        )


def check_prompts(task: Task, s: Any, tokenizer: Any) -> dict[str, int]:
    """Return the tokens of each of `eval_prompts` by its place, as the model will be asked.

    Raises:
        SettingsError: the chat template refuses one.
        forge_data.ForgeDataError: the template itself is refused.

    """
    asked = read_prompts(task, s)
    if not asked:
        return {}
    template = {name: getattr(s.data, name, None) for name in ("chat_template", "chat_template_kwargs")}
    with_it = forge_data.with_template(tokenizer, template["chat_template"], template["chat_template_kwargs"])
    found = prompts_of(s, with_it, asked)
    return {each.where: len(prompt.ids) for each, prompt in zip(asked, found, strict=True)}


def check_before_rows(task: Task, s: Any, machine: forge_accel.Accelerator, start: Start, tried: Tried) -> None:
    """Raise what adapter, optimizer or router loss would raise once the model is loaded.

    Raises:
        forge_algos.ForgeAlgosError: the adapter's targets match nothing, the optimizer's package is missing, and the like.
        forge_accel.AccelError: this machine cannot hold a base in such bits.
        SettingsError: a setting would have no effect, or could never end.

    """
    dtype = machine.dtype(s.device.dtype).value
    loading = quantized(s, machine, dtype)
    if s.adapter.adapter != "none":
        _check_adapter(task, s, machine, start, tried, loading)
    if tried.model is not None:
        _check_draft(s, machine, tried.model)


def _check_adapter(
    task: Task, s: Any, machine: forge_accel.Accelerator, start: Start, tried: Tried, loading: dict[str, Any]
) -> None:
    """Attach the adapter to the model's outline."""
    rehearsal = forge_algos.Rehearsal(device=machine.device.value)
    request = forge_dist.LoadRequest(
        model_path=start.path,
        dtype=forge_accel.float32,
        attention=tried.attention.name,
        attention_function=tried.attention.function,
        task=task.model_task(s),
        trained=loaded_parts(s),
        **loading,
    )
    try:
        with rehearsal.adapting(), given_adapter_named(s, start):
            outline = forge_dist.outline_model(request)
            adapter = without_measurements(with_kept_adapter(s, start).adapter)
            more = adapted_parts(s, outline)
            adapted = forge_algos.adapt(outline, adapter, tokenizer_path=start.path, new_tokens=start.new_ids, **more)
        check_trained(s, adapted.model)
    except (forge_algos.RehearsalError, forge_dist.ModelError):
        return  # the loaded model answers


def _check_draft(s: Any, machine: forge_accel.Accelerator, draft: Any) -> None:
    """Ask the small random model for its optimizer and its routers."""
    if s.optimizer.optimizer in ("adamw_8bit", "schedule_free"):
        try:
            # The draft carries no adapter, of which this ratio is.
            optimizer = attrs.evolve(s.optimizer, loraplus_lr_ratio=1.0)
            forge_algos.make_optimizer(draft, optimizer, fused=machine.fused_optimizer.value)
        except forge_algos.MissingPackageError as error:
            if not s.origins["optimizer"].startswith("chosen"):
                raise
            raise SettingsError(
                f"weights={s.device.weights} is moved by adamw_8bit, which needs bitsandbytes, and it cannot be imported "
                f"({error.__cause__}): `pip install 'forge-algos[bitsandbytes]'`, or leave weights out."
            ) from error
    coefficient = s.moe.router_aux_loss_coef
    if s.moe.moe_aux_loss == "trl" or coefficient is not None:
        routers, why = forge_algos.routers_of(draft, device=machine.device.value, coefficient=coefficient)
        if routers is None:
            refuse_unread(s, why)
