"""Saved batch plan, or one for a token store → its summary, a step's figures, a drawing."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args

import attrs
import cyclopts

import forge_packing
from forge._counted import counted
from forge._errors import RunDirectoryError, SettingsError
from forge.cli._options import converter_of, field_texts, with_signature

_FIXED = ("effective_batch_size", "num_epochs", "max_steps", "max_tokens", "seed", "shuffle")
_OWN = {
    "path": (str, "A saved plan (plan.npz), a run directory, or a token store to plan for."),
    "draw": (
        str | None,
        "Write a page that shows the step's load on each rank, and the fill over the run, into this HTML file.",
    ),
    "step": (int | None, "Step whose figures are printed and drawn, counted from 1. By default step 1 is drawn."),
    "world_size": (int | None, "Ranks to divide each step over. By default those of the plan, or 1."),
}

_ASSUMED = (
    "assumed        a model and settings with which samples can share what they begin with; a run where they cannot plans "
    "without"
)
"""Line below the summary of a plan for a store: no model is known, nor what it can do."""


def plan_command() -> Any:
    """Build `forge plan`; its options are the fields of `PlanSettings` and a few of its own."""

    def plan(
        path: str,
        /,
        *,
        draw: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        **settings: Any,
    ) -> None:
        drawing = None if draw is None else _drawing(draw)
        chosen = {name: value for name, value in settings.items() if value is not None}
        batch_plan = _load_or_make(Path(path).expanduser(), chosen, world_size)
        at = 0 if step is None else _checked_step(step, batch_plan)
        print(batch_plan.summary())
        if batch_plan.prefixes is not None and _saved_plan(Path(path).expanduser()) is None:
            print(_ASSUMED)
        if step is not None:
            print(_figures(batch_plan, at))
        if drawing is not None:
            print(_draw(batch_plan, at, drawing, Path(path).expanduser().resolve()))

    parameters = []
    for name, (kind, text) in _OWN.items():
        about = cyclopts.Parameter(help=text, converter=converter_of({int} if kind == int | None else set()))
        position = inspect.Parameter.POSITIONAL_ONLY if name == "path" else inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if name == "path" else None
        parameters.append(inspect.Parameter(name, position, default=default, annotation=Annotated[kind, about]))
    group = cyclopts.Group("Plan")
    for field in attrs.fields(forge_packing.PlanSettings):
        text = field_texts(forge_packing.PlanSettings)[field.name]
        shown = "" if field.default is None else f" [default: {field.default}]"
        kind = field.type | None
        about = cyclopts.Parameter(help=text + shown, group=group, converter=converter_of({*get_args(kind)}))
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, about])
        )
    command = with_signature(
        plan,
        parameters,
        "Show which samples share a step and a micro-batch, and how well that fills the ranks; trains nothing.\n\n"
        "A saved plan can be shown on other ranks or with other micro-batches; for a token store every option counts. "
        "Example: forge plan runs/first --world-size 8 --draw plan.html",
    )
    # The names of forge_packing.plan, in its messages.
    command.flags |= {"batch_size": "--effective-batch-size"}
    return command


def _load_or_make(path: Path, chosen: Mapping[str, Any], world_size: int | None) -> forge_packing.BatchPlan:
    """Load the plan at a path, or make one for the store there, on these ranks."""
    try:
        settings = forge_packing.PlanSettings(**chosen)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error
    if (file := _saved_plan(path)) is not None:
        loaded = forge_packing.BatchPlan.load(file)
        fixed = [name for name in _FIXED if name in chosen]
        if fixed:
            raise SettingsError(
                f"{fixed[0]} has no effect on {file}: its steps are planned already. Only world_size and max_tokens_per_gpu "
                "can be tried on it; give a token store to plan anew."
            )
        tokens = chosen.get("max_tokens_per_gpu")
        _check_fit(int(loaded.lengths.max()), tokens)
        return loaded.reshape(world_size=world_size, max_tokens=tokens)
    if (path / "store.json").is_file():
        return _make(path, settings, world_size)
    raise SettingsError(
        f"{path} is no plan: give a plan.npz, a run directory (with plan/plan.npz in it), or a token store (with store.json in "
        "it)."
    )


def _saved_plan(path: Path) -> Path | None:
    """Return the file of a saved plan, or of the plan of a run; None for another path."""
    files = [path] if path.is_file() else [path / "plan.npz", path / "plan" / "plan.npz"]
    return next((each for each in files if each.is_file()), None)


def _make(path: Path, settings: forge_packing.PlanSettings, world_size: int | None) -> forge_packing.BatchPlan:
    """Plan for a token store as training would."""
    import forge_data
    from forge.tasks.items._samples import items_of

    store = forge_data.TokenStore.open(path)
    if store.kind != "supervised":
        raise SettingsError(f"{path} holds rows of the kind {store.kind!r}; forge plan shows those of supervised fine-tuning.")
    items, tokens = items_of(store), settings.max_tokens_per_gpu
    _check_fit(int(items.lengths.max()), tokens)
    if tokens is None:
        import forge_accel

        machine, longest = forge_accel.accelerator("auto"), int(items.lengths.max())
        tokens = max(longest, machine.default_tokens)
        why = "the longest sample" if tokens == longest else f"what suits {machine.name}"
        print(f"max_tokens_per_gpu {tokens:,}: {why}")
    endless = forge_packing.plan(
        items.lengths,
        batch_size=settings.effective_batch_size,
        max_tokens=tokens,
        world_size=1 if world_size is None else world_size,
        seed=settings.seed,
        shuffle=settings.shuffle,
        epochs=None,
        loss_counts=items.loss_counts,
        sources=items.sources,
        weights=items.weights,
        **items.prefixes,
    )
    return endless.until(epochs=settings.epochs, max_steps=settings.last_step(endless.steps_to))


def _check_fit(longest: int, tokens: int | None) -> None:
    """Raise SettingsError where a sample is longer than a micro-batch."""
    if tokens is not None and tokens < longest:
        raise SettingsError(
            f"max_tokens_per_gpu={tokens} is less than the longest sample, {longest:,} tokens, and a sample is never cut. "
            f"Set max_tokens_per_gpu to {longest} or more."
        )


def _checked_step(step: int, batch_plan: forge_packing.BatchPlan) -> int:
    """Return the place of a step that is counted from 1.

    Raises:
        SettingsError: the plan does not have it.

    """
    if batch_plan.endless:
        if step < 1:
            raise SettingsError(f"step={step} is not in this plan: steps are counted from 1.")
    elif not 1 <= step <= batch_plan.num_steps:
        raise SettingsError(
            f"step={step} is not in this plan: it has {counted(batch_plan.num_steps, 'steps')}, counted from 1."
        )
    return step - 1


def _figures(batch_plan: forge_packing.BatchPlan, step: int) -> str:
    """Describe the load of a step, by its place in the plan."""
    found = batch_plan.figures(step)
    return (
        f"step {step + 1}: {counted(found.samples, 'samples')}, {counted(found.tokens, 'tokens')}, micro-batches: "
        f"{found.micro_batches} a rank (of at least {found.fewest_micro_batches}), fill {found.fill:.1%}, "
        f"ranks wait {1 - 1 / found.imbalance:.1%} of the time for the slowest"
    )


def _drawing(draw: str) -> Path:
    """Return the path of the page. Raises SettingsError where it is no HTML file."""
    file = Path(draw).expanduser()
    if file.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(f"draw={file}: the drawing is a page for a browser; give a file that ends in .html.")
    return file


def _draw(batch_plan: forge_packing.BatchPlan, step: int, file: Path, path: Path) -> Path:
    """Write the page of a plan, at once or not at all."""
    from forge.reports._plan_page import plan_page

    # Of `runs/first/plan/plan.npz` it is the run that says what it is.
    named = path.parents[1] if path.name == "plan.npz" and path.parent.name == "plan" else path
    text = plan_page(batch_plan, step, named.name)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise RunDirectoryError(
            f"draw={file}: cannot be written: {error.strerror or error}. Its directory must exist and be writable."
        ) from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            temporary.unlink()
    return file
