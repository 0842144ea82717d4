"""Gather the state of an adapter, where it is divided over ranks (by ZeRO-3)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from forge_dist.adapters._adapter import active_adapter, peft_selection, peft_state
from forge_dist.exporting._layout import first_names, owners_of
from forge_dist.loading._unwrap import is_partitioned

if TYPE_CHECKING:
    from peft import PeftModel

    from forge_dist.strategies._strategy import Strategy


def adapter_state(model: "PeftModel", wrapped: torch.nn.Module, strategy: "Strategy") -> dict[str, torch.Tensor]:
    """Return the state that PEFT needs to save the adapter, whole on rank 0; collective.

    `wrapped` is what the strategy's `wrap` returned for `model`.

    Raises:
        ValueError: the adapter is divided, and PEFT computes a tensor of this kind of adapter from others.
    """
    sources = _divided_sources(model)
    if sources is None:
        # Without the base's divided tensors, which PEFT would gather, on rank 0 alone.
        divided = _divided_names(model)
        return {name: tensor for name, tensor in model.state_dict().items() if name not in divided}
    names = first_names(model)
    found = dict(strategy.whole(wrapped, {names[source] for source in sources.values()}))
    return {source: tensor for source in sources.values() if (tensor := found[names[source]]) is not None}


def adapter_tensors(model: "PeftModel", wrapped: torch.nn.Module, strategy: "Strategy") -> Mapping[str, torch.Tensor | None]:
    """Return name in the file → tensor, or None on ranks that do not have it; collective."""
    state, sources = adapter_state(model, wrapped, strategy), _divided_sources(model)
    if sources is None:
        return peft_state(model, active_adapter(model), state)
    return {name: state.get(source) for name, source in sources.items()}


def _divided_names(model: torch.nn.Module) -> set[str]:
    return {name for name, tensor in owners_of(model).items() if is_partitioned(tensor) or isinstance(tensor, DTensor)}


def _divided_sources(model: "PeftModel") -> dict[str, str] | None:
    """Return name in the file → name in the model's state; None if no such tensor is divided."""
    name = active_adapter(model)
    sources, computed = peft_selection(model, name)
    if _divided_names(model).isdisjoint(sources.values()):
        return None
    if computed:
        kind = model.peft_config[name].peft_type
        raise ValueError(
            f"the tensor {computed[0]} of this adapter ({kind}) is not one of the model's, and the model is divided"
        )
    return sources
