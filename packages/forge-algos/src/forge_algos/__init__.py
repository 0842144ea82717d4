"""Batches to a trained model: objectives, adaptations, optimizers, the one loop.

`import forge_algos` loads neither torch, transformers nor peft: each name is fetched from its file when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_algos import adaptations, losses, objectives, online
    from forge_algos._adapter_settings import AdapterSettings
    from forge_algos._batch import PackedBatch
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
    from forge_algos._evaluate import Evaluation, evaluate
    from forge_algos._groups import PackedGroups, check_groups, group_inputs, group_tensors, idle_groups
    from forge_algos._guard import PackedGuard, guard_packed
    from forge_algos._online_settings import GRPOSettings, PPOSettings, RLOOSettings
    from forge_algos._optimizers import adamw, make_optimizer
    from forge_algos._parallel import ALONE, Parallel
    from forge_algos._preference_settings import DPOSettings, KTOSettings, ORPOSettings, RewardSettings, SimPOSettings
    from forge_algos._schedules import lr_factor, schedule
    from forge_algos._settings import OptimizerSettings
    from forge_algos._sharing import shares_prompts
    from forge_algos._supervised_settings import DistillSettings, PretrainSettings, SupervisedSettings
    from forge_algos._train import StepOutput, train
    from forge_algos.adaptations import Adaptation, adapt, osft_importance, quantization_config
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
    "AdapterSettings": "_adapter_settings",
    "Bound": "objectives",
    "DPO": "objectives",
    "DPOSettings": "_preference_settings",
    "Distill": "objectives",
    "DistillSettings": "_supervised_settings",
    "DivergedError": "_errors",
    "Evaluation": "_evaluate",
    "ForgeAlgosError": "_errors",
    "GRPO": "objectives",
    "GRPOSettings": "_online_settings",
    "KTO": "objectives",
    "KTOBatch": "objectives",
    "KTOSettings": "_preference_settings",
    "LossError": "_errors",
    "LossTerms": "losses",
    "MissingPackageError": "_errors",
    "NoTargetsError": "_errors",
    "ORPO": "objectives",
    "ORPOSettings": "_preference_settings",
    "Objective": "objectives",
    "OptimizerError": "_errors",
    "OptimizerSettings": "_settings",
    "PPO": "objectives",
    "PPOSettings": "_online_settings",
    "PackedBatch": "_batch",
    "PackedBatchError": "_errors",
    "PackedGroups": "_groups",
    "PackedGuard": "_guard",
    "Parallel": "_parallel",
    "PreferenceBatch": "objectives",
    "Pretrain": "objectives",
    "PretrainSettings": "_supervised_settings",
    "RLOO": "objectives",
    "RLOOSettings": "_online_settings",
    "ReferenceMismatchError": "_errors",
    "Reward": "objectives",
    "RewardError": "_errors",
    "RewardSettings": "_preference_settings",
    "RolloutError": "_errors",
    "SFT": "objectives",
    "SimPO": "objectives",
    "SimPOSettings": "_preference_settings",
    "StepOutput": "_train",
    "SupervisedSettings": "_supervised_settings",
    "UnevenRanksError": "_errors",
    "adamw": "_optimizers",
    "adapt": "adaptations",
    "check_groups": "_groups",
    "check_reference": "objectives",
    "evaluate": "_evaluate",
    "group_inputs": "_groups",
    "group_tensors": "_groups",
    "guard_packed": "_guard",
    "idle_groups": "_groups",
    "lr_factor": "_schedules",
    "make_optimizer": "_optimizers",
    "nll": "losses",
    "osft_importance": "adaptations",
    "quantization_config": "adaptations",
    "reference_logps": "objectives",
    "schedule": "_schedules",
    "shares_prompts": "_sharing",
    "train": "_train",
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
