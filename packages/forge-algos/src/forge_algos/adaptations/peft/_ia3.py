"""Settings and a model → PEFT's configuration of IA3 (arXiv 2205.05638): a factor for each channel of keys, values and inner activations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._errors import AdapterError
from forge_algos.adaptations._targets import kind_of, resolve_targets
from forge_algos.adaptations.peft._target_names import ends, short_names
from forge_algos.settings._adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import IA3Config


def ia3_config(model: nn.Module, settings: AdapterSettings, task_type: str) -> tuple["IA3Config", list[str]]:
    """The configuration, and the full names of what it means; without settings, what PEFT has for the architecture.

    Raises:
        AdapterError: a name matches nothing, PEFT has nothing for the architecture, or feedforward_modules are no targets.
    """
    from peft import IA3Config
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD,
        TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as TARGETS,
    )

    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    targets = resolve_targets(model, settings.target_modules or _known(kind, TARGETS, "target_modules"))
    if settings.feedforward_modules:
        inputs = resolve_targets(model, settings.feedforward_modules)
        if foreign := [name for name in inputs if name not in targets]:
            raise AdapterError(
                f"feedforward_modules mean {', '.join(short_names(model, foreign))}, which target_modules do not: they say which targets "
                "are scaled at their input, so name them in target_modules too"
            )
    elif kind in FEEDFORWARD or any(kind_of(model, name) == "mlp" for name in targets):
        known = _known(kind, FEEDFORWARD, "feedforward_modules")
        inputs = [name for name in targets if any(ends(short, name) for short in known)]
    else:
        inputs = []
    # A name stands in both lists, so it must say the same by the rules of both; the laxer one decides.
    feedforward = short_names(model, inputs, rule=ends)
    outputs = [name for name in targets if name not in inputs]
    names = [*short_names(model, outputs), *feedforward]
    made = IA3Config(
        task_type=task_type,
        target_modules=names,
        feedforward_modules=feedforward,
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )
    return made, targets


def _known(kind: str, mapping: dict[str, list[str]], setting: str) -> Sequence[str]:
    if kind not in mapping:
        raise AdapterError(
            f"PEFT has no {setting} of ia3 for {kind!r}: name both, say target_modules=[k_proj, v_proj, down_proj] with "
            f"feedforward_modules=[down_proj]. It has them for {', '.join(sorted(mapping))}"
        )
    return mapping[kind]
