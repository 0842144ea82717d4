"""Tensors → `LossTerms(sum, count, stats, per_sample)` by pure functions; none divides.

Files here import batches, settings and the package's own files. Subfolders hold the losses of one family each.
"""

from forge_algos.losses._classification import classification
from forge_algos.losses._contrastive import contrastive
from forge_algos.losses._dft import dft
from forge_algos.losses._kl import kl
from forge_algos.losses._nll import nll, nll_of_logits
from forge_algos.losses._sums import completion_logps
from forge_algos.losses._terms import LossTerms
from forge_algos.losses._token_logps import token_logps
from forge_algos.losses._triplet import batch_all_triplet
from forge_algos.losses.distillation._aligned import SharedTokens, aligned_distillation
from forge_algos.losses.distillation._distillation import distillation
from forge_algos.losses.distillation._top import TopTokens, top_distillation
from forge_algos.losses.policy._advantages import (
    Advantages,
    decoupled_advantages,
    gae,
    group_advantages,
    optimal_token_advantages,
    whitened,
)
from forge_algos.losses.policy._covariance import clip_cov_tokens, covariances, kl_cov_tokens
from forge_algos.losses.policy._policy import policy_gradient, value
from forge_algos.losses.preference._dpo import dpo, wpo_weights
from forge_algos.losses.preference._kto import kto
from forge_algos.losses.preference._preference import cpo, orpo, simpo
from forge_algos.losses.preference._reward import reward
from forge_algos.settings._policy_kinds import POLICY_KINDS, PolicyKind

__all__ = [
    "POLICY_KINDS",
    "Advantages",
    "LossTerms",
    "PolicyKind",
    "SharedTokens",
    "TopTokens",
    "aligned_distillation",
    "batch_all_triplet",
    "classification",
    "clip_cov_tokens",
    "completion_logps",
    "contrastive",
    "covariances",
    "cpo",
    "decoupled_advantages",
    "dft",
    "distillation",
    "dpo",
    "gae",
    "group_advantages",
    "kl",
    "kl_cov_tokens",
    "kto",
    "nll",
    "nll_of_logits",
    "optimal_token_advantages",
    "orpo",
    "policy_gradient",
    "reward",
    "simpo",
    "token_logps",
    "top_distillation",
    "value",
    "whitened",
    "wpo_weights",
]
