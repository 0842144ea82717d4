"""Objectives, adaptations, optimizers and the one loop: batches → a trained model.

`import forge_algos` loads neither torch, transformers nor peft: each name is fetched from its file when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_algos import adaptations as adaptations, losses as losses, objectives as objectives, online as online
    from forge_algos._errors import (
        AdapterError as AdapterError,
        DivergedError as DivergedError,
        ForgeAlgosError as ForgeAlgosError,
        LossError as LossError,
        MissingPackageError as MissingPackageError,
        NoTargetsError as NoTargetsError,
        OptimizerError as OptimizerError,
        PackedBatchError as PackedBatchError,
        ReferenceMismatchError as ReferenceMismatchError,
        RehearsalError as RehearsalError,
        RewardError as RewardError,
        RolloutError as RolloutError,
        UnevenRanksError as UnevenRanksError,
    )
    from forge_algos._kernels import TriedKernel as TriedKernel, asked_kernels as asked_kernels
    from forge_algos._modules import first_dropout as first_dropout, repeated_blocks as repeated_blocks
    from forge_algos._parallel import ALONE as ALONE, Parallel as Parallel
    from forge_algos.adaptations import (
        Adaptation as Adaptation,
        adapt as adapt,
        eva_directions as eva_directions,
        osft_importance as osft_importance,
        osft_moments as osft_moments,
        quantization_config as quantization_config,
    )
    from forge_algos.adaptations.peft._cache_named import name_cache_for_peft as name_cache_for_peft
    from forge_algos.batches._copies import pin_batches as pin_batches
    from forge_algos.batches._groups import (
        PackedGroups as PackedGroups,
        check_groups as check_groups,
        group_inputs as group_inputs,
        group_tensors as group_tensors,
        idle_groups as idle_groups,
    )
    from forge_algos.batches._media import (
        MediaInputs as MediaInputs,
        lay_texts_alike as lay_texts_alike,
        media_row_inputs as media_row_inputs,
        pack_media_like as pack_media_like,
        packs_media as packs_media,
    )
    from forge_algos.batches._packed import PackedBatch as PackedBatch
    from forge_algos.batches._top import TopBatch as TopBatch
    from forge_algos.heads._chunks import score_rows_at_once as score_rows_at_once
    from forge_algos.heads._media import (
        MediaDocument as MediaDocument,
        pack_media as pack_media,
        require_image_attention as require_image_attention,
        require_media as require_media,
        set_attention as set_attention,
        unreached_by_media as unreached_by_media,
    )
    from forge_algos.isolation._alone import (
        keep_documents_apart as keep_documents_apart,
        places_alone as places_alone,
    )
    from forge_algos.isolation._guard import PackedGuard as PackedGuard, guard_packed as guard_packed
    from forge_algos.isolation._layers import layers_apart as layers_apart
    from forge_algos.isolation._prompt_sharing import shares_prompts as shares_prompts
    from forge_algos.losses import LossTerms as LossTerms, nll as nll
    from forge_algos.memory._rehearsal import Rehearsal as Rehearsal, tensors_of as tensors_of
    from forge_algos.memory._tracker import Peak as Peak
    from forge_algos.objectives import (
        DPO as DPO,
        GRPO as GRPO,
        KTO as KTO,
        ORPO as ORPO,
        PPO as PPO,
        RLOO as RLOO,
        SFT as SFT,
        AlignedDistill as AlignedDistill,
        BaseKL as BaseKL,
        BatchAllTriplet as BatchAllTriplet,
        Bound as Bound,
        Classify as Classify,
        ClassifyBatch as ClassifyBatch,
        Contrastive as Contrastive,
        ContrastiveBatch as ContrastiveBatch,
        Distill as Distill,
        FollowsSteps as FollowsSteps,
        KTOBatch as KTOBatch,
        LabelledTexts as LabelledTexts,
        Objective as Objective,
        PreferenceBatch as PreferenceBatch,
        Pretrain as Pretrain,
        Reward as Reward,
        SelfDistill as SelfDistill,
        SimPO as SimPO,
        TopDistill as TopDistill,
        check_reference as check_reference,
        reference_logps as reference_logps,
        top_logps as top_logps,
    )
    from forge_algos.optimizers._optimizers import (
        adamw as adamw,
        cast_trained as cast_trained,
        make_optimizer as make_optimizer,
    )
    from forge_algos.optimizers._schedules import lr_factor as lr_factor, schedule as schedule
    from forge_algos.settings._adapter import AdapterSettings as AdapterSettings
    from forge_algos.settings._classify import ClassifySettings as ClassifySettings
    from forge_algos.settings._embed import EmbedSettings as EmbedSettings
    from forge_algos.settings._grpo import GRPOSettings as GRPOSettings
    from forge_algos.settings._moe import MoESettings as MoESettings
    from forge_algos.settings._online import PPOSettings as PPOSettings, RLOOSettings as RLOOSettings
    from forge_algos.settings._optimizer import (
        SCHEDULES_WITHOUT_LENGTH as SCHEDULES_WITHOUT_LENGTH,
        OptimizerSettings as OptimizerSettings,
    )
    from forge_algos.settings._packing import PackingSettings as PackingSettings
    from forge_algos.settings._parts import PartSettings as PartSettings
    from forge_algos.settings._preference import (
        DPOSettings as DPOSettings,
        KTOSettings as KTOSettings,
        ORPOSettings as ORPOSettings,
        RewardSettings as RewardSettings,
        SimPOSettings as SimPOSettings,
    )
    from forge_algos.settings._qat import QATSettings as QATSettings
    from forge_algos.settings._self_distill import SDFTSettings as SDFTSettings
    from forge_algos.settings._supervised import (
        DistillSettings as DistillSettings,
        PretrainSettings as PretrainSettings,
        SupervisedSettings as SupervisedSettings,
    )
    from forge_algos.training._average import WeightAverage as WeightAverage
    from forge_algos.training._compare import TokenChanges as TokenChanges, token_changes as token_changes
    from forge_algos.training._evaluate import Evaluation as Evaluation, evaluate as evaluate
    from forge_algos.training._quantized_weights import QuantizedWeights as QuantizedWeights, fake_quantize as fake_quantize
    from forge_algos.training._router_loss import Routers as Routers, routers_of as routers_of
    from forge_algos.training._train import StepOutput as StepOutput, train as train

__version__ = "0.5.0"

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_errors": (
        "AdapterError DivergedError ForgeAlgosError LossError MissingPackageError NoTargetsError OptimizerError "
        "PackedBatchError ReferenceMismatchError RehearsalError RewardError RolloutError UnevenRanksError"
    ),
    "_kernels": "TriedKernel asked_kernels",
    "_modules": "first_dropout repeated_blocks",
    "_parallel": "ALONE Parallel",
    "adaptations": "Adaptation adapt eva_directions osft_importance osft_moments quantization_config",
    "adaptations.peft._cache_named": "name_cache_for_peft",
    "batches._copies": "pin_batches",
    "batches._groups": "PackedGroups check_groups group_inputs group_tensors idle_groups",
    "batches._media": "MediaInputs lay_texts_alike media_row_inputs pack_media_like packs_media",
    "batches._packed": "PackedBatch",
    "batches._top": "TopBatch",
    "heads._chunks": "score_rows_at_once",
    "isolation._alone": "keep_documents_apart places_alone",
    "isolation._guard": "PackedGuard guard_packed",
    "heads._media": "MediaDocument pack_media require_image_attention require_media set_attention unreached_by_media",
    "isolation._layers": "layers_apart",
    "isolation._prompt_sharing": "shares_prompts",
    "losses": "LossTerms nll",
    "memory._rehearsal": "Rehearsal tensors_of",
    "memory._tracker": "Peak",
    "objectives": (
        "AlignedDistill BaseKL BatchAllTriplet Bound Classify ClassifyBatch Contrastive ContrastiveBatch DPO Distill "
        "FollowsSteps GRPO KTO KTOBatch LabelledTexts ORPO Objective PPO PreferenceBatch Pretrain RLOO Reward SFT "
        "SelfDistill SimPO TopDistill check_reference reference_logps top_logps"
    ),
    "optimizers._optimizers": "adamw cast_trained make_optimizer",
    "optimizers._schedules": "lr_factor schedule",
    "settings._adapter": "AdapterSettings",
    "settings._classify": "ClassifySettings",
    "settings._embed": "EmbedSettings",
    "settings._grpo": "GRPOSettings",
    "settings._moe": "MoESettings",
    "settings._online": "PPOSettings RLOOSettings",
    "settings._optimizer": "SCHEDULES_WITHOUT_LENGTH OptimizerSettings",
    "settings._packing": "PackingSettings",
    "settings._parts": "PartSettings",
    "settings._preference": "DPOSettings KTOSettings ORPOSettings RewardSettings SimPOSettings",
    "settings._qat": "QATSettings",
    "settings._self_distill": "SDFTSettings",
    "settings._supervised": "DistillSettings PretrainSettings SupervisedSettings",
    "training._average": "WeightAverage",
    "training._quantized_weights": "QuantizedWeights fake_quantize",
    "training._compare": "TokenChanges token_changes",
    "training._evaluate": "Evaluation evaluate",
    "training._router_loss": "Routers routers_of",
    "training._train": "StepOutput train",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
# Folders that are public as a whole.
_PACKAGES = ("adaptations", "losses", "objectives", "online")
__all__ = sorted({*_MODULE_OF, *_PACKAGES})


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
