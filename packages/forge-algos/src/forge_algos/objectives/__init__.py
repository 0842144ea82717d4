"""Objectives: what a batch must hold, which forward passes are made, and which loss; all driven by the one `train`."""

from forge_algos.heads._head import Head, choose_head
from forge_algos.heads._scalar_head import ScalarHead, choose_scalar_head
from forge_algos.objectives._check_reference import check_reference
from forge_algos.objectives._distill import Distill
from forge_algos.objectives._objective import Bound, Objective
from forge_algos.objectives._pretrain import Pretrain
from forge_algos.objectives._reference import reference_logps
from forge_algos.objectives._sft import SFT
from forge_algos.objectives.policy._grpo import GRPO
from forge_algos.objectives.policy._ppo import PPO
from forge_algos.objectives.policy._rloo import RLOO
from forge_algos.objectives.preference._dpo import DPO
from forge_algos.objectives.preference._kto import KTO, KTOBatch
from forge_algos.objectives.preference._orpo import ORPO
from forge_algos.objectives.preference._pairs import PreferenceBatch
from forge_algos.objectives.preference._reward import Reward
from forge_algos.objectives.preference._simpo import SimPO

__all__ = [
    "Bound",
    "DPO",
    "Distill",
    "GRPO",
    "Head",
    "KTO",
    "KTOBatch",
    "ORPO",
    "Objective",
    "PPO",
    "PreferenceBatch",
    "Pretrain",
    "RLOO",
    "Reward",
    "SFT",
    "ScalarHead",
    "SimPO",
    "check_reference",
    "choose_head",
    "choose_scalar_head",
    "reference_logps",
]
