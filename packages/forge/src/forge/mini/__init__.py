"""Calls of mini-trainer → training verbs of forge, with its names and defaults.

Files here import `verbs`, `run`, `settings` and what these import; `_command.py`, the command `python -m forge.mini`, imports
`cli` too.
"""

from forge.mini._run import run_training
from forge.mini._types import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode

__all__ = ["PretrainingConfig", "TorchrunArgs", "TrainingArgs", "TrainingMode", "run_training"]
