"""`forge plan PATH`: a plan that was saved, or one for a token store → its summary, a step's figures, and a drawing."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import attrs
import cyclopts

import forge_packing
from forge._errors import RunDirectoryError, SettingsError
from forge.cli._settings_page import field_texts
from forge.settings._settings import dashed

_FIXED = ("effective_batch_size", "num_epochs", "max_steps", "seed")


def plan_command(whole: Callable[..., int]) -> Callable[..., None]:
    """Build `forge plan`; its options are the fields of `PlanSettings`, read strictly by `whole`, and a few of its own."""

    def plan(
        path: str,
        /,
        *,
        packing: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        **settings: Any,
    ) -> None:
        drawing = None if packing is None else _drawing(packing)
        chosen = {name: value for name, value in settings.items() if value is not None}
        batch_plan = _found(Path(path).expanduser(), chosen, world_size)
        at = 0 if step is None else _step(step, batch_plan)
        print(batch_plan.summary())
        if step is not None:
            print(_figures(batch_plan, at))
        if drawing is not None:
            print(_drawn(batch_plan, at, drawing))

    own = {
        "path": "A saved plan (plan.npz), a run directory, or a token store to plan for.",
        "packing": "Draw the step's load on each rank, and the fill over the run, into this SVG file.",
        "step": "Step whose figures are printed and drawn. By default step 0 is drawn.",
        "world_size": "Ranks to divide each step over. By default those of the plan, or 1.",
    }
    parameters = []
    for name, kind in (("path", str), ("packing", str | None), ("step", int | None), ("world_size", int | None)):
        about = cyclopts.Parameter(help=own[name], converter=whole if int in get_args(kind) else None)
        position = inspect.Parameter.POSITIONAL_ONLY if name == "path" else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if name == "path" else None
        parameters.append(inspect.Parameter(name, position, default=default, annotation=Annotated[kind, about]))
    group = cyclopts.Group("Plan")
    for field in attrs.fields(forge_packing.PlanSettings):
        text = field_texts(forge_packing.PlanSettings)[field.name]
        shown = "" if field.default is None else f" [default: {field.default}]"
        about = cyclopts.Parameter(help=text + shown, group=group, converter=whole)
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[int | None, about])
        )
    cast("Any", plan).__signature__ = inspect.Signature(parameters)
    plan.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    plan.__doc__ = (
        "Show which samples share a step and a micro-batch, and how well that fills the ranks; trains nothing.\n\n"
        "A saved plan can be shown on other ranks or with other micro-batches; for a token store every option counts. "
        "Example: forge plan runs/first --world-size 8 --packing packing.svg"
    )
    return plan


def _found(path: Path, chosen: Mapping[str, Any], world_size: int | None) -> forge_packing.BatchPlan:
    """The plan at this path, on the ranks and with the micro-batches that were asked for."""
    files = [path] if path.is_file() else [path / "plan.npz", path / "plan" / "plan.npz"]
    file = next((each for each in files if each.is_file()), None)
    if file is not None:
        loaded = forge_packing.BatchPlan.load(file)
        fixed = [name for name in _FIXED if name in chosen]
        if fixed:
            raise SettingsError(
                f"--{dashed(fixed[0])} has no effect on {file}: its steps are planned already. Only --world-size and "
                "--max-tokens-per-gpu can be tried on it; give a token store to plan anew."
            )
        tokens = chosen.get("max_tokens_per_gpu")
        _fits(int(loaded.lengths.max()), tokens)
        return loaded.reshape(world_size=world_size, max_tokens=tokens)
    if (path / "store.json").is_file():
        return _planned(path, chosen, world_size)
    raise SettingsError(
        f"{path} is no plan: give a plan.npz, a run directory (with plan/plan.npz in it), or a token store (with store.json in it)."
    )


def _planned(path: Path, chosen: Mapping[str, Any], world_size: int | None) -> forge_packing.BatchPlan:
    import forge_data

    try:
        settings = forge_packing.PlanSettings(**chosen)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error
    store = forge_data.TokenStore.open(path)
    if store.kind != "supervised":
        raise SettingsError(f"{path} holds rows of the kind {store.kind!r}; forge plan shows those of supervised fine-tuning.")
    tokens = settings.max_tokens_per_gpu
    _fits(int(store.lengths.max()), tokens)
    if tokens is None:
        import forge_accel

        machine, longest = forge_accel.accelerator("auto"), int(store.lengths.max())
        tokens = max(longest, machine.default_tokens)
        why = "the longest sample" if tokens == longest else f"what suits {machine.name}"
        print(f"max_tokens_per_gpu {tokens:,}: {why}")
    return forge_packing.plan(
        store.lengths,
        batch_size=settings.effective_batch_size,
        max_tokens=tokens,
        world_size=1 if world_size is None else world_size,
        seed=settings.seed,
        epochs=settings.epochs,
        max_steps=settings.max_steps,
        loss_counts=store.loss_counts,
        sources=None if store.weights is None else store.sources,
        weights=store.weights,
    )


def _fits(longest: int, tokens: int | None) -> None:
    if tokens is not None and tokens < longest:
        raise SettingsError(
            f"max_tokens_per_gpu={tokens:,} is less than the longest sample, {longest:,} tokens, and a sample is never cut. "
            f"Set --max-tokens-per-gpu to {longest} or more."
        )


def _step(step: int, batch_plan: forge_packing.BatchPlan) -> int:
    if batch_plan.endless:
        if step < 0:
            raise SettingsError(f"--step {step} is not in this plan: steps are counted from 0.")
    elif not 0 <= step < batch_plan.num_steps:
        raise SettingsError(f"--step {step} is not in this plan: it has {batch_plan.num_steps:,} steps, counted from 0.")
    return step


def _figures(batch_plan: forge_packing.BatchPlan, step: int) -> str:
    found = batch_plan.figures(step)
    return (
        f"step {step}: {found.samples:,} samples, {found.tokens:,} tokens, micro-batches: {found.micro_batches} a rank "
        f"(lower bound {found.fewest_micro_batches}), fill {found.fill:.1%}, "
        f"makespan {found.makespan / found.least_makespan:.3f} of its lower bound"
    )


def _drawing(packing: str) -> Path:
    file = Path(packing).expanduser()
    if file.suffix.lower() != ".svg":
        raise SettingsError(f"--packing {file}: the drawing is an SVG; give a file that ends in .svg.")
    return file


def _drawn(batch_plan: forge_packing.BatchPlan, step: int, file: Path) -> Path:
    from forge.reports._plan_svg import draw

    text = draw(batch_plan, step)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise RunDirectoryError(
            f"--packing {file}: cannot be written: {error.strerror or error}. Its directory must exist and be writable."
        ) from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            temporary.unlink()
    return file
