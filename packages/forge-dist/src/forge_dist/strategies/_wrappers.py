"""FSDP's modules inside a model, and activation checkpointing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_dist._errors import StrategyError
from forge_dist.loading._unwrap import base_of, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def resharded(model: nn.Module) -> nn.Module:
    """Return `unwrapped(model)`, FSDP's gathered weights freed.

    After a forward without a backward some are still gathered.
    """
    inner: nn.Module = unwrapped(model)
    for module in fsdp_modules(inner):
        module.reshard()
    return inner


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Iterate over the modules that `fully_shard` was applied to, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer's activations in the backward pass.

    Raises:
        StrategyError: the architecture does not support it.
    """
    base: PreTrainedModel = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
    try:
        # The reentrant kind would hide the layers' gradients from DDP's and FSDP's hooks.
        base.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise StrategyError(f"activation_checkpointing: {error}") from error
