"""Log-ratios of pairs → one term a pair, for each of the fifteen losses that `dpo` knows; what each reads; f-divergences.

With c, r the log-ratios log π/π_ref of chosen and rejected, d the difference of their scores (the log-ratios themselves, or f′ of
them), L their numbers of tokens, ε the label smoothing, τ of DiscoPOP, S = log σ.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from forge_algos.losses._numeric import finite_exp


class Pairs(NamedTuple):
    """What the losses are made of: float[B] each, but for the numbers."""

    c: torch.Tensor
    r: torch.Tensor
    chosen_scores: torch.Tensor
    rejected_scores: torch.Tensor
    policy: torch.Tensor
    """log π(chosen) - log π(rejected)."""
    ref: torch.Tensor
    """The reference's."""
    chosen_nll: torch.Tensor
    """-log π of the chosen completion, divided by the tokens of a pair."""
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def x(self) -> torch.Tensor:
        """βd."""
        return self.beta * (self.chosen_scores - self.rejected_scores)

    @property
    def normed(self) -> torch.Tensor:
        """The difference of scores a token."""
        return self.chosen_scores / self.chosen_lengths - self.rejected_scores / self.rejected_lengths


class LossType(NamedTuple):
    """A loss, and what it reads beside the log-ratios and β."""

    terms: Callable[[Pairs], torch.Tensor]
    smoothing: bool = False
    divergence: bool = False
    lengths: tuple[str, ...] = ()


def scores(log_ratios: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """f′(π/π_ref) for the f of a divergence, up to a constant (arXiv 2309.16240, table 2), from log π/π_ref."""
    if divergence == "forward_kl":
        return 1 - finite_exp(-log_ratios)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    if divergence == "alpha_divergence" and abs(alpha - 1) >= 1e-6:
        return (finite_exp((alpha - 1) * log_ratios) - 1) / (alpha - 1)
    return log_ratios


def smoothed(x: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-(1-ε)·S(x) - ε·S(-x): cross entropy with a label that is wrong with probability ε."""
    losses = -logsigmoid(x)
    return (1 - smoothing) * losses - smoothing * logsigmoid(-x) if smoothing else losses


def _exo_pair(p: Pairs) -> torch.Tensor:
    won, lost = logsigmoid(p.x), logsigmoid(-p.x)
    return won.exp() * (won - math.log1p(-p.smoothing)) + lost.exp() * (lost - math.log(p.smoothing))


def _nca_pair(p: Pairs) -> torch.Tensor:
    c, r = p.beta * p.c, p.beta * p.r
    return -logsigmoid(c) - (logsigmoid(-c) + logsigmoid(-r)) / 2


def _robust(p: Pairs) -> torch.Tensor:
    flipped = p.smoothing * logsigmoid(-p.x)
    return (flipped - (1 - p.smoothing) * logsigmoid(p.x)) / (1 - 2 * p.smoothing)


def _quantiles(upper: torch.Tensor, lower: torch.Tensor, p: Pairs) -> torch.Tensor:
    """The k-th smallest of one side against the k-th smallest of the other; each term stands where `upper`'s element stood."""
    high, order = upper.sort(stable=True)
    terms = smoothed(p.beta * (high - lower.sort(stable=True).values), p.smoothing)
    return torch.zeros_like(terms).index_copy(0, order, terms)


def _discopop(p: Pairs) -> torch.Tensor:
    mixing = torch.sigmoid(p.x / p.tau)
    # At the far left both factors of the second part are extreme, and 0 · e^limit is the right 0.
    return -(1 - mixing) * logsigmoid(p.x) + mixing * finite_exp(-p.x)


_BOTH = ("chosen_lengths", "rejected_lengths")

LOSS_TYPES = {
    "aot": LossType(lambda p: _quantiles(p.policy, p.ref, p), smoothing=True),
    "aot_unpaired": LossType(lambda p: _quantiles(p.c, p.r, p), smoothing=True),
    "apo_down": LossType(lambda p: torch.sigmoid(p.beta * p.c) + torch.sigmoid(-p.beta * (p.c - p.r))),
    "apo_zero": LossType(lambda p: torch.sigmoid(-p.beta * p.c) + torch.sigmoid(p.beta * p.r)),
    "bco_pair": LossType(lambda p: -logsigmoid(p.beta * p.c) - logsigmoid(-p.beta * p.r)),
    "discopop": LossType(_discopop, divergence=True),
    "exo_pair": LossType(_exo_pair, smoothing=True, divergence=True),
    "hinge": LossType(lambda p: torch.relu(1 - p.x), divergence=True),
    "ipo": LossType(lambda p: (p.normed - 1 / (2 * p.beta)).square(), divergence=True, lengths=_BOTH),
    "nca_pair": LossType(_nca_pair),
    "robust": LossType(_robust, smoothing=True, divergence=True),
    "sft": LossType(lambda p: p.chosen_nll, lengths=("chosen_lengths",)),
    "sigmoid": LossType(lambda p: -logsigmoid(p.x), divergence=True),
    "sigmoid_norm": LossType(lambda p: -logsigmoid(p.beta * p.normed), divergence=True, lengths=_BOTH),
    "sppo_hard": LossType(lambda p: (p.c - 0.5 / p.beta).square() + (p.r + 0.5 / p.beta).square()),
}
"""By name."""

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
