"""Terms of each form of DPO, one a pair, and the scores that f-divergences make of ratios.

With c, r the log-ratios log π/π_ref of chosen and rejected, d the difference of their scores (the log-ratios themselves, or f′
of them), L their numbers of tokens, ε the label smoothing, S = log σ. What each form reads stands in `DPO_TYPES`, beside the
settings.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from forge_algos.losses._numeric import EXPONENT_LIMIT, finite_exp


class Pairs(NamedTuple):
    """What the losses are computed from: float[B] each, but for the numbers."""

    c: torch.Tensor
    r: torch.Tensor
    chosen_scores: torch.Tensor
    rejected_scores: torch.Tensor
    policy: torch.Tensor
    """log π(chosen) - log π(rejected)."""
    ref: torch.Tensor
    """The same under the reference."""
    chosen_nll: torch.Tensor
    """-log π of the chosen completion, divided by the tokens of a pair."""
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor
    beta: float
    smoothing: float
    tau: float
    """Temperature of `discopop`."""

    @property
    def x(self) -> torch.Tensor:
        """βd, float[B]."""
        return self.beta * (self.chosen_scores - self.rejected_scores)

    @property
    def normed(self) -> torch.Tensor:
        """Difference of the scores a token, float[B]."""
        return self.chosen_scores / self.chosen_lengths - self.rejected_scores / self.rejected_lengths


def scores(log_ratios: torch.Tensor, divergence: str, alpha: float) -> torch.Tensor:
    """Compute f′(π/π_ref) for the f of a divergence, up to a constant, from log π/π_ref.
    The formulas are those of arXiv 2309.16240, table 2, whose α is 1 - `alpha`.
    """
    if divergence == "alpha_divergence" and alpha != 1:
        # expm1, since the difference of two numbers near 1 would lose its digits where α is near 1.
        exponents = (alpha - 1) * log_ratios
        return exponents.clamp(max=EXPONENT_LIMIT[exponents.dtype]).expm1() / (alpha - 1)
    if divergence == "forward_kl":
        return 1 - finite_exp(-log_ratios)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    return log_ratios


def smoothed(x: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Compute -(1-ε)·S(x) - ε·S(-x): cross entropy with a label that is wrong with share ε."""
    losses = -logsigmoid(x)
    return (1 - smoothing) * losses - smoothing * logsigmoid(-x) if smoothing else losses


def _discopop(p: Pairs) -> torch.Tensor:
    modulation = torch.sigmoid(p.x / p.tau)
    return (1 - modulation) * -logsigmoid(p.x) + modulation * finite_exp(-p.x)


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
    """Compare the k-th smallest of one side with the k-th smallest of the other.
    A term stands where `upper`'s element stood.
    """
    high, order = upper.sort(stable=True)
    terms = smoothed(p.beta * (high - lower.sort(stable=True).values), p.smoothing)
    return torch.zeros_like(terms).index_copy(0, order, terms)


TERMS: dict[str, Callable[[Pairs], torch.Tensor]] = {
    "aot": lambda p: _quantiles(p.policy, p.ref, p),
    "aot_unpaired": lambda p: _quantiles(p.c, p.r, p),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.c) + torch.sigmoid(-p.beta * (p.c - p.r)),
    "apo_zero": lambda p: torch.sigmoid(-p.beta * p.c) + torch.sigmoid(p.beta * p.r),
    "bco_pair": lambda p: -logsigmoid(p.beta * p.c) - logsigmoid(-p.beta * p.r),
    "cdpo": lambda p: smoothed(p.x, p.smoothing),
    "discopop": _discopop,
    "exo_pair": _exo_pair,
    "hinge": lambda p: torch.relu(1 - p.x),
    "ipo": lambda p: (p.normed - 1 / (2 * p.beta)).square(),
    "nca_pair": _nca_pair,
    "robust": _robust,
    "sft": lambda p: p.chosen_nll,
    "sigmoid": lambda p: -logsigmoid(p.x),
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.normed),
    "sppo_hard": lambda p: (p.c - 0.5 / p.beta).square() + (p.r + 0.5 / p.beta).square(),
}
"""Form of DPO → its terms float[B]; what each reads stands in `DPO_TYPES`."""
