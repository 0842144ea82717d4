"""Plain model of a run: without added modules, with changes beside the weights applied."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from forge_dist._errors import ExportError
from forge_dist.strategies.zero._parameters import gathered_submodules

Value = TypeVar("Value")

Plain = Callable[[str, torch.Tensor], torch.Tensor]
"""(name in the model's state, whole tensor there) → the plain model's tensor, in the same dtype; the same if unchanged."""

# Prefixes of a model's own names in a PeftModel: LoRA and the like wrap the model in a module of theirs, virtual tokens do not.
_PEFT_PREFIXES = ("base_model.model.", "base_model.", "")


def is_added(name: str, without: Sequence[str]) -> bool:
    """Return whether a tensor of a model or PeftModel belongs to one of the modules `without`."""
    return any(f"{name}.".startswith(f"{prefix}{module}.") for module in without for prefix in _PEFT_PREFIXES)


def without_added(tensors: Mapping[str, Value], without: Sequence[str]) -> dict[str, Value]:
    """Return `tensors` without those of the modules `without`."""
    return {name: tensor for name, tensor in tensors.items() if not is_added(name, without)}


def check_without(model: nn.Module, without: Collection[str], where: object) -> None:
    """Raise ExportError unless `without` is a sequence of names of modules that `model` has."""
    if isinstance(without, str):
        raise ExportError(f"{where}: without is {without!r}; it must be a sequence of names, such as ({without!r},)")
    # By module, not by tensor: a module's tensors may be part of no state.
    # Under each of its names: layers that share a weight share what is beside it.
    present = {name for name, _ in model.named_modules(remove_duplicate=False)} if without else set()
    for module in without:
        if present.isdisjoint(prefix + module for prefix in _PEFT_PREFIXES):
            raise ExportError(f"{where}: without names {module!r}, and the model has no such module: leave it out")


def plain_tensor(plain: Plain | None, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return `plain(name, tensor)` without gradients; the tensor itself without a `plain`.

    Raises:
        ValueError: the shape or the dtype is another one.
    """
    if plain is None:
        return tensor
    with torch.no_grad():
        result = plain(name, tensor).detach()
    if result.shape != tensor.shape or result.dtype != tensor.dtype:
        raise ValueError(
            f"plain gives {result.dtype} {list(result.shape)} for {name}, which is {tensor.dtype} {list(tensor.shape)}: a "
            "plain model holds the same"
        )
    return result


def plain_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor | None]], plain: Plain | None, without: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Apply `plain` to the tensors of `Strategy.whole`, without added modules; collective.

    What `plain` raises on rank 0 is raised at the end: until then the other ranks take part.
    """
    failed: Exception | None = None
    for name, whole in tensors:
        if is_added(name, without):
            continue
        given = whole
        if plain is not None:
            with gathered_submodules(model, name, without):
                try:
                    given = None if whole is None or failed is not None else plain_tensor(plain, name, whole)
                except Exception as error:  # noqa: BLE001  raised below
                    failed, given = error, None
        yield name, given
        del given, whole  # or they would stay while the next one is gathered
    if failed is not None:
        raise failed
