"""Loading a model in the first way, of attention and packing, that keeps its samples apart."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import forge_accel
import forge_algos
import forge_dist
from forge._error_chain import error_chain
from forge._progress import Reporter
from forge.tasks._media import take_media
from forge.tasks._parts import held_dtype, loaded_parts
from forge.tasks._task import Task


class _Asked(NamedTuple):
    """What a model is loaded for."""

    task: Task
    s: Any
    path: str
    machine: forge_accel.Accelerator
    dtype: forge_accel.Choice[Any]
    strategy: forge_dist.Strategy
    longest: int
    media: Sequence[forge_algos.MediaDocument]


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
    media: Sequence[forge_algos.MediaDocument] = (),
    *,
    like: Any = None,
) -> tuple[Any, Any, tuple[str, str]]:
    """Load the model of `path` so that its samples are kept apart: packed, or alone.

    Not every attention computes every architecture (soft-capped scores, for example), so the loaded model is probed; with
    `attention="auto"` eager is tried next. Where rows cannot be packed at all, `packing="auto"` runs samples alone.

    With `images`, documents that have some, the parts beside the language compute too, and the attention is tried on the first.
    Rows with images are those of the model `like`, where one is given.

    Returns:
        The settings with the choices, the model, and the reasons: of the attention, and of packing.

    """
    strategy.media = strategy.media or bool(media)
    asked = _Asked(task, s, path, machine, dtype, strategy, longest, media)
    try:
        found = _load_in_some_way(asked)
    except forge_algos.ForgeAlgosError as error:
        if strategy.autocasts:
            raise
        _without_frames(error)
        # Some architectures multiply by numbers that stay float32 (XGLM, GPT, MiniMax), which weights gathered in 16 bits
        # cannot.
        strategy.autocasts = True
        found = _load_in_some_way(asked)
    if like is not None:
        forge_algos.pack_media_like(found[1], like)
    return found


def _load_in_some_way(asked: _Asked) -> tuple[Any, Any, tuple[str, str]]:
    """Load the model in the first way that keeps its samples apart, with autocast or without."""
    s = asked.s
    refusals: list[Exception] = []
    model: Any = None
    for way in _ways(s, asked.machine, asked.dtype, media=bool(asked.media)):
        try:
            if model is not None and way.attention.value.function is None:
                # Its attention does not compute its media: it takes another of transformers'.
                forge_algos.set_attention(model, way.attention.value.name)
            else:
                if model is not None:
                    model = None
                    gc.collect()  # before another is loaded: the modules of a model refer to each other
                model = _loaded(asked, way)
            packed, why, refusal = _probed(asked, way, model)
        except Exception as error:
            refused = getattr(error, "exit_status", None) == forge_algos.ForgeAlgosError.exit_status
            # Whatever comes later, the first refusal is the answer to what was asked for.
            if not refused and not refusals:
                raise
            model = None
            refusals.append(_without_frames(error))
            continue
        if refusal is not None:
            refusals.append(refusal)
            continue
        name, reason = way.attention.value.name, way.attention.reason
        if refusals:
            said = _without_remedy(refusals[0])
            reason = f"{name}: the first choice does not fit this model ({said})"
            why = why if packed else f"{said}; {why}"
        if s.device.attention == "auto":
            s = s.resolved("attention", name, reason)
        if s.packing.packing == "auto":
            s = s.resolved("packing", "on" if packed else "off", why)
        return s, model, (reason, why)
    leaks = [error for error in refusals if isinstance(error, forge_algos.PackedBatchError)]
    if (s.packing.packing == "on" or s.strategy.cp_size > 1) and leaks:
        raise _no_packing(s, leaks[0]) from leaks[0]
    if s.strategy.tp_size > 1 and leaks:
        # Whole, a small one of its kind computed before the rows were read.
        raise forge_dist.StrategyError(
            f"tp_size={s.strategy.tp_size}: transformers' plan divides layers of this model that then do not compute: leave "
            f"tp_size out. ({leaks[-1]})"
        ) from leaks[-1]
    if leaks and leaks[-1] is refusals[-1] and len(refusals) > 1:
        first = _without_remedy(refusals[0])
        if first == _without_remedy(leaks[-1]):
            raise leaks[-1]
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
    task: Any
    """Head of the small model, as `Task.model_task` names it."""


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
        return Tried(way.attention.value, packed, draft, why, None, task.model_task(s))
    leaks = [error for error in refusals if s.strategy.cp_size > 1 or isinstance(error, forge_algos.PackedBatchError)]
    leak = leaks[0] if leaks else None
    return Tried(ways[0].attention.value, ways[0].packing == "on", None, "", leak, task.model_task(s))


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
    why = _without_remedy(leak)
    if (sharing := s.strategy.cp_size) > 1:
        return forge_algos.PackedBatchError(
            f"cp_size={sharing} cuts packed rows over ranks, which this model does not allow: {why}. "
            "Leave cp_size out; tp_size and activation_checkpointing=true make room in other ways."
        )
    return forge_algos.PackedBatchError(f"packing=on: {why}. With packing=auto its samples run alone.")


def _without_remedy(refusal: Exception) -> str:
    """Return what an error found, without its remedy: another is taken, or named."""
    return str(refusal).partition(". ")[0].partition(": use ")[0].removesuffix(".")


def _without_frames(error: Exception) -> Exception:
    """Clear the frames that an error and its causes hold: the refused model is in them."""
    for each in error_chain(error):
        traceback.clear_frames(each.__traceback__)
    # The modules of a model refer to each other.
    gc.collect()
    return error


def _ways(s: Any, machine: forge_accel.Accelerator, dtype: forge_accel.Choice[Any], *, media: bool = False) -> list[_Way]:
    """List the ways to run the model, the first choice first."""
    auto, packing = s.device.attention == "auto", s.packing.packing
    chosen = machine.attention(s.device.attention, dtype.value)
    if s.strategy.cp_size > 1:
        # Ranks can share no other row than a packed one, and only this attention gathers its keys.
        return [_Way(chosen, "on")]
    # Masks by which the tokens of an image see each other are read by both; sdpa is faster.
    others = ["sdpa", "eager"] if media else ["eager"]
    packed = [chosen, *(machine.attention(name, dtype.value) for name in others if auto and chosen.value.name != name)]
    # A forward of whole lines needs no attention that knows documents.
    alone = [machine.attention(name, dtype.value) for name in ("sdpa", "eager")] if auto else [chosen]
    return [_Way(attention, "on") for attention in packed if packing != "off"] + [
        _Way(attention, "off") for attention in alone if packing != "on"
    ]


def _loaded(asked: _Asked, way: _Way) -> Any:
    """Load the model with the attention of a way."""
    s, machine, dtype = asked.s, asked.machine, asked.dtype
    model = asked.strategy.load(
        asked.path,
        dtype=held_dtype(s, asked.path, dtype.value),
        attention=way.attention.value.name,
        attention_function=way.attention.value.function,
        task=asked.task.model_task(s),
        other_dtype=_dtype_beside(dtype) if asked.media else None,
        trained=loaded_parts(s),
        **quantized(s, machine, dtype.value),
    )
    forge_algos.score_rows_at_once(model, machine.head_rows)
    return model


def _probed(asked: _Asked, way: _Way, model: Any) -> tuple[bool, str, Exception | None]:
    """Have a loaded model keep samples apart, and check that it supports media and objective.

    Returns whether samples share rows, the reason, and why the attention does not compute media, by which another may be tried.
    """
    _, s, path, machine, dtype, strategy, longest, media = asked
    # Probed now, while a refusal still leaves nothing behind: does this model keep packed samples apart?
    with strategy.computing(model):
        packed, why = keep_apart(model, machine, dtype, strategy, way.packing, longest)
        refusal = _check_media(model, path, way, machine, dtype, strategy, media)
        if refusal is None:
            with computing(machine, dtype, strategy)():
                asked.task.probe_objective(s).bind(model, device=machine.device.value)
    if refusal is None:
        strategy.settle(model)
    return packed, why, refusal


def _check_media(
    model: Any,
    path: str,
    way: _Way,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    media: Sequence[forge_algos.MediaDocument],
) -> forge_algos.PackedBatchError | None:
    """Try a model on a document of each kind of media, and an attention of our own on the first.

    Returns why this attention does not compute it, or None.

    Raises:
        forge_algos.PackedBatchError: it does not see them.
    """
    if not media:
        return None
    where: dict[str, Any] = {"device": machine.device.value, "autocast": computing(machine, dtype, strategy)}
    try:
        # One of each kind of arrays: GLM-4V takes images, and videos, and not both at once.
        for document in {frozenset(each.inputs): each for each in reversed(media)}.values():
            forge_algos.require_media(model, document, **where)
    except forge_algos.PackedBatchError as error:
        raise forge_algos.PackedBatchError(f"{path} cannot be given the rows' media: {error}") from error
    if way.attention.value.function is not None:
        try:
            forge_algos.require_image_attention(model, media[0], **where)
        except forge_algos.PackedBatchError as error:
            if error.__cause__ is not None:  # a forward that ended half-way: what a divided model holds by now is not known
                raise
            return error.with_traceback(None)  # whose frames hold the model
    return None


def _take_media(
    model: Any,
    path: str,
    s: Any,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    media: Sequence[forge_algos.MediaDocument],
) -> None:
    """Have a second model take rows of several documents with images, as the first does.

    Raises:
        forge_algos.PackedBatchError: it cannot.
    """
    with strategy.computing(model):
        way, why = take_media(s, model, media, device=machine.device.value, autocast=computing(machine, dtype, strategy))
    if way is None:
        raise forge_algos.PackedBatchError(
            f"{path} cannot be given the rows with media: {why}. Take a model of the kind of model_path."
        )


def _dtype_beside(dtype: forge_accel.Choice[Any]) -> Any:
    """Return the dtype of what computes on images: as stored (None), or float32 like the rest."""
    return dtype.value if dtype.value.itemsize == 4 else None


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
        # Whole or divided: ranks that found different things would load it in different ways.
        decide=strategy.ranks.largest,
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


def quantized(s: Any, machine: forge_accel.Accelerator, dtype: Any) -> dict[str, Any]:
    """Return the loading options of adapter=qlora and qoft, none for another adapter.

    Raises:
        forge_accel.AccelError: this machine cannot hold a base in such bits.

    """
    if not forge_algos.adaptations.ADAPTERS[s.adapter.adapter].quantized:
        return {}
    try:
        machine.quantization(s.adapter.quant_type)
    except forge_accel.AccelError as error:
        given = f"quant_type={s.adapter.quant_type}"
        # Whoever left the type open asked for the adapter.
        named = f"adapter={s.adapter.adapter} ({given})" if s.origins["quant_type"] == "default" else given
        raise forge_accel.AccelError(str(error).replace(given, named, 1)) from error
    return {"quantization": forge_algos.quantization_config(s.adapter, compute_dtype=dtype)}


def load_frozen(
    path: str,
    s: Any,
    machine: forge_accel.Accelerator,
    dtype: forge_accel.Choice[Any],
    strategy: forge_dist.Strategy,
    longest: int,
    report: Reporter,
    media: Sequence[forge_algos.MediaDocument] = (),
    *,
    initial: Any = None,
    weights: Any = None,
    several: bool = True,
) -> Any:
    """Load a frozen model for the same ranks, with the attention of the first where it fits.

    With `initial`, the model that is trained, it is the base of the run itself: quantized where that is, with the same rows
    with images. `weights` is their dtype, by default that of the computation. With `images`, documents that have some, the
    parts beside the language compute too, the attention is tried on the first, and another model than the base on rows of
    `several`, or of one.
    """
    loading = {} if initial is None else quantized(s, machine, dtype.value)
    refusals: list[Exception] = []
    same = machine.attention(s.device.attention, dtype.value)
    ways = [_Way(same, "on")] if s.packing.packing == "on" else []
    ways += [_Way(same, "off"), *(_Way(machine.attention(name, dtype.value), "off") for name in ("sdpa", "eager"))]
    for way in ways:
        try:
            with report.taking(f"loading {path}", f"loaded {path}"):
                model = strategy.load_frozen(
                    path,
                    dtype=dtype.value if weights is None else weights,
                    attention=way.attention.value.name,
                    attention_function=way.attention.value.function,
                    other_dtype=_dtype_beside(dtype) if media else None,
                    **loading,
                )
            forge_algos.score_rows_at_once(model, machine.head_rows)
            with strategy.computing(model):
                keep_apart(model, machine, dtype, strategy, way.packing, longest)
                refusal = _check_media(model, path, way, machine, dtype, strategy, media)
            if refusal is not None:
                raise refusal
        except (forge_algos.PackedBatchError, forge_dist.ModelError) as error:
            refusals.append(_without_frames(error))
        else:
            if initial is not None:
                forge_algos.pack_media_like(model, initial)
            elif media and several:
                _take_media(model, path, s, machine, dtype, strategy, media)
            return model
    raise refusals[0]
