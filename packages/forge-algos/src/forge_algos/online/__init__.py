"""Prompts → rollouts → batches for the online methods: sampling, rewards, advantages.

Files here import the subfolders, objectives, adaptations, and what stands below them; nothing of training.
"""

from forge_algos.batches._online import OnlineBatch
from forge_algos.batches._taught import TaughtBatch
from forge_algos.heads._value_head import attach_value_head
from forge_algos.online._make_rollout import make_rollout
from forge_algos.online._prompts import Prompt
from forge_algos.online._self_samples import SelfSamples, sample_self, taught_batches
from forge_algos.online.environments._environment import Environment, load_environment
from forge_algos.online.environments._episodes import Episodes
from forge_algos.online.rewards._reward_model import RewardModel
from forge_algos.online.rewards._rewards import Reward, check_reward, load_reward, reward_columns
from forge_algos.online.rollout._rollout import Rollout
from forge_algos.online.sampling._generate import GenerateSampler
from forge_algos.online.sampling._media_rows import SampledMedia
from forge_algos.online.sampling._prompt_reader import PromptReader
from forge_algos.online.sampling._remote import RemoteSampler
from forge_algos.online.sampling._sampler import Completion, Sampler, draw_options
from forge_algos.online.updates._beginnings import Beginnings
from forge_algos.online.updates._updates import rollout_batches

__all__ = [
    "Beginnings",
    "Completion",
    "Environment",
    "Episodes",
    "GenerateSampler",
    "OnlineBatch",
    "Prompt",
    "PromptReader",
    "RemoteSampler",
    "Reward",
    "RewardModel",
    "Rollout",
    "Sampler",
    "SampledMedia",
    "SelfSamples",
    "TaughtBatch",
    "attach_value_head",
    "check_reward",
    "draw_options",
    "load_environment",
    "load_reward",
    "make_rollout",
    "rollout_batches",
    "sample_self",
    "taught_batches",
]
