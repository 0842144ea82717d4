"""Modules that a run added to a model, a value head say → which of the model's tensors are theirs, to be left out of an export."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch

from forge_dist._errors import ExportError

Value = TypeVar("Value")

# What goes before a model's own names in a PeftModel: LoRA and its like hold the model in a module of theirs, virtual tokens do not.
_PEFT = ("base_model.model.", "base_model.", "")


def is_added(name: str, without: Sequence[str]) -> bool:
    """Whether the tensor `name` of a model, or of the PeftModel around it, belongs to one of the modules `without`."""
    return any(f"{name}.".startswith(f"{prefix}{module}.") for module in without for prefix in _PEFT)


def left(tensors: Mapping[str, Value], without: Sequence[str]) -> dict[str, Value]:
    """`tensors` without those of the modules `without`."""
    return {name: tensor for name, tensor in tensors.items() if not is_added(name, without)}


def check_without(model: torch.nn.Module, without: Collection[str], where: object) -> None:
    """Raise ExportError where `without` is no sequence of names, or names a module that `model` does not have."""
    if isinstance(without, str):
        raise ExportError(f"{where}: without is {without!r}; it must be a sequence of names, such as ({without!r},)")
    # By module, not by tensor: what a module holds may be no part of any state.
    there = {name for name, _ in model.named_modules()} if without else set()
    for module in without:
        if there.isdisjoint(prefix + module for prefix in _PEFT):
            raise ExportError(f"{where}: without names {module!r}, and the model has no such module: leave it out")
