"""Prompts → rollouts → batches: sampling, rewards, log-probability bookkeeping and credit for PPO, GRPO and RLOO."""

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._value_head import attach_value_head
from forge_algos.online._generate import GenerateSampler
from forge_algos.online._make import make_rollout
from forge_algos.online._prompts import Prompt
from forge_algos.online._reward_model import RewardModel
from forge_algos.online._rewards import Reward, load_reward
from forge_algos.online._rollout import Rollout
from forge_algos.online._sampler import Completion, Sampler
from forge_algos.online._updates import rollout_batches

__all__ = [
    "Completion",
    "GenerateSampler",
    "OnlineBatch",
    "Prompt",
    "Reward",
    "RewardModel",
    "Rollout",
    "Sampler",
    "attach_value_head",
    "load_reward",
    "make_rollout",
    "rollout_batches",
]
