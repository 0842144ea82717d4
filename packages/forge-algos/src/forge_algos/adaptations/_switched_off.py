"""The model under its adaptation while a block runs: a reference without a second model."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import UNROUNDED, trained_biases, unwrap, virtual_tokens
from forge_algos.adaptations.osft._delta import MARK, Delta


def check_switchable(model: nn.Module) -> None:
    """Raise AdapterError unless `switched_off` can restore the model under the adaptation."""
    inner: Any = unwrap(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "disable_adapter"):
        if biases := trained_biases(inner):
            raise AdapterError(
                f"the adapter cannot be switched off: it trains biases of the base, such as {next(iter(biases))}; set "
                "reference='stored' or 'live', or give a frozen copy of the model"
            )
        return
    moves = getattr(inner, MARK, None)
    if moves is None:
        raise AdapterError(
            f"{type(inner).__name__} carries no adapter that could be switched off; train one (adapter='lora'), or set "
            "reference='stored' or 'live', or give a frozen copy of the model"
        )
    if moves:
        raise AdapterError(
            f"OSFT cannot be switched off here: {moves} moves the model's own weights; set reference='stored' or 'live', or "
            "give a frozen copy of the model, or set osft_rule='strict' with unfreeze_rank_ratio below 1 and no "
            "osft_train_rest"
        )


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Run `model`, bare or wrapped, as the base under its PEFT adapter or its OSFT in the block.

    Where its weights are rounded meanwhile (`QuantizedWeights`), the base is the unrounded one.

    Raises:
        AdapterError: it carries neither, or an OSFT that moves the base's own weights.
    """
    check_switchable(model)
    inner: Any = unwrap(model)
    if hasattr(inner, "peft_config"):
        unrounded = vars(inner).get(UNROUNDED, nullcontext)
        with unrounded(), _prompts_off(inner) if virtual_tokens(inner) else inner.disable_adapter():
            yield
        return
    deltas = [module for module in inner.modules() if isinstance(module, Delta)]
    before = [delta.off for delta in deltas]
    for delta in deltas:
        delta.off = True
    try:
        yield
    finally:
        for delta, was in zip(deltas, before, strict=True):
            delta.off = was


@contextmanager
def _prompts_off(model: Any) -> Iterator[None]:
    """Run PEFT's `disable_adapter` for virtual tokens; the base is called through its own hooks.
    PEFT would call past them.
    """
    with model.disable_adapter():
        before, model.forward = model.forward, model.base_model.__call__
        try:
            yield
        finally:
            model.forward = before
