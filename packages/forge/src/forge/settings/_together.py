"""Settings of a run → the refusal of what they cannot be together."""

from __future__ import annotations

from typing import Any

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


def check_qat(s: Any) -> None:
    """Raise SettingsError for settings with which weights cannot be rounded as a GGUF file does."""
    if (kind := s.qat.qat) is None:
        return
    _check_qat_adapter(kind, s.adapter)
    if s.device.weights != "float32":
        raise SettingsError(
            f"qat={kind} with weights={s.device.weights}, which has not all numbers of a file of {kind}: the model would "
            "compute with others. Leave `weights` out."
        )
    if s.checkpoints.save_dtype not in (None, "float32"):
        raise SettingsError(
            f"qat={kind} with save_dtype={s.checkpoints.save_dtype}: what is exported then is rounded before forge export "
            f"rounds it to {kind}, to other numbers than the trained ones. Leave save_dtype out."
        )
    if getattr(s.objective, "reference", None) == "moving":
        raise SettingsError(
            f"qat={kind} with reference=moving: the reference begins as the model, which computes with rounded weights, and "
            "the average that it becomes is not rounded. Leave `reference` out."
        )
    if getattr(s.objective, "teacher", None) == "ema":
        raise SettingsError(
            f"qat={kind} with teacher=ema: the teacher begins as the model, which computes with rounded weights, and the "
            "average that it becomes is not rounded. Set teacher=initial, or teacher=current."
        )
    if (sampler := getattr(s.objective, "sampler", "transformers")) != "transformers":
        raise SettingsError(
            f"qat={kind} with sampler={sampler}, whose server is given the unrounded weights: the model would not learn from "
            "completions of its own. Leave `sampler` out."
        )
    for name, value in (("tp_size", s.strategy.tp_size), ("ep_size", s.strategy.ep_size)):
        if value > 1:
            raise SettingsError(
                f"qat={kind} with {name}={value}, which divides the rows that share a scale: use strategy=fsdp2 alone."
            )
    if s.adapter.adapter == "dora" and s.strategy.strategy in ("fsdp2", "hsdp"):
        raise SettingsError(
            f"qat={kind} with adapter=dora and strategy={s.strategy.strategy}, which divides the weights that the gradient of "
            "DoRA's magnitudes reads whole: use strategy=ddp, or adapter=lora."
        )
    if s.strategy.strategy == "zero3":
        raise SettingsError(
            f"qat={kind} with strategy=zero3, which divides weights inside of the rows that share a scale: use strategy=fsdp2."
        )


def _check_qat_adapter(kind: str, adapter: forge_algos.AdapterSettings) -> None:
    """Raise SettingsError for an adapter whose steps cannot compute with the merged weight."""
    chosen = f"qat={kind} with adapter={adapter.adapter}"
    if adapter.reads("quant_type"):
        raise SettingsError(
            f"{chosen}, whose base is held in codes of few bits, where the weights of a file of {kind} cannot lie. Leave `qat` "
            "out, or set adapter=lora."
        )
    if adapter.adapter not in ("none", "lora", "rslora", "dora"):
        raise SettingsError(
            f"{chosen}: what a file of {kind} rounds is the sum of its weights and the base's, and no step computes with that; "
            f"with lora, rslora and dora each does. Leave `qat` out{_or_set(adapter, 'lora')}."
        )
    if adapter.lora_dropout:
        raise SettingsError(
            f"qat={kind} with lora_dropout={adapter.lora_dropout:g}: steps compute with the merged weight, which has no inputs "
            "of an adapter that could be dropped. Leave lora_dropout out."
        )
    if adapter.subtracts:
        raise SettingsError(
            f"qat={kind} with init_lora_weights={adapter.init_lora_weights}, whose exports add up otherwise than its steps: "
            "some numbers of the file would be others than the trained ones. Leave init_lora_weights out."
        )


_PROJECTED = {"osft_rule": "paper", "osft_form": "factors"}
"""Settings of OSFT under which weights are projected around each step."""


def _or_set(adapter: forge_algos.AdapterSettings, name: str) -> str:
    """Offer another adapter where the verb has others: forge osft has its own alone."""
    return f", or set adapter={name}" if adapter.accepts("adapter", name) else ""
