"""Adaptations: how much of a model moves. PEFT's layers, never rewritten, and OSFT, which is ours; names resolved on the model itself."""

from forge_algos.adaptations._adapt import adapt
from forge_algos.adaptations._adaptation import Adaptation

__all__ = ["Adaptation", "adapt"]
