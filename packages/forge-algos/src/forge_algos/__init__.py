"""Batches to a trained model: objectives, adaptations, optimizers, the one loop.

`import forge_algos` loads neither torch, transformers nor peft: each name is fetched from its file when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_algos import adaptations, losses, objectives
    from forge_algos._batch import PackedBatch
    from forge_algos._errors import (
        AdapterError,
        DivergedError,
        ForgeAlgosError,
        LossError,
        NoTargetsError,
        PackedBatchError,
        UnevenRanksError,
    )
    from forge_algos._evaluate import Evaluation, evaluate
    from forge_algos._guard import PackedGuard, guard_packed
    from forge_algos._optimizers import adamw
    from forge_algos._parallel import ALONE, Parallel
    from forge_algos._schedules import lr_factor, schedule
    from forge_algos._settings import AdapterSettings, OptimizerSettings
    from forge_algos._train import StepOutput, train
    from forge_algos.adaptations import attach_lora
    from forge_algos.losses import LossTerms, nll
    from forge_algos.objectives import SFT, Objective

__version__ = "0.2.0"

__all__ = [
    "ALONE",
    "AdapterError",
    "AdapterSettings",
    "DivergedError",
    "Evaluation",
    "ForgeAlgosError",
    "LossError",
    "LossTerms",
    "NoTargetsError",
    "Objective",
    "OptimizerSettings",
    "PackedBatch",
    "PackedBatchError",
    "PackedGuard",
    "Parallel",
    "SFT",
    "StepOutput",
    "UnevenRanksError",
    "adamw",
    "adaptations",
    "attach_lora",
    "evaluate",
    "guard_packed",
    "losses",
    "lr_factor",
    "nll",
    "objectives",
    "schedule",
    "train",
]

_HOMES = {
    "ALONE": "_parallel",
    "AdapterError": "_errors",
    "AdapterSettings": "_settings",
    "DivergedError": "_errors",
    "Evaluation": "_evaluate",
    "ForgeAlgosError": "_errors",
    "LossError": "_errors",
    "LossTerms": "losses",
    "NoTargetsError": "_errors",
    "Objective": "objectives",
    "OptimizerSettings": "_settings",
    "PackedBatch": "_batch",
    "PackedBatchError": "_errors",
    "PackedGuard": "_guard",
    "Parallel": "_parallel",
    "SFT": "objectives",
    "StepOutput": "_train",
    "UnevenRanksError": "_errors",
    "adamw": "_optimizers",
    "attach_lora": "adaptations",
    "evaluate": "_evaluate",
    "guard_packed": "_guard",
    "lr_factor": "_schedules",
    "nll": "losses",
    "schedule": "_schedules",
    "train": "_train",
}
_ROOMS = ("adaptations", "losses", "objectives")


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
