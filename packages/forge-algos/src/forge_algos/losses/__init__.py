"""Losses: pure functions of tensors, each returning `LossTerms(sum, count, stats, per_sample)`; nobody divides here."""

from forge_algos.losses._dft import dft
from forge_algos.losses._kl import kl
from forge_algos.losses._nll import nll, nll_of_logits
from forge_algos.losses._sums import completion_logps
from forge_algos.losses._terms import LossTerms
from forge_algos.losses._token_logps import token_logps
from forge_algos.losses.distillation._distillation import distillation
from forge_algos.losses.policy._advantages import Advantages, gae, group_advantages
from forge_algos.losses.policy._policy import policy_gradient, value
from forge_algos.losses.preference._dpo import dpo
from forge_algos.losses.preference._kto import kto
from forge_algos.losses.preference._preference import cpo, orpo, simpo
from forge_algos.losses.preference._reward import reward

__all__ = [
    "Advantages",
    "LossTerms",
    "completion_logps",
    "cpo",
    "dft",
    "distillation",
    "dpo",
    "gae",
    "group_advantages",
    "kl",
    "kto",
    "nll",
    "nll_of_logits",
    "orpo",
    "policy_gradient",
    "reward",
    "simpo",
    "token_logps",
    "value",
]
