"""Adaptations: how much of a model moves. PEFT's layers, never rewritten; names resolved on the model itself."""

from forge_algos.adaptations._lora import attach_lora

__all__ = ["attach_lora"]
