"""FSDP's modules inside a model, and activation checkpointing."""

from collections.abc import Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

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


def checkpoint_activations(model: nn.Module, kind: str, *, offload: bool = False) -> None:
    """Recompute each layer's activations in the backward pass.

    Args:
        model: as `load` returned it, perhaps with an adapter.
        kind: none, full or selective, as the setting has it.
        offload: keep the layers' inputs in the host's memory.

    Raises:
        StrategyError: the architecture does not support it; or the kind is still to be chosen.
    """
    if kind == "none":
        return
    if kind not in ("full", "selective"):
        raise StrategyError(
            f"activation_checkpointing={kind} is chosen by who has a memory plan, before a model is wrapped: set none, full or "
            "selective"
        )
    base: PreTrainedModel = base_of(model)  # pyrefly: ignore[bad-argument-type]  it came from `load`
    # The reentrant kind would hide the layers' gradients from DDP's and FSDP's hooks.
    how: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        # transformers adds the biases of experts (gpt-oss) in place to their product, which must not be one that is kept.
        biased = any(getattr(module, "has_bias", False) for module in base.modules())
        kept = _PRODUCTS - {_OF_EXPERTS} if biased else _PRODUCTS
        how["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    try:
        base.activation_checkpointing_enable(how, offload=offload)
    except ValueError as error:
        raise StrategyError(f"activation_checkpointing: {error}") from error


def _policy(
    products: Collection[str], _context: SelectiveCheckpointContext, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Keep the outputs of these matrix products and of attention, nearly all of a layer's time."""
    # Of "aten.mm.default": attention of a packed row is an operator of another namespace.
    name = str(operator).partition(".")[2].partition(".")[0]
    kept = name in products or name.startswith(_ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_OF_EXPERTS = "_grouped_mm"
_PRODUCTS = frozenset({"mm", "addmm", _OF_EXPERTS, "_scaled_mm"})
"""Products of activations and weights; those of queries and keys, which are as large as a row is long squared, are none."""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_forward", "_efficient_attention_forward", "_varlen_attn", "documents")
"""How names of attention kernels begin; of packed rows torch's on a GPU and forge_accel's on a CPU."""
