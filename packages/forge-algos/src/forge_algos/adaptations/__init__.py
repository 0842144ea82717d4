"""Adaptations: how much of a model moves. PEFT's layers, never rewritten, and OSFT, which is ours; names resolved on the model itself."""

from forge_algos.adaptations._adapt import adapt
from forge_algos.adaptations._adaptation import Adaptation
from forge_algos.adaptations._off import switched_off
from forge_algos.adaptations.osft._importance import osft_importance
from forge_algos.adaptations.osft._inspect import Moved, Portrait, osft_moved, osft_portrait
from forge_algos.adaptations.peft._quantization import quantization_config

__all__ = [
    "Adaptation",
    "Moved",
    "Portrait",
    "adapt",
    "osft_importance",
    "osft_moved",
    "osft_portrait",
    "quantization_config",
    "switched_off",
]
