"""A batch and a model → the summed loss of the batch: what `train` and `evaluate` drive.

Files here import adaptations, heads, losses, and what stands below them. Subfolders hold the objectives of one family each.
"""

from forge_algos.heads._head import Head, choose_head
from forge_algos.heads._scalar_head import ScalarHead, choose_scalar_head
from forge_algos.objectives._aligned_distill import AlignedDistill
from forge_algos.objectives._base_kl import BaseKL
from forge_algos.objectives._classify import Classify, ClassifyBatch
from forge_algos.objectives._contrastive import Contrastive, ContrastiveBatch
from forge_algos.objectives._distill import Distill
from forge_algos.objectives._objective import Bound, FollowsSteps, Objective
from forge_algos.objectives._pretrain import Pretrain
from forge_algos.objectives._self_distill import SelfDistill
from forge_algos.objectives._sft import SFT
from forge_algos.objectives._tokens import TokenObjective
from forge_algos.objectives._top_distill import TopDistill, top_logps
from forge_algos.objectives._triplets import BatchAllTriplet, LabelledTexts
from forge_algos.objectives.policy._grpo import GRPO
from forge_algos.objectives.policy._online import OnlineObjective
from forge_algos.objectives.policy._ppo import PPO
from forge_algos.objectives.policy._rloo import RLOO
from forge_algos.objectives.preference._check_reference import check_reference
from forge_algos.objectives.preference._dpo import DPO
from forge_algos.objectives.preference._kto import KTO, KTOBatch
from forge_algos.objectives.preference._orpo import ORPO
from forge_algos.objectives.preference._pairs import PairObjective, PreferenceBatch
from forge_algos.objectives.preference._reference import reference_logps
from forge_algos.objectives.preference._reward import Reward
from forge_algos.objectives.preference._simpo import SimPO

__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "PPO",
    "RLOO",
    "SFT",
    "AlignedDistill",
    "BaseKL",
    "BatchAllTriplet",
    "Bound",
    "Classify",
    "ClassifyBatch",
    "Contrastive",
    "ContrastiveBatch",
    "Distill",
    "Head",
    "KTOBatch",
    "LabelledTexts",
    "FollowsSteps",
    "Objective",
    "OnlineObjective",
    "PairObjective",
    "PreferenceBatch",
    "Pretrain",
    "Reward",
    "ScalarHead",
    "SelfDistill",
    "SimPO",
    "TokenObjective",
    "TopDistill",
    "check_reference",
    "choose_head",
    "choose_scalar_head",
    "reference_logps",
    "top_logps",
]
