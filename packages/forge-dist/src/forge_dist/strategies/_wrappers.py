"""A model as it is called → the modules inside that names and methods belong to."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from forge_dist._errors import StrategyError
from forge_dist.adapters._adapter import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, whose names have no "module." before them."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def resharded(model: nn.Module) -> nn.Module:
    """`unwrapped(model)`, with FSDP's whole weights put away: after a forward without a backward some are still in place."""
    model = unwrapped(model)
    for module in fsdp_modules(model):
        module.reshard()
    return model


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """What `fully_shard` was applied to, the root among them."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def checkpoint_activations(model: nn.Module) -> None:
    """Compute each layer's activations anew in the backward pass.

    Raises:
        StrategyError: the architecture cannot.
    """
    base: PreTrainedModel = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
    # The name in transformers before 5.23, which warns there.
    enable: Any = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    try:
        # The reentrant kind would hide the layers' gradients from DDP's and FSDP's hooks.
        enable({"use_reentrant": False})
    except ValueError as error:
        raise StrategyError(f"activation_checkpointing: {error}") from error
