"""A model and settings → an `Adaptation`, which limits what moves of the model.

Files here import the subfolders, heads, and what stands below them. PEFT's layers are used as they are; OSFT is our own.
"""

from forge_algos.adaptations._adapt import adapt
from forge_algos.adaptations._switched_off import switched_off
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.osft._importance import osft_importance
from forge_algos.adaptations.osft._inspect import Moved, Portrait, osft_input_directions, osft_moved, osft_portrait
from forge_algos.adaptations.osft._moments import osft_moments
from forge_algos.adaptations.peft._directory import StoredAdapter, stored_adapter
from forge_algos.adaptations.peft._eva import eva_directions
from forge_algos.adaptations.peft._quantization import quantization_config
from forge_algos.settings._adapter_table import ADAPTERS, AdapterKind

__all__ = [
    "ADAPTERS",
    "Adaptation",
    "AdapterKind",
    "Context",
    "Moved",
    "Portrait",
    "StoredAdapter",
    "adapt",
    "eva_directions",
    "osft_importance",
    "osft_input_directions",
    "osft_moments",
    "osft_moved",
    "osft_portrait",
    "quantization_config",
    "stored_adapter",
    "switched_off",
]
