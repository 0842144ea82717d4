"""IA3 (arXiv 2205.05638): a factor for each channel of keys, values and inner activations."""

from collections.abc import Sequence

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._experts import expert_stacks
from forge_algos._modules import text_config
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.base._parts import kind_of
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.peft._attach import attach_to_targets, config_class
from forge_algos.adaptations.peft._experts import check_parameters
from forge_algos.adaptations.peft._target_names import selects_feedforward, short_names
from forge_algos.settings._adapter import AdapterSettings


def attach_ia3(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Put PEFT's IA3 layers into the targets; by default those that PEFT names for the model.

    Raises:
        AdapterError: a name matches nothing, PEFT has none for the architecture, or feedforward_modules are not among the
            targets.
    """
    from peft.utils.constants import (
        TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as FEEDFORWARD,
        TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as TARGETS,
    )

    kind = getattr(text_config(model), "model_type", type(model).__name__)
    targets = resolve_targets(model, settings.target_modules or _known(kind, TARGETS, "target_modules"))
    if stacks := {name: stack for name, stack in expert_stacks(model).items() if name in targets}:
        check_parameters(model, settings, config_class(settings), stacks, [])
    if settings.feedforward_modules:
        inputs = resolve_targets(model, settings.feedforward_modules)
        if foreign := [name for name in inputs if name not in targets]:
            raise AdapterError(
                f"feedforward_modules mean {', '.join(short_names(model, foreign))}, which target_modules do not: they say "
                "which targets are scaled at their input, so name them in target_modules too"
            )
    elif kind in FEEDFORWARD or any(kind_of(model, name) == "mlp" for name in targets):
        known = _known(kind, FEEDFORWARD, "feedforward_modules")
        inputs = [name for name in targets if any(selects_feedforward(short, name) for short in known)]
    else:
        inputs = []
    # A name stands in both lists and must select the same layers by the rules of both; the laxer rule decides.
    feedforward = short_names(model, inputs, rule=selects_feedforward)
    outputs = [name for name in targets if name not in inputs]
    names = [*short_names(model, outputs), *feedforward]
    return attach_to_targets(
        model,
        settings,
        targets,
        new_tokens=context.new_tokens,
        target_modules=names,
        feedforward_modules=feedforward,
    )


def _known(kind: str, mapping: dict[str, list[str]], setting: str) -> Sequence[str]:
    """Return PEFT's own names of target modules for an architecture, or raise AdapterError."""
    if kind not in mapping:
        raise AdapterError(
            f"PEFT has no {setting} of ia3 for {kind!r}: name both, say target_modules=[k_proj, v_proj, down_proj] with "
            f"feedforward_modules=[down_proj]. It has them for {', '.join(sorted(mapping))}"
        )
    return mapping[kind]
