"""Weights as PEFT's target parameters: expert stacks, and layers that it takes for experts.

PEFT 0.21 gives each expert matrix low-rank factors of its own (A of all experts in one matrix, B in another) and puts W + ΔW in
the place of the parameter [E, N, M] while the experts compute. So all E matrices are added up at each forward.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos._experts import Stack, expert_stacks
from forge_algos.adaptations.base._targets import resolve_targets
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS


def target_parameters(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return PEFT's `target_parameters`: ends of names (`experts.down_proj`) that suffice."""
    everything = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return sorted(short_names(model, names, among=everything, least=2))


def taken_for_experts(model: nn.Module, config: Any, linear: Sequence[str]) -> list[str]:
    """Return the linear layers that PEFT would take for the experts of an older transformers.

    Of families whose experts were linear layers up to transformers 4, PEFT reads the names `gate_proj`, `up_proj` and
    `down_proj` in `target_modules` as those of expert matrices: a dense or a shared `gate_proj` is then lost without a word.
    Its weight as a target parameter is not.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return []
    taken: dict[str, bool] = {}
    for last in dict.fromkeys(name.rpartition(".")[2] for name in linear):
        probe = config(target_modules=[last], task_type="CAUSAL_LM")
        try:
            convert_peft_config_for_transformers(probe, model, None)
        except ValueError:  # one of several names that it wants together
            taken[last] = True
        else:
            taken[last] = last not in probe.target_modules
    return [name for name in linear if taken[name.rpartition(".")[2]]]


def check_parameters(
    model: nn.Module, settings: AdapterSettings, config: Any, stacks: Mapping[str, Stack], taken: Sequence[str]
) -> None:
    """Refuse what PEFT cannot do with expert matrices, and with layers taken for experts.

    Raises:
        AdapterError: the adapter has no form for them, or not with dropout, quantized, or for a single expert [1, inputs,
            outputs].
    """
    names = [*stacks, *taken]
    if not names:
        return
    others = f" and {counted(len(names) - 1, 'others')}" if len(names) > 1 else ""
    what = f"{names[0]}{others} are expert matrices" if stacks else f"PEFT takes {names[0]}{others} for experts"
    targets = [name for name in resolve_targets(model, None) if name not in {*expert_stacks(model), *taken}]
    left_out = f"leave them out: target_modules={','.join(dict.fromkeys(name.rpartition('.')[2] for name in targets))}"
    takes = any(field.name == "target_parameters" for field in dataclasses.fields(config))
    if not takes or ADAPTERS[settings.adapter].options.get("use_dora"):
        raise AdapterError(
            f"target_modules: {what}, which adapter={settings.adapter} of PEFT cannot adapt: use adapter=lora or rslora, or "
            f"{left_out}"
        )
    if settings.lora_dropout:
        raise AdapterError(
            f"lora_dropout={settings.lora_dropout}: {what}, to whose weights PEFT adds ΔW, so that there is no input of the "
            f"adapter to drop out: set lora_dropout=0, or {left_out}"
        )
    if quantized := [name for name in taken if not model.get_parameter(f"{name}.weight").is_floating_point()]:
        raise AdapterError(
            f"adapter={settings.adapter}: PEFT takes {quantized[0]} for an expert, whose weight it adapts whole, and it is "
            f"quantized: use adapter=lora, or {left_out}{',experts' if stacks else ''}"
        )
    for stack in stacks.values():
        # PEFT computes the ΔW of one expert as a linear layer's, [outputs, inputs].
        if stack.shape[0] == 1 and getattr(stack.module, "is_transposed", False):
            raise AdapterError(
                f"target_modules: {stack.name} {list(stack.shape)} is a single expert, whose layout PEFT mistakes: {left_out}"
            )


def keep_order(model: Any, parameters: Sequence[str]) -> None:
    """Keep the parameters of the modules around which PEFT put adapters in their order.

    PEFT takes a parameter out of its module during each forward and puts it back behind the others, biases for instance; what
    compares two models tensor by tensor would meet them in another order than those of a model without a forward.
    """
    base = model.get_base_model()
    for home in dict.fromkeys(name.rpartition(".")[0] for name in parameters):
        wrapper = base.get_submodule(home)
        inner: nn.Module = wrapper.get_base_layer()
        order = tuple(name for name, _ in inner.named_parameters(recurse=False))
        wrapper.register_forward_hook(partial(_restore_order, inner, order), always_call=True)


def _restore_order(module: nn.Module, order: Sequence[str], *_: Any) -> None:
    if [name for name, _ in module.named_parameters(recurse=False)] == list(order):
        return
    for name in order:
        parameter = getattr(module, name)
        delattr(module, name)
        module.register_parameter(name, parameter)


def unquantized_experts(stacks: Mapping[str, Stack]) -> str:
    """Return a line for the log: expert matrices of a quantized base are not quantized."""
    weights = [stack.weight for stack in stacks.values()]
    size = sum(stack.shape[0] * stack.shape[1] * stack.shape[2] * stack.weight.element_size() for stack in stacks.values())
    return (
        f"the experts stay in {str(weights[0].dtype).removeprefix('torch.')} ({size / 2**30:.2f} GiB): bitsandbytes "
        "quantizes linear layers, and they are none"
    )
