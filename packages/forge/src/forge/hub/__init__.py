"""Calls of training_hub → training verbs of forge, with its names and defaults.

Files here import `verbs`, `backends`, `reports`, `run`, `settings` and what these import; not `cli`. `_table.py` has every
parameter: the calls, docs/migrating/training-hub.md and the tests follow it.
"""

from forge.backends._backend import Backend
from forge.backends._instructlab import InstructLabBackend as InstructLabTrainingSFTBackend
from forge.backends._mini_trainer import MiniTrainerBackend as MiniTrainerOSFTBackend
from forge.hub._algorithms import (
    Algorithm,
    AlgorithmRegistry,
    EmbeddingSFTAlgorithm,
    GRPOAlgorithm,
    LoRAGRPOAlgorithm,
    LoRASFTAlgorithm,
    OSFTAlgorithm,
    SFTAlgorithm,
    create_algorithm,
)
from forge.hub._callbacks import TrainingHubCallback, TrainingHubContext
from forge.hub._estimate import estimate
from forge.hub._functions import embedding_sft, gepa, grpo, lora_grpo, lora_sft, osft, sft
from forge.hub._plot import plot_loss
from forge.hub._translate import Call, translate

__all__ = [
    "Algorithm",
    "AlgorithmRegistry",
    "Backend",
    "Call",
    "EmbeddingSFTAlgorithm",
    "GRPOAlgorithm",
    "InstructLabTrainingSFTBackend",
    "LoRAGRPOAlgorithm",
    "LoRASFTAlgorithm",
    "MiniTrainerOSFTBackend",
    "OSFTAlgorithm",
    "SFTAlgorithm",
    "TrainingHubCallback",
    "TrainingHubContext",
    "create_algorithm",
    "embedding_sft",
    "estimate",
    "gepa",
    "grpo",
    "lora_grpo",
    "lora_sft",
    "osft",
    "plot_loss",
    "sft",
    "translate",
]
