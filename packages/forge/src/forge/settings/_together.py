"""Optimizer and adapter of a run → the refusal of what they cannot be together."""

from __future__ import annotations

import forge_algos
from forge._errors import SettingsError


def check_optimizer(optimizer: forge_algos.OptimizerSettings, adapter: forge_algos.AdapterSettings) -> None:
    """Raise SettingsError for an optimizer and an adapter that cannot be together."""
    chosen = f"adapter={adapter.adapter}"
    if optimizer.low_rank and adapter.adapter != "none":
        raise SettingsError(
            f"optimizer={optimizer.optimizer} with {chosen}: it keeps a low-rank state of the model's own matrices, which "
            f"then do not train as a whole. Leave optimizer out{_or_set(adapter, 'none')}."
        )
    if optimizer.optimizer == "schedule_free" and adapter.adapter == "osft":
        projected = [f"{name}={value}" for name, value in _PROJECTED.items() if getattr(adapter, name) == value]
        if projected:
            raise SettingsError(
                f"optimizer=schedule_free with {projected[0]}: it keeps averages of the weights, which are never projected. "
                f"Leave one of the two out."
            )
    if optimizer.optimizer == "schedule_free" and adapter.subtracts and optimizer.weight_decay:
        raise SettingsError(
            f"optimizer=schedule_free with init_lora_weights={adapter.init_lora_weights}, whose first product is subtracted: "
            f"its averages keep the decay of that, which cannot be taken back. Leave weight_decay out, or optimizer."
        )
    if optimizer.loraplus_lr_ratio != 1 and not adapter.reads("init_lora_weights"):
        raise SettingsError(
            f"loraplus_lr_ratio={optimizer.loraplus_lr_ratio:g} has no effect with {chosen}: it is the rate of LoRA's "
            f"matrices B. Leave it out{_or_set(adapter, 'lora')}."
        )


_PROJECTED = {"osft_rule": "paper", "osft_form": "factors"}
"""Settings of OSFT under which weights are projected around each step."""


def _or_set(adapter: forge_algos.AdapterSettings, name: str) -> str:
    """Offer another adapter where the verb has others: forge osft has its own alone."""
    return f", or set adapter={name}" if adapter.accepts("adapter", name) else ""
