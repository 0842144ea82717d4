"""Log-probabilities and advantages of sampled tokens → clipped policy gradients; values and returns → the value loss."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._kl import estimate
from forge_algos.losses._numeric import finite_exp
from forge_algos.losses._sums import owners, sums
from forge_algos.losses._terms import LossTerms, summed

TOKEN_MEANS = ("bnpo", "dapo", "ppo")
"""Kinds whose terms are tokens; those of the others are samples."""
KINDS = ("bnpo", "dapo", "dr_grpo", "grpo", "ppo", "rloo")


class _Row(NamedTuple):
    """Which of B samples owns each of T tokens, and how long the samples are."""

    owners: torch.Tensor
    """int64[T]."""
    lengths: torch.Tensor
    """int64[B]."""

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        return sums(values_T, self.owners, len(self.lengths))

    def means(self, values_T: torch.Tensor) -> torch.Tensor:
        return self.sums(values_T) / self.lengths.clamp(min=1)


def policy_gradient(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor | Sequence[int],
    *,
    kind: str = "dapo",
    clip: float = 0.2,
    clip_high: float | None = None,
    max_length: int | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_weight: float = 0.0,
) -> LossTerms:
    """-min(ρA, clamp(ρ, 1 - clip, 1 + clip_high)A) with ρ = π/π_old (PPO, arXiv 1707.06347, equation 7), in six normalisations.

    - `ppo`, `dapo` (2503.14476, equation 8), `bnpo`: ρ of a token, each token one term, `.count` is T. As sums they are one loss;
      by name they differ in what the caller divides by: `bnpo` in TRL divides by the tokens of each micro-batch, `dapo` and the
      loop here by those of the whole step, which is the only one of the two that does not depend on the cut.
    - `grpo` (2402.03300, equation 3): the mean over each sample's tokens is one term, `.count` is B.
    - `dr_grpo` (2503.20783): the sum over each sample's tokens / `max_length` is one term, `.count` is B.
    - `rloo` (2402.14740): ρ of a whole sample, from summed log-probabilities; `.count` is B.

    No term depends on another sample: what couples samples is the advantages, and those are an argument (`group_advantages`,
    `gae`). Log-ratios above 40 (300 in float64) count as that.

    Args:
        logps: float[T], the policy's log-probabilities of the learned tokens, samples one after another, in nats.
        old_logps: float[T], those of the policy that sampled; `logps.detach()` for a first, on-policy step.
        advantages: float[B], or float[T] (a token's own, as from `gae`; not for `rloo`); no gradient reaches them.
        lengths: int[B], tokens of each sample; they add up to T. On the CPU, so that nothing waits for the device.
        kind: bnpo, dapo, dr_grpo, grpo, ppo or rloo.
        clip: above 0 and below 1.
        clip_high: above 0; None is `clip`. DAPO uses 0.28 over 0.2.
        max_length: the longest that a sample could have become; for `dr_grpo` alone.
        ref_logps: float[T], the reference's; with a `kl_weight` above 0.
        kl_weight: from 0; adds this times k3 to each token (GRPO's β). Not for `rloo`, whose penalty is part of the reward.

    Returns:
        LossTerms: over tokens or samples, as above. Stats, over the same terms (a sample's are means over its tokens):
        `clipped_low`, `clipped_high` (where the clip binds), `ratio`, `approx_kl` (k3 of old to new), `ref_kl`.

    Raises:
        LossError: lengths that disagree, an unknown kind, a number out of range, or one that the kind does not read.

    >>> logps = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    >>> terms = policy_gradient(logps, logps.detach(), torch.tensor([1.0, -1.0]), [1, 2], kind="grpo")
    >>> terms.per_sample.tolist(), terms.count
    ([-1.0, 1.0], 2)
    """
    high = clip if clip_high is None else clip_high
    _check_settings(kind, clip, high, max_length, ref_logps, kl_weight)
    given = _check.samples(logps=logps, old_logps=old_logps, ref_logps=ref_logps)
    new = given["logps"]
    cut = _check.cuts(lengths, new, "logps")
    row = _Row(owners(cut, len(new)), cut)
    log_ratio = new - given["old_logps"].detach()
    weights = _advantages(advantages, row, kind).to(new.dtype)
    if kind == "rloo":
        log_ratio = row.sums(log_ratio)
    ratio = finite_exp(log_ratio)
    losses = -torch.minimum(ratio * weights, ratio.clamp(1 - clip, 1 + high) * weights)
    stats = {
        "clipped_low": ((ratio < 1 - clip) & (weights < 0)).to(new.dtype),
        "clipped_high": ((ratio > 1 + high) & (weights > 0)).to(new.dtype),
        "ratio": ratio,
        "approx_kl": estimate(-log_ratio.detach(), "k3"),
    }
    if "ref_logps" in given:
        stats["ref_kl"] = estimate(new - given["ref_logps"].detach(), "k3")
        losses = losses + kl_weight * stats["ref_kl"]
    return _by_kind(losses, stats, row, kind, max_length)


def value(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None = 0.2) -> LossTerms:
    """½·max((V - R)², (V_clipped - R)²) with V_clipped = clamp(V, V_old ± clip): PPO's value loss as OpenAI's code has it.

    The squared error is arXiv 1707.06347, equation 9; the clip is from the paper's code (openai/baselines, ppo2), and ½ with it.

    Args:
        values: float[T], the value head's, at learned tokens.
        old_values: float[T], when the tokens were sampled.
        returns: float[T], as from `gae`.
        clip: above 0, in units of reward; None does not clip.

    Returns:
        LossTerms: over the T tokens; no token's term depends on another. Stats: `clipped` (where the clip binds), `values`,
        `returns`, `squared_error`.

    Raises:
        LossError: lengths that disagree, or a `clip` that is not above 0.

    >>> value(torch.tensor([1.0, 0.1]), torch.zeros(2), torch.tensor([1.0, 0.0])).per_sample
    tensor([0.3200, 0.0050])
    """
    if clip is not None:
        _check.number("clip", clip, above=0)
    given = _check.samples(values=values, old_values=old_values, returns=returns)
    new, target = given["values"], given["returns"].detach()
    errors = (new - target).square()
    stats = {"values": new, "returns": target, "squared_error": errors, "clipped": torch.zeros_like(new)}
    losses = errors
    if clip is not None:
        old = given["old_values"].detach()
        clipped = (torch.clamp(new, old - clip, old + clip) - target).square()
        losses = torch.maximum(errors, clipped)
        stats["clipped"] = (clipped > errors).to(new.dtype)
    return summed(losses / 2, stats)


def _by_kind(losses: torch.Tensor, stats: dict[str, torch.Tensor], row: _Row, kind: str, max_length: int | None) -> LossTerms:
    if kind in TOKEN_MEANS or kind == "rloo":
        return summed(losses, stats)
    terms = row.sums(losses) / max_length if max_length is not None else row.means(losses)
    return summed(terms, {name: row.means(values) for name, values in stats.items()})


def _advantages(advantages: torch.Tensor, row: _Row, kind: str) -> torch.Tensor:
    """Those of the terms in which ratios are formed: tokens, or samples for rloo."""
    found = _check.samples(advantages=advantages)["advantages"].detach()
    B, T = len(row.lengths), len(row.owners)
    if len(found) == B and kind == "rloo":
        return found
    if B == T and kind != "rloo" and int(row.lengths.min() if B else 1) == 0:
        raise LossError(f"advantages: with an empty sample, {B} of them could be one a sample or one a token; leave it out")
    # Otherwise, where both fit, every sample is one token, and both say the same.
    if len(found) == T and kind != "rloo":
        return found
    if len(found) == B:
        return found[row.owners]
    wanted = f"{B} (one a sample)" if kind == "rloo" else f"{B} (one a sample) or {T} (one a token)"
    raise LossError(f"advantages: {wanted} are wanted for {kind!r}, not {len(found)}")


def _check_settings(
    kind: str, clip: float, clip_high: float, max_length: int | None, ref_logps: torch.Tensor | None, kl_weight: float
) -> None:
    _check.one_of("kind", kind, KINDS)
    _check.number("clip", clip, above=0, below=1)
    _check.number("clip_high", clip_high, above=0)
    _check.number("kl_weight", kl_weight, least=0)
    if (max_length is not None) != (kind == "dr_grpo"):
        raise LossError(f"max_length={max_length}: 'dr_grpo' divides by it, and no other kind reads it; kind is {kind!r}")
    if max_length is not None:
        _check.number("max_length", max_length, least=1)
    if (ref_logps is not None) != (kl_weight > 0):
        raise LossError("ref_logps and kl_weight: both or none, the weight above 0")
    if kind == "rloo" and kl_weight:
        raise LossError("kl_weight: 'rloo' has its penalty in the reward (`kl(..., estimator='k1')`, summed over a sample)")
