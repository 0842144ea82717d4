"""Flat names and values → the settings of every package, each value with its origin.

Each leaf package owns its settings; this file only composes them. `RunSettings` names the groups, a verb's own class says which
data and objective it has; signatures, the command line, recipes and `config.yaml` are derived from it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import typing
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Self, TypeVar, cast, get_args

import attrs

import forge_accel
import forge_algos
import forge_dist
import forge_packing
from forge._counted import counted
from forge._errors import SettingsError
from forge.settings._backends import FORGE, BackendSettings, backend_class
from forge.settings._converted import converted
from forge.settings._elsewhere import unknown
from forge.settings._origin import origin_note
from forge.settings._share import steps_between
from forge.settings._storage import StorageSettings
from forge.settings._together import check_optimizer, check_qat
from forge.settings._trackers import TrackerSettings

T = TypeVar("T")
_PASSED_ON = "passed_on"
"""Group of the settings that belong to the chosen backend alone."""


def _above_zero(_: object, field: attrs.Attribute[float], value: object) -> None:
    """Raise unless the value is a finite number above 0; True is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{field.name} must be a number, not {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{field.name} must be above 0 and finite, not {value!r}")


def _whole(_: object, field: attrs.Attribute[int], value: object) -> None:
    """Raise TypeError unless the value is a whole number; True and False are none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field.name} must be a whole number, not {value!r}")


def _steps_or_share(_: object, field: attrs.Attribute[float], value: object) -> None:
    """Raise unless the value is a whole number of steps, or a share below 1 of all of them."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{field.name} must be a whole number, or a share below 1, not {value!r}")
    if not (0 <= value < 1 or (isinstance(value, int) and value >= 1)):
        raise ValueError(f"{field.name} must be 0, a whole number of steps, or a share of the run below 1, not {value!r}")


def row_tokens(s: Any) -> int:
    """Return the most tokens of a packed row, which the ranks of `cp_size` share."""
    return s.plan.max_tokens_per_gpu * s.strategy.cp_size


def row_keys(s: Any) -> int:
    """Return the most keys that samples of a packed row attend to, where they share tokens."""
    return forge_packing.most_keys(row_tokens(s))


@attrs.frozen(kw_only=True)
class ReportSettings:
    """Settings of the progress report."""

    logging_steps: int = attrs.field(default=1, validator=[_whole, attrs.validators.ge(1)])
    """Print a line to the log every so many steps (metrics.jsonl has every step)."""
    quiet: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Print warnings and how the run ends alone, and no progress; log.txt in the run directory has every line all the same."""


Metric = Literal[
    "loss", "accuracy", "reward", "margin", "chosen_reward", "rejected_reward", "chosen_logp", "rejected_logp", "log_odds",
    "nll", "kl", "f1", "mrr",
]  # fmt: skip


@attrs.frozen(kw_only=True)
class EvaluationSettings:
    """Settings of the evaluation on held-out data, and of what follows from it."""

    eval_every_steps: int | float = attrs.field(default=0, validator=_steps_or_share)
    """Measure on the held-out data every so many steps, or below 1 after each such share of the run (0.1: ten times);
    0 measures before and after training only."""
    eval_at_epoch: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Measure on the held-out data at the end of each epoch too."""
    keep_best: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Export the model to hf_format/best whenever a measurement (eval_every_steps, eval_at_epoch, the last) is the best."""
    metric_for_best: Metric | None = attrs.field(
        default=None, validator=cast("Any", attrs.validators.optional(attrs.validators.in_(get_args(Metric))))
    )
    """Held-out figure that decides which model is best, named as in metrics.jsonl after `eval_`. Losses, nll, kl and figures of
    rejected answers are best low, the others high. By default the loss, and the reward of online methods."""
    early_stopping_patience: int = attrs.field(default=0, validator=[_whole, attrs.validators.ge(0)])
    """End the run once so many measurements in a row brought nothing better; 0 never does."""
    eval_prompts: tuple[str, ...] | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            attrs.validators.deep_iterable(attrs.validators.instance_of(str), attrs.validators.instance_of(tuple))
        ),
    )
    """Prompts that the model answers at each measurement, in the log and in answers.jsonl. A file's name stands for its lines,
    or its rows (.jsonl, with prompt or messages, which may have images)."""
    eval_max_new_tokens: int = attrs.field(default=64, validator=[_whole, attrs.validators.ge(1)])
    """End each of these answers after so many tokens."""
    kl_base: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Measure also how far the model has moved from the one it began as: `kl_base`, KL(base ‖ model) in nats a token, over the
    learned tokens of the held-out rows, or over the completions of held-out prompts. Where no adapter can be switched off, a
    second, frozen copy of the model is loaded."""
    stop_at_kl: float | None = attrs.field(default=None, validator=attrs.validators.optional(cast("Any", _above_zero)))
    """End the run at the first measurement whose `kl_base` has reached this; the model is exported as at any other end."""

    def steps_between(self, num_steps: int | None) -> int:
        """Return the steps from one measurement to the next in a run of `num_steps`; 0 for none."""
        return steps_between(self.eval_every_steps, num_steps)

    def __attrs_post_init__(self) -> None:
        between = self.eval_every_steps or self.eval_at_epoch
        if self.stop_at_kl is not None and not (self.kl_base and between):
            lacks = "kl_base" if not self.kl_base else "eval_every_steps or eval_at_epoch"
            raise ValueError(f"stop_at_kl has no effect without {lacks}: set that too, or leave it out")
        if self.early_stopping_patience and not between:
            raise ValueError(
                "early_stopping_patience has no effect without measurements: set eval_every_steps or eval_at_epoch, or leave "
                "it out"
            )
        if self.metric_for_best is not None and not (self.keep_best or self.early_stopping_patience):
            raise ValueError(
                f"metric_for_best={self.metric_for_best!r} has no effect without keep_best or early_stopping_patience: set "
                "one, or leave it out"
            )


@attrs.frozen(kw_only=True)
class RunSettings:
    """Settings that every verb has, grouped by the package that owns them."""

    model: forge_dist.ModelSettings
    data: Any
    objective: Any
    plan: forge_packing.PlanSettings
    optimizer: forge_algos.OptimizerSettings
    adapter: forge_algos.AdapterSettings
    packing: forge_algos.PackingSettings
    moe: forge_algos.MoESettings
    parts: forge_algos.PartSettings
    qat: forge_algos.QATSettings
    device: forge_accel.DeviceSettings
    strategy: forge_dist.StrategySettings
    launch: forge_dist.LaunchSettings
    checkpoints: forge_dist.CheckpointSettings
    storage: StorageSettings
    evaluation: EvaluationSettings
    report: ReportSettings
    tracking: TrackerSettings
    backend: BackendSettings
    origins: Mapping[str, str]
    """Setting → where its value came from: default, recipe FILE, flag, argument, chosen or environment."""

    def resolved(self, name: str, value: object, reason: str) -> Self:
        """Return a copy with a value chosen for a setting that was left open, and the reason."""
        chosen = self.with_value(next(owner for owner, field in flat_fields(type(self)) if field.name == name), name, value)
        # The log names the value with its reason ("float32: the exact choice"); beside a setting it stands already.
        return attrs.evolve(chosen, origins={**self.origins, name: f"chosen: {reason.removeprefix(f'{value}: ')}"})

    def check_length(self, num_steps: int | None) -> None:
        """Raise SettingsError for a warm-up, or one with a decay, that is longer than the run."""
        if num_steps is None:
            return
        if self.optimizer.warmup_steps > num_steps:
            raise SettingsError(
                f"warmup_steps={self.optimizer.warmup_steps} is more than the {counted(num_steps, 'steps')} of this run: the "
                "learning rate would never reach learning_rate. Lower warmup_steps, or train longer."
            )
        warmup, decay = self.optimizer.warmup(num_steps), self.optimizer.decay_steps
        if decay is not None and warmup + decay > num_steps:
            by = f"warmup_ratio={self.optimizer.warmup_ratio:g}, here " if self.optimizer.warmup_ratio else ""
            raise SettingsError(
                f"decay_steps={decay} after {by}warmup_steps={warmup}: more than the {counted(num_steps, 'steps')} of this "
                "run: lower one of them, or train longer."
            )

    def check(self) -> None:
        """Raise SettingsError, by name, for a setting that has no effect with the others."""
        self.check_length(self.plan.max_steps)
        check_optimizer(self.optimizer, self.adapter)
        check_qat(self)
        default = attrs.fields(EvaluationSettings).eval_max_new_tokens.default
        if self.evaluation.eval_prompts is None and self.evaluation.eval_max_new_tokens != default:
            raise SettingsError("eval_max_new_tokens has no effect without eval_prompts: set that too, or leave it out.")
        if self.checkpoints.save_dtype is not None and self.adapter.adapter not in ("none", "osft"):
            raise SettingsError(
                f"save_dtype={self.checkpoints.save_dtype} has no effect with adapter={self.adapter.adapter}, which is "
                "exported alone and in float32: leave it out. forge export --merge --dtype writes a whole model."
            )
        limited = self.plan.max_steps is not None or self.plan.max_tokens is not None
        if self.plan.num_epochs == "inf" and not limited and self.optimizer.warmup_ratio:
            raise SettingsError(
                f"num_epochs=inf has no end, and warmup_ratio={self.optimizer.warmup_ratio:g} is a share of all steps: give "
                "warmup_steps, or max_steps or max_tokens."
            )
        if self.plan.num_epochs == "inf" and not limited and self.optimizer.needs_length:
            known = " or ".join(forge_algos.SCHEDULES_WITHOUT_LENGTH)
            raise SettingsError(
                f"num_epochs=inf has no end, which lr_scheduler={self.optimizer.lr_scheduler} needs to know: set lr_scheduler="
                f"{known}, or give max_steps or max_tokens."
            )
        shares = {
            "eval_every_steps": (self.evaluation.eval_every_steps, "steps"),
            "save_samples": (self.checkpoints.save_samples, "samples"),
            "full_state_every_steps": (self.checkpoints.full_state_every_steps, "steps"),
        }
        for name, (share, unit) in shares.items():
            if self.plan.num_epochs == "inf" and not limited and 0 < share < 1:
                raise SettingsError(
                    f"num_epochs=inf has no end, and {name}={share:g} is a share of all steps: give a number of {unit}, or "
                    "max_steps or max_tokens."
                )
        if self.data.eval_data_path or self.data.validation_split:
            return
        asked = ("eval_every_steps", "eval_at_epoch") if self.evaluation.eval_prompts else ()
        for name in ("eval_every_steps", "eval_at_epoch", "keep_best", "early_stopping_patience", "kl_base"):
            if getattr(self.evaluation, name) and name not in asked:
                raise SettingsError(
                    f"{name} has no effect without held-out data: set eval_data_path or validation_split, or leave it out."
                )

    def digest(self) -> str:
        """Return the sha256 (hex) of all values but the launch settings, which differ by node."""
        shared = {name: attrs.asdict(getattr(self, name)) for name in sorted(groups(type(self))) if name != "launch"}
        return hashlib.sha256(json.dumps(shared, sort_keys=True, default=list).encode()).hexdigest()

    def with_value(self, group: str, name: str, value: object) -> Self:
        """Return a copy with another value of a setting and its origin kept."""
        return attrs.evolve(self, **{group: attrs.evolve(getattr(self, group), **{name: value})})


def flat_fields(settings_class: type) -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """Yield `(group, field)` for every setting of a composed class, with types resolved."""
    for group, owner in groups(settings_class).items():
        attrs.resolve_types(owner)
        for field in attrs.fields(owner):
            yield group, field


def groups(settings_class: type) -> dict[str, type]:
    """Return the attrs class of every group by name, in the order of `RunSettings`."""
    hints = typing.get_type_hints(settings_class)
    # A verb's class declares data and objective again, which puts them last; a backend's own settings come after all.
    own = {field.name: field.type for field in attrs.fields(settings_class) if field.name == _PASSED_ON}
    return {field.name: hints[field.name] for field in attrs.fields(RunSettings) if field.name != "origins"} | own


def with_own_settings(settings_class: Any, name: object) -> Any:
    """Add a backend's own settings to a verb's settings class, as one more group.

    Raises:
        SettingsError: there is no such backend, or one of its settings has the name of a setting that every backend has.

    """
    if not isinstance(name, str) or name == FORGE:
        return settings_class
    own = backend_class(name).Settings
    return settings_class if own is None else _composed(settings_class, own, name)


@cache
def _composed(settings_class: Any, own: type, name: str) -> Any:
    taken = {field.name for _, field in flat_fields(settings_class)} & {field.name for field in attrs.fields(own)}
    if taken:
        raise SettingsError(f"backend={name}: its settings {', '.join(sorted(taken))} have names that forge has already.")
    group = attrs.field(type=own, kw_only=True)
    return attrs.make_class(settings_class.__name__, {_PASSED_ON: group}, bases=(settings_class,), frozen=True, kw_only=True)


def signature_of(settings_class: type) -> inspect.Signature:
    """Return the signature `(recipe=None, /, *, setting=default, ...)` of a settings class."""
    recipe = inspect.Parameter("recipe", inspect.Parameter.POSITIONAL_ONLY, default=None, annotation=str | None)
    keywords = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.default is attrs.NOTHING else field.default,
            annotation=field.type,
        )
        for _, field in flat_fields(settings_class)
    ]
    return inspect.Signature([recipe, *keywords])


def resolve(settings_class: type[T], *layers: tuple[str, Mapping[str, object]]) -> T:
    """Compose settings from layers, later ones winning.

    A layer is `(origin, values)`, such as `("recipe r.yaml", {...})` or `("flag", {...})`. Raises one `SettingsError` that
    names all faults: unknown names (with what they are here), values of the wrong type or range, required settings that are
    missing. Where the layers name a backend, its own settings belong to the class.
    """
    backend = next((layer["backend"] for _, layer in reversed(layers) if layer.get("backend") is not None), None)
    settings_class = with_own_settings(settings_class, backend)
    fields = {field.name: (group, field) for group, field in flat_fields(settings_class)}
    values: dict[str, dict[str, object]] = {group: {} for group in groups(settings_class)}
    origins = dict.fromkeys(fields, "default")
    unknown_names: dict[str, str] = {}
    nested: set[str] = set()
    broken: set[str] = set()
    refused: set[str] = set()
    faults: list[str] = []
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in fields:
                unknown_names[name] = origin
                if isinstance(value, Mapping):
                    nested.add(name)
                continue
            group, field = fields[name]
            origins[name] = origin
            try:
                values[group][name] = converted(field, value, origin)
            except SettingsError as error:
                faults.append(str(error))
                broken.add(group)
                refused.add(name)
    if unknown_names:
        faults.insert(0, unknown(unknown_names, fields, nested=nested))
    given = {name for group in values.values() for name, value in group.items() if value is not None}
    missing = [name for name in required(settings_class, given) if name not in given | refused]
    # A required setting under its name elsewhere is missing for that reason only.
    if missing and not unknown_names:
        several = f"{', '.join(missing)} are required: give them here or in a recipe."
        or_other = "".join(f", or `{fields[name][1].metadata['or']}`" for name in missing if "or" in fields[name][1].metadata)
        one = f"{missing[0]} is required: give it here or in a recipe{or_other}."
        faults.append(several if len(missing) > 1 else one)
    built = {}
    for group, owner in groups(settings_class).items():
        incomplete = group in broken or any(fields[name][0] == group for name in missing)
        found = [] if incomplete else _built(built, group, owner, values[group])
        # A class stops at its first fault, and is not made of values that are missing or of another type.
        for message in (_out_of_range(owner, values[group]) if found or incomplete else []) or found:
            name = _named_in(message, values[group])
            faults.append(f"{message}{origin_note(origins[name]) if name else ''}")
    if faults:
        raise SettingsError(faults[0] if len(faults) == 1 else "\n".join([f"{len(faults)} faults in the settings:", *faults]))
    compose = cast("Callable[..., T]", settings_class)
    settings = compose(**built, origins=origins)
    cast("RunSettings", settings).check()
    return settings


def _built(built: dict[str, object], group: str, owner: type, values: Mapping[str, object]) -> list[str]:
    """Make the settings of a group, or return the fault with which their class refuses them."""
    try:
        built[group] = owner(**values)
    except (ValueError, TypeError) as error:
        return [str(error.args[0])]
    return []


def _out_of_range(owner: type, values: Mapping[str, object]) -> list[str]:
    """Return the fault of each value that the validator of its own field refuses."""
    found = []
    for field in attrs.fields(owner):
        if values.get(field.name) is not None and field.validator is not None:
            convert = cast("Callable[[object], object]", field.converter or (lambda value: value))
            try:
                field.validator(None, field, convert(values[field.name]))
            except (ValueError, TypeError) as error:
                found.append(str(error.args[0]))
    return found


def required(settings_class: type, given: Container[str] = ()) -> list[str]:
    """Return the names of the settings that must be given.

    They have no default, or an "or" in their metadata that names another setting, which is not `given`.
    """
    return [field.name for _, field in flat_fields(settings_class) if _must_be_given(field, given)]


def _must_be_given(field: attrs.Attribute[Any], given: Container[str]) -> bool:
    other = field.metadata.get("or")
    return field.default is attrs.NOTHING if other is None else other not in given


def dashed(name: str) -> str:
    """Return a setting's name with dashes, as a flag has it."""
    return name.replace("_", "-")


def _named_in(message: str, given: Mapping[str, object]) -> str | None:
    """Return the given setting that a validator's message names."""
    return next((name for name in given if f"'{name}'" in message or message.startswith(name)), None)
