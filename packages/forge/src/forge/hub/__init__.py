"""Calls of training_hub → training verbs of forge, with its names and defaults.

Files here import `verbs`, `backends`, `reports`, `run`, `settings` and what these import; not `cli`. `_table.py` has every
parameter, and is what the calls, docs/migrating/training-hub.md and the tests follow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.backends._backend import Backend as Backend
    from forge.hub._algorithms import (
        Algorithm as Algorithm,
        AlgorithmRegistry as AlgorithmRegistry,
        GRPOAlgorithm as GRPOAlgorithm,
        LoRAGRPOAlgorithm as LoRAGRPOAlgorithm,
        LoRASFTAlgorithm as LoRASFTAlgorithm,
        OSFTAlgorithm as OSFTAlgorithm,
        SFTAlgorithm as SFTAlgorithm,
        create_algorithm as create_algorithm,
    )
    from forge.hub._callbacks import TrainingHubCallback as TrainingHubCallback, TrainingHubContext as TrainingHubContext
    from forge.hub._estimate import estimate as estimate
    from forge.hub._functions import (
        embedding_sft as embedding_sft,
        gepa as gepa,
        grpo as grpo,
        lora_grpo as lora_grpo,
        lora_sft as lora_sft,
        osft as osft,
        sft as sft,
    )
    from forge.hub._plot import plot_loss as plot_loss
    from forge.hub._translate import Call as Call, translate as translate

_PUBLIC = {
    "forge.backends._backend": "Backend",
    "forge.hub._algorithms": "Algorithm AlgorithmRegistry GRPOAlgorithm LoRAGRPOAlgorithm LoRASFTAlgorithm OSFTAlgorithm "
    "SFTAlgorithm create_algorithm",
    "forge.hub._callbacks": "TrainingHubCallback TrainingHubContext",
    "forge.hub._estimate": "estimate",
    "forge.hub._functions": "embedding_sft gepa grpo lora_grpo lora_sft osft sft",
    "forge.hub._plot": "plot_loss",
    "forge.hub._translate": "Call translate",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
