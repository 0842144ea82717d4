"""PEFT's layers in a model or around it: PEFT's parameters train, all others are frozen."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos._experts import Stack, expert_stacks
from forge_algos._modules import embeddings, head, headless
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.base._parts import kind_of, score
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.peft import _trained_rows as trained_rows
from forge_algos.adaptations.peft._dora import dora_attached
from forge_algos.adaptations.peft._experts import (
    check_parameters,
    keep_order,
    taken_for_experts,
    target_parameters,
    unquantized_experts,
)
from forge_algos.adaptations.peft._input_casts import follow_autocast
from forge_algos.adaptations.peft._limits import check_limits
from forge_algos.adaptations.peft._lora_init import Halves, Lora
from forge_algos.adaptations.peft._renamed import check_read_back, renamed_targets
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel


class PeftAdaptation(Adaptation):
    """PEFT's layers in a frozen model, or around it."""

    writes = "adapter"

    def __init__(
        self,
        model: "PeftModel",
        *notes: str,
        attach: "Callable[[PreTrainedModel, str, str], PeftModel] | None" = None,
        halves: Halves | None = None,
        identity: str = "",
    ) -> None:
        super().__init__(model)
        self._identity = identity
        self._notes = notes
        self._attach = attach
        self._halves = halves

    @property
    def attach(self) -> "Callable[[PreTrainedModel, str, str], PeftModel] | None":
        """Function that reads an export with trained rows or copied modules onto a divided base."""
        return self._attach

    @property
    def identity(self) -> str:
        """Digest of the directory that the adapter was read from; empty where it began here."""
        return self._identity

    def describe(self) -> list[str]:
        """Return lines for the log: which layers PEFT put where, and how many parameters train."""
        return [*self._notes, *super().describe()]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise OptimizerError where a decay of what is subtracted could not be undone."""
        if self._halves is not None:
            self._halves.check_optimizer(optimizer)

    def before_step(self) -> None:
        """Keep what init_lora_weights subtracts, where weights decay."""
        if self._halves is not None:
            self._halves.before_step()

    def after_step(self) -> None:
        """Undo the decay of what init_lora_weights subtracts."""
        if self._halves is not None:
            self._halves.after_step()


def attach_peft(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Put PEFT's layers into the linear layers and expert stacks that `target_modules` selects.

    Configuration and options stand in the adapter's row of `ADAPTERS`. New weights are PEFT's own draw at the same random
    state, or what `init_lora_weights` says, in float32 whatever the base's dtype.

    Raises:
        AdapterError: the adapter cannot carry expert matrices, or not with these settings; a pattern fits no target; the
            initialisation does not fit one.
    """
    targets, known = resolve_targets(model, settings.target_modules, context.parts), expert_stacks(model)
    stacks = {name: known[name] for name in targets if name in known}
    linear = [name for name in targets if name not in stacks]
    bypassed = [name for name in linear if settings.target_modules is None and _is_bypassed(model, name)]
    linear = [name for name in linear if name not in bypassed]
    notes = (
        [f"no target: {counted(len(bypassed), 'layers')} out_proj, which Mamba's kernels read themselves"] if bypassed else []
    )
    if settings.target_modules is None and (renamed := renamed_targets(model, config_class(settings), linear)):
        linear = [name for name in linear if name not in renamed]
        ends = ", ".join(dict.fromkeys(".".join(name.rsplit(".", 2)[-2:]) for name in renamed))
        notes.append(
            f"no target: {counted(len(renamed), 'layers')} {ends}, whose adapters PEFT would not find when it reads them"
        )
    taken = taken_for_experts(model, config_class(settings), linear)
    check_parameters(model, settings, config_class(settings), stacks, taken)
    lora = None
    if "rank_pattern" in ADAPTERS[settings.adapter].fields:
        lora = Lora.of(model, settings, [name for name in linear if name not in taken], [*stacks, *taken], context)
        linear = [name for name in linear if name not in lora.left_out]
        notes += lora.notes
    arguments: dict[str, Any] = {"target_modules": short_names(model, [name for name in linear if name not in taken])}
    parameters = [stack.parameter for stack in stacks.values()] + [f"{name}.weight" for name in taken]
    if parameters:
        arguments["target_parameters"] = target_parameters(model, parameters)
    if ADAPTERS[settings.adapter].quantized and known:
        notes.append(unquantized_experts(known))
    return attach_to_targets(
        model,
        settings,
        linear,
        notes,
        stacks=stacks,
        parameters=parameters,
        new_tokens=context.new_tokens,
        lora=lora,
        **arguments,
    )


_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def _is_bypassed(model: nn.Module, name: str) -> bool:
    """Return whether kernels read a layer's weight past its call.
    PEFT refuses LoRA there by name.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in _MAMBA and name.rpartition(".")[2] == "out_proj"


def attach_to_targets(
    model: nn.Module,
    settings: AdapterSettings,
    targets: Sequence[str],
    notes: Sequence[str] = (),
    *,
    stacks: Mapping[str, Stack] | None = None,
    parameters: Sequence[str] = (),
    new_tokens: Sequence[int] = (),
    lora: Lora | None = None,
    **arguments: Any,
) -> Adaptation:
    """Put PEFT's layers into `targets` (full names of linear layers) and around `stacks`.

    A reward model's layer `score`, which is newly initialised or nearly so, is trained whole beside them and saved with them;
    so are `modules_to_save`, and the rows of new tokens.

    Args:
        model: the base.
        settings: of the adapter.
        targets: full names of linear layers.
        notes: further lines for the log.
        stacks: expert matrices among the targets.
        parameters: full names of the parameters, of stacks and of layers, that PEFT wraps instead of their modules.
        new_tokens: ids whose rows train beside them.
        lora: ranks, scales and first values, of an adapter that has them.
        arguments: of PEFT's configuration.

    Raises:
        AdapterError: an adapter on a target would be lost, PEFT refuses the model, or adapts something else than asked.
    """
    check_tops(model, targets)
    check_limits(model, settings, targets)
    if any(field.name == "fan_in_fan_out" for field in dataclasses.fields(config_class(settings))):
        transposed = [isinstance(model.get_submodule(name), Conv1D) for name in targets]
        arguments["fan_in_fan_out"] = bool(transposed) and all(transposed)
    beside = trained_rows.arguments_of(model, settings, targets, new_tokens)
    of_lora = {} if lora is None else lora.arguments
    config = peft_config(settings, task_type_of(model), **arguments, **beside, **of_lora)
    lines = [*described(model, settings, targets, stacks or {}), *trained_rows.describe(model, beside)]
    with (
        dora_attached(model, targets) if getattr(config, "use_dora", False) else nullcontext(),
        trained_rows.readable(model, beside),
    ):
        attached: Any = attached_by(model, config)
    _check_attached(attached, {*parameters, *(name for name in targets if f"{name}.weight" not in parameters)})
    check_read_back(attached)
    keep_order(attached, parameters)
    trained_rows.prepare(attached)
    halves = None if lora is None else lora.initialise(attached)
    follow_autocast(attached)
    lines = with_full_factors(lines, attached, settings)
    return PeftAdaptation(attached, *lines, *notes, attach=trained_rows.read_onto if beside else None, halves=halves)


def peft_config(settings: AdapterSettings, task_type: str | None, **arguments: Any) -> "PeftConfig":
    """Make PEFT's configuration from the adapter's row, its settings and further arguments."""
    kind = ADAPTERS[settings.adapter]
    own = {argument: getattr(settings, field) for argument, field in kind.arguments.items()}
    return config_class(settings)(task_type=task_type, **{**own, **kind.options, **arguments})


def config_class(settings: AdapterSettings) -> Any:
    """Return PEFT's configuration class of the adapter."""
    # peft takes four seconds to import: only those who attach an adapter wait for it.
    import peft

    return getattr(peft, ADAPTERS[settings.adapter].peft)


def task_type_of(model: nn.Module) -> str | None:
    """Return PEFT's name for the kind of model: SEQ_CLS, FEATURE_EXTRACTION or CAUSAL_LM.

    A model with a layer `score`, which PEFT trains and saves itself, one without a head, any other of transformers'; None of no
    kind of those.
    """
    if score(model) is not None:
        return "SEQ_CLS"
    if getattr(model, "config", None) is None and not hasattr(model, "prepare_inputs_for_generation"):
        return None  # PEFT's wrapper of a causal model asks for it
    return "FEATURE_EXTRACTION" if headless(model) else "CAUSAL_LM"


def attached_by(model: nn.Module, config: "PeftConfig") -> "PeftModel":
    """Return PEFT's wrapper around the model, or raise AdapterError with its refusal."""
    from peft import get_peft_model

    target: Any = model
    made: Any
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 uses a deprecated alias of transformers 5.23, which the caller cannot change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            # Where both of GPT-2's kinds of linear layers are targets PEFT corrects it for each, and warns.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            # Of an adapter that exists, whose values are read.
            warnings.filterwarnings("ignore", message="The symmetric initialization can NOT")
            warnings.filterwarnings("ignore", message="`lora_bias=True` was passed")
            # PEFT gives fused experts a rank of their own, and warns where they are no target.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            made = get_peft_model(target, config)
    except ValueError as error:
        raise AdapterError(f"PEFT cannot attach the adapter to {type(model).__name__}: {error}") from error
    # PEFT keeps sets, which every process would write in another order.
    for name in ("target_modules", "target_parameters", "feedforward_modules", "modules_to_save"):
        if isinstance(names := getattr(config, name, None), set):
            setattr(config, name, sorted(names))
    return made


def _check_attached(model: Any, planned: set[str]) -> None:
    """Refuse a model on which PEFT adapted other layers than those that were planned."""
    tuner = model.base_model
    found = {*tuner.targeted_module_names, *getattr(tuner, "targeted_parameter_names", ())}
    if found != planned:
        name = min(found ^ planned)
        raise AdapterError(
            f"PEFT {'left out' if name in planned else 'adapted'} {name}, against what target_modules says "
            f"({len(found ^ planned)} such differences): name the targets by other names, or use another version of peft"
        )


def check_tops(model: nn.Module, targets: Sequence[str], *, stored: bool = False) -> None:
    """Refuse targets on which an adapter would be lost: `score`, which PEFT skips; a tied head.

    One that is `stored` is there: on a tied head it trains, and stays beside its base.
    """
    top, table = head(model), embeddings(model)
    tied = top is not None and table is not None and top.weight is table.weight
    for name in targets:
        module = model.get_submodule(name)
        if module is score(model):
            raise AdapterError(f"target_modules: {name} is trained whole beside the adapters already; leave it out")
        if module is top and tied and not stored:
            raise AdapterError(
                f"target_modules: {name} shares its weight with the embeddings, so that an adapter on it could not be merged; "
                "leave it out"
            )


def described(model: nn.Module, settings: AdapterSettings, targets: Sequence[str], stacks: Mapping[str, Stack]) -> list[str]:
    """Return lines for the log: the adapter, its rank and its targets by kind of layer."""
    setting = ADAPTERS[settings.adapter].rank
    rank = f" of rank {getattr(settings, setting)}" if setting else ""
    counts = [counted(len(targets), "linear layers")] if targets or not stacks else []
    counts += [f"{sum(stack.shape[0] for stack in stacks.values()):,} expert matrices"] if stacks else []
    parts: dict[str, dict[str, None]] = {}
    for name in [*targets, *stacks]:
        parts.setdefault(kind_of(model, name) or "outside of the layers", {})[name.rpartition(".")[2]] = None
    named = "; ".join(f"{kind}: {', '.join(parts[kind])}" for kind in parts)
    whole = [] if score(model) is None else ["score is trained whole"]
    return [f"{settings.adapter}{rank} on {' and '.join(counts)} ({named})", *whole]


def with_full_factors(lines: Sequence[str], attached: nn.Module, settings: AdapterSettings) -> list[str]:
    """Return the lines of a log, with the factors that PEFT trains whole whatever the rank."""
    kind = ADAPTERS[settings.adapter]
    layers = [found for module in attached.modules() if kind.full and (found := getattr(module, kind.full, None)) is not None]
    full = sum(len(factor) > 0 for factor in layers)
    if not full or kind.rank is None:
        return [*lines]
    rank = getattr(settings, kind.rank)
    said = (
        f"{full} of {counted(len(layers), 'layers')} train {kind.full} as one full matrix: rank {rank} is half of its longer "
        "side or more, and only divides lora_alpha in their scale"
    )
    first, *rest = lines
    return [first.replace(f" of rank {rank} ", " of full rank ", 1) if full == len(layers) else first, said, *rest]
