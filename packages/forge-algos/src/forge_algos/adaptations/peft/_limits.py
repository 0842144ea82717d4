"""Limits of an adapter in its table → the refusal of targets that it does not fit.

PEFT itself would round a block's size to one that divides a layer, or begin as another model than the base, with a warning.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS


def check_limits(model: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> None:
    """Refuse settings and layers that do not go together, by the adapter's row of `ADAPTERS`.

    Args:
        model: the base.
        settings: of the adapter.
        targets: full names of linear layers.

    Raises:
        AdapterError: the setting, the layer, and what would fit.
    """
    kind = ADAPTERS[settings.adapter]
    for setting in kind.even:
        if (value := getattr(settings, setting)) % 2:
            raise AdapterError(
                f"{setting}={value}: {settings.adapter} begins as its base where every second of its reflections undoes the "
                f"first, which needs an even number: set {setting}={value + 1}"
            )
    check_layers(model, settings, targets)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets}
    sides = {name: dict(zip(("inputs", "outputs"), _sides(layer), strict=True)) for name, layer in layers.items()}
    for setting, wanted in kind.divides.items():
        value = getattr(settings, setting)
        sizes = [sides[name][side] for name in targets for side in wanted]
        for name, side in ((name, side) for name in targets for side in wanted):
            if sides[name][side] % value:
                fits = _largest_divisor(math.gcd(*sizes), value)
                remedy = f"set {setting}={fits}, or name" if fits > 1 else "no size fits all targets: name"
                raise AdapterError(
                    f"{setting}={value} must divide the {' and the '.join(wanted)} of every target, and {name} has "
                    f"{sides[name][side]} {side}: {remedy} other target_modules"
                )
    for setting, what in kind.most.items():
        value = getattr(settings, setting)
        for name, size in sides.items():
            most = size["inputs"] * (size["outputs"] if what == "numbers" else 1)
            if value > most:
                raise AdapterError(
                    f"{setting}={value} is more than {name} has {what}, {most:,}: lower it, or name other target_modules"
                )


def check_layers(model: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> None:
    """Refuse layers that the adapter cannot be put into, whatever its sizes.

    Raises:
        AdapterError: the layer, and what would do.
    """
    kind = ADAPTERS[settings.adapter]
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in targets}
    if kind.linear and (transposed := [name for name, layer in layers.items() if isinstance(layer, Conv1D)]):
        raise AdapterError(
            f"target_modules: {_named(transposed)} of the class Conv1D, into which PEFT puts no {settings.adapter}: use "
            "adapter=lora"
        )
    if kind.reads_shapes and (empty := [name for name, layer in layers.items() if not layer.weight.numel()]):
        raise AdapterError(
            f"adapter={settings.adapter}: PEFT reads the shape of {empty[0]} from its weight, which strategy=zero3 holds "
            "elsewhere: use strategy=fsdp2, ddp or zero2, or another adapter"
        )


def _sides(layer: Any) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer; its weight may be elsewhere."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def _largest_divisor(number: int, most: int) -> int:
    return next(value for value in range(min(number, most), 0, -1) if number % value == 0)


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {counted(len(names) - 1, 'others')} are"
