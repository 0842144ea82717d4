"""Batches to a trained model: objectives, adaptations, optimizers, the one loop.

`import forge_algos` loads neither torch, transformers nor peft: each name is fetched from its file when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_algos import adaptations, losses, objectives, online
    from forge_algos._errors import (
        AdapterError,
        DivergedError,
        ForgeAlgosError,
        LossError,
        MissingPackageError,
        NoTargetsError,
        OptimizerError,
        PackedBatchError,
        ReferenceMismatchError,
        RewardError,
        RolloutError,
        UnevenRanksError,
    )
    from forge_algos._parallel import ALONE, Parallel
    from forge_algos.adaptations import Adaptation, adapt, osft_importance, quantization_config
    from forge_algos.batches._groups import PackedGroups, check_groups, group_inputs, group_tensors, idle_groups
    from forge_algos.batches._packed import PackedBatch
    from forge_algos.isolation._guard import PackedGuard, guard_packed
    from forge_algos.isolation._prompt_sharing import shares_prompts
    from forge_algos.losses import LossTerms, nll
    from forge_algos.objectives import (
        DPO,
        GRPO,
        KTO,
        ORPO,
        PPO,
        RLOO,
        SFT,
        Bound,
        Distill,
        KTOBatch,
        Objective,
        PreferenceBatch,
        Pretrain,
        Reward,
        SimPO,
        check_reference,
        reference_logps,
    )
    from forge_algos.optimizers._optimizers import adamw, make_optimizer
    from forge_algos.optimizers._schedules import lr_factor, schedule
    from forge_algos.settings._adapter import AdapterSettings
    from forge_algos.settings._online import GRPOSettings, PPOSettings, RLOOSettings
    from forge_algos.settings._optimizer import OptimizerSettings
    from forge_algos.settings._preference import DPOSettings, KTOSettings, ORPOSettings, RewardSettings, SimPOSettings
    from forge_algos.settings._supervised import DistillSettings, PretrainSettings, SupervisedSettings
    from forge_algos.training._evaluate import Evaluation, evaluate
    from forge_algos.training._train import StepOutput, train

__version__ = "0.4.0"

__all__ = [
    "ALONE",
    "Adaptation",
    "AdapterError",
    "AdapterSettings",
    "Bound",
    "DPO",
    "DPOSettings",
    "Distill",
    "DistillSettings",
    "DivergedError",
    "Evaluation",
    "ForgeAlgosError",
    "GRPO",
    "GRPOSettings",
    "KTO",
    "KTOBatch",
    "KTOSettings",
    "LossError",
    "LossTerms",
    "MissingPackageError",
    "NoTargetsError",
    "ORPO",
    "ORPOSettings",
    "Objective",
    "OptimizerError",
    "OptimizerSettings",
    "PPO",
    "PPOSettings",
    "PackedBatch",
    "PackedBatchError",
    "PackedGroups",
    "PackedGuard",
    "Parallel",
    "PreferenceBatch",
    "Pretrain",
    "PretrainSettings",
    "RLOO",
    "RLOOSettings",
    "ReferenceMismatchError",
    "Reward",
    "RewardError",
    "RewardSettings",
    "RolloutError",
    "SFT",
    "SimPO",
    "SimPOSettings",
    "StepOutput",
    "SupervisedSettings",
    "UnevenRanksError",
    "adamw",
    "adapt",
    "adaptations",
    "check_groups",
    "check_reference",
    "evaluate",
    "group_inputs",
    "group_tensors",
    "guard_packed",
    "idle_groups",
    "losses",
    "lr_factor",
    "make_optimizer",
    "nll",
    "objectives",
    "online",
    "osft_importance",
    "quantization_config",
    "reference_logps",
    "schedule",
    "shares_prompts",
    "train",
]

_HOMES = {
    "ALONE": "_parallel",
    "Adaptation": "adaptations",
    "AdapterError": "_errors",
    "AdapterSettings": "settings._adapter",
    "Bound": "objectives",
    "DPO": "objectives",
    "DPOSettings": "settings._preference",
    "Distill": "objectives",
    "DistillSettings": "settings._supervised",
    "DivergedError": "_errors",
    "Evaluation": "training._evaluate",
    "ForgeAlgosError": "_errors",
    "GRPO": "objectives",
    "GRPOSettings": "settings._online",
    "KTO": "objectives",
    "KTOBatch": "objectives",
    "KTOSettings": "settings._preference",
    "LossError": "_errors",
    "LossTerms": "losses",
    "MissingPackageError": "_errors",
    "NoTargetsError": "_errors",
    "ORPO": "objectives",
    "ORPOSettings": "settings._preference",
    "Objective": "objectives",
    "OptimizerError": "_errors",
    "OptimizerSettings": "settings._optimizer",
    "PPO": "objectives",
    "PPOSettings": "settings._online",
    "PackedBatch": "batches._packed",
    "PackedBatchError": "_errors",
    "PackedGroups": "batches._groups",
    "PackedGuard": "isolation._guard",
    "Parallel": "_parallel",
    "PreferenceBatch": "objectives",
    "Pretrain": "objectives",
    "PretrainSettings": "settings._supervised",
    "RLOO": "objectives",
    "RLOOSettings": "settings._online",
    "ReferenceMismatchError": "_errors",
    "Reward": "objectives",
    "RewardError": "_errors",
    "RewardSettings": "settings._preference",
    "RolloutError": "_errors",
    "SFT": "objectives",
    "SimPO": "objectives",
    "SimPOSettings": "settings._preference",
    "StepOutput": "training._train",
    "SupervisedSettings": "settings._supervised",
    "UnevenRanksError": "_errors",
    "adamw": "optimizers._optimizers",
    "adapt": "adaptations",
    "check_groups": "batches._groups",
    "check_reference": "objectives",
    "evaluate": "training._evaluate",
    "group_inputs": "batches._groups",
    "group_tensors": "batches._groups",
    "guard_packed": "isolation._guard",
    "idle_groups": "batches._groups",
    "lr_factor": "optimizers._schedules",
    "make_optimizer": "optimizers._optimizers",
    "nll": "losses",
    "osft_importance": "adaptations",
    "quantization_config": "adaptations",
    "reference_logps": "objectives",
    "schedule": "optimizers._schedules",
    "shares_prompts": "isolation._prompt_sharing",
    "train": "training._train",
}
_ROOMS = ("adaptations", "losses", "objectives", "online")


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
