"""Experts of a layer: their matrices in stacks [E, N, M], which no linear layer holds."""

from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._modules import language_modules


@attrs.frozen(eq=False)
class Stack:
    """E expert matrices of one layer in one parameter [E, N, M], which no linear layer holds.

    Whether N are outputs and M inputs, or the other way round, differs by family.
    """

    name: str
    """Name as a target: the parameter's, or its module's where it is called `weight`."""
    module: nn.Module
    """The module that computes with it."""
    key: str
    """Name of the parameter in the module."""

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, as the module has it now."""
        return getattr(self.module, self.key)

    @property
    def parameter(self) -> str:
        """Full name of the parameter."""
        return f"{self.name}.weight" if self.key == "weight" else self.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, N and M, also of a parameter that is divided over ranks."""
        E, N, M = shape_of(self.weight)
        return E, N, M


def expert_stacks(model: nn.Module) -> dict[str, Stack]:
    """Return the stacks of expert matrices of a model by their names, in the model's order.

    They are parameters with three dimensions of a module whose class, or a part of whose name, is called experts.
    """
    found: dict[str, Stack] = {}
    language = language_modules(model)
    for path, module in model.named_modules():
        if module not in language or not (is_experts(module) or "experts" in path.split(".")):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if len(shape_of(parameter)) == 3 and parameter.is_floating_point():
                name = path if key == "weight" else f"{path}.{key}".removeprefix(".")
                found[name] = Stack(name, module, key)
    return found


def shape_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, the whole one where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class in small letters, without PEFT's wrapper."""
    inner: Any = getattr(module, "get_base_layer", None)
    return type(inner() if callable(inner) else module).__name__.lower()


def is_experts(module: nn.Module) -> bool:
    """Return whether a module's class is called experts."""
    return "experts" in class_name(module)
