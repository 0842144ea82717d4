"""PEFT's layers in a model or around it: PEFT's parameters train, all others are frozen."""

import dataclasses
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings, head
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.base._targets import kind_of, resolve_targets, score, stacked_experts
from forge_algos.adaptations.peft._dora import dora_attached
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


class PeftAdaptation(Adaptation):
    """PEFT's layers in a frozen model, or around it."""

    writes = "adapter"

    def __init__(self, model: "PeftModel", *notes: str) -> None:
        super().__init__(model)
        self._notes = notes

    def describe(self) -> list[str]:
        """Return lines for the log: which layers PEFT put where, and how many parameters train.

        Weights in 4 bits are counted as the numbers that they stand for.
        """
        model: Any = self.model
        trained, total = model.get_nb_trainable_parameters()
        return [*self._notes, f"trains {trained:,} of {total:,} parameters ({100 * trained / max(total, 1):.2f} %)"]


def attach_peft(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Put PEFT's layers into the linear layers that `target_modules` selects.

    Configuration and options stand in the adapter's row of `ADAPTERS`. New weights are PEFT's own draw at the same random
    state, in float32 whatever the base's dtype.
    """
    del context
    targets = resolve_targets(model, settings.target_modules)
    notes = []
    if settings.target_modules is None:
        bypassed = [name for name in targets if _is_bypassed(model, name)]
        targets = [name for name in targets if name not in bypassed]
        notes = [f"no target: {len(bypassed)} layers out_proj, which Mamba's kernels read themselves"] if bypassed else []
        notes += stacked_experts(model)
    return attach_to_targets(model, settings, targets, notes, target_modules=short_names(model, targets))


_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def _is_bypassed(model: nn.Module, name: str) -> bool:
    """Return whether kernels read a layer's weight past its call, where PEFT refuses LoRA."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in _MAMBA and name.rpartition(".")[2] == "out_proj"


def attach_to_targets(
    model: nn.Module, settings: AdapterSettings, targets: Sequence[str], notes: Sequence[str] = (), **arguments: Any
) -> Adaptation:
    """Put PEFT's layers into `targets` (full names); `arguments` go to PEFT's configuration.

    A reward model's layer `score`, which is newly initialised or nearly so, is trained whole beside them and saved with them.

    Raises:
        AdapterError: an adapter on a target would be lost, or PEFT refuses the model.
    """
    _check_tops(model, targets)
    if any(field.name == "fan_in_fan_out" for field in dataclasses.fields(config_class(settings))):
        arguments["fan_in_fan_out"] = all(isinstance(model.get_submodule(name), Conv1D) for name in targets)
    config = peft_config(settings, task_type_of(model), **arguments)
    described = _described(model, settings, targets)
    with dora_attached(model, targets) if getattr(config, "use_dora", False) else nullcontext():
        attached = _attached(model, config)
    return PeftAdaptation(attached, *described, *notes)


def peft_config(settings: AdapterSettings, task_type: str, **arguments: Any) -> "PeftConfig":
    """Make PEFT's configuration from the adapter's row, its settings and further arguments."""
    kind = ADAPTERS[settings.adapter]
    own = {argument: getattr(settings, field) for argument, field in kind.arguments.items()}
    return config_class(settings)(task_type=task_type, **own, **kind.options, **arguments)


def config_class(settings: AdapterSettings) -> Any:
    """Return PEFT's configuration class of the adapter."""
    # peft takes four seconds to import: only those who attach an adapter wait for it.
    import peft

    return getattr(peft, ADAPTERS[settings.adapter].peft)


def task_type_of(model: nn.Module) -> str:
    """Return PEFT's name for the kind of model: SEQ_CLS with a layer `score`, else CAUSAL_LM.
    PEFT trains and saves the layer `score` itself.
    """
    return "CAUSAL_LM" if score(model) is None else "SEQ_CLS"


def _attached(model: nn.Module, config: "PeftConfig") -> "PeftModel":
    from peft import get_peft_model

    target: Any = model
    made: Any
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 uses a deprecated alias of transformers 5.23, which the caller cannot change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            # Where both of GPT-2's kinds of linear layers are targets PEFT corrects it for each, and warns.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            # PEFT gives fused experts a rank of their own, and warns where they are no target.
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            made = get_peft_model(target, config)
    except ValueError as error:
        raise AdapterError(f"PEFT cannot attach the adapter to {type(model).__name__}: {error}") from error
    # PEFT keeps sets, which every process would write in another order.
    for name in ("target_modules", "feedforward_modules"):
        if isinstance(names := getattr(config, name, None), set):
            setattr(config, name, sorted(names))
    return made


def _check_tops(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse targets on which an adapter would be lost: `score`, which PEFT skips; a tied head."""
    top, table = head(model), embeddings(model)
    tied = top is not None and table is not None and top.weight is table.weight
    for name in targets:
        module = model.get_submodule(name)
        if module is score(model):
            raise AdapterError(f"target_modules: {name} is trained whole beside the adapters already; leave it out")
        if module is top and tied:
            raise AdapterError(
                f"target_modules: {name} shares its weight with the embeddings, so that an adapter on it could not be merged; "
                "leave it out"
            )


def _described(model: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> list[str]:
    """Return lines for the log: the adapter, its rank and its targets by kind of layer."""
    rank = f" of rank {settings.lora_r}" if "lora_r" in ADAPTERS[settings.adapter].fields else ""
    layers = f"{settings.adapter}{rank} on {len(targets)} linear layers"
    parts: dict[str, dict[str, None]] = {}
    for name in targets:
        parts.setdefault(kind_of(model, name) or "outside of the layers", {})[name.rpartition(".")[2]] = None
    named = "; ".join(f"{kind}: {', '.join(parts[kind])}" for kind in parts)
    whole = [] if score(model) is None else ["score is trained whole"]
    return [f"{layers} ({named})", *whole]
