"""Clipped policy gradients from log-probabilities of sampled tokens, and the value loss."""

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import attrs
import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._kl import estimate
from forge_algos.losses._numeric import finite_exp
from forge_algos.losses._sums import sums
from forge_algos.losses._terms import LossTerms, summed
from forge_algos.settings._policy_kinds import GAMMA, GATE, POLICY_KINDS, PolicyKind, Ratio, Reduce
from forge_algos.settings._validators import either

_LEAST, _MOST = math.log(1e-8), 20.0
"""Least and greatest log-ratio of a sample of which a Gamma weight is taken, as in TRL."""
_LEAST_REST = 1e-8
"""Added to the probability of all other tokens, of which a logarithm is taken."""
_ROUNDING = 1e-5
"""Log-ratio up to which a policy has not moved: the ratio of a first update is 1 to 1e-6, on either side of it."""
LOSS_ESTIMATORS = ("k3", "unbiased")
"""Estimators of the KL to the reference that may be a part of the loss."""


class _Row(NamedTuple):
    """Lengths of B samples, which are T tokens."""

    sizes: list[int]
    lengths: torch.Tensor
    """The same, int64[B] on the device."""

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        return sums(values_T, self.sizes)

    def means(self, values_T: torch.Tensor) -> torch.Tensor:
        return self.sums(values_T) / self.lengths.clamp(min=1)

    def spread(self, values_B: torch.Tensor) -> torch.Tensor:
        return values_B.repeat_interleave(self.lengths, output_size=sum(self.sizes))


def policy_gradient(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    lengths: torch.Tensor | Sequence[int],
    *,
    kind: str = "dapo",
    ratio: Ratio | None = None,
    reduce: Reduce | None = None,
    clip: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    max_length: int | None = None,
    ref_logps: torch.Tensor | None = None,
    kl_weight: float = 0.0,
    kl_estimator: str = "k3",
    temperatures: tuple[float, float] | None = None,
    gamma_weights: tuple[tuple[float, float], tuple[float, float]] | None = None,
    off_policy_threshold: float | None = None,
    dro_beta: float | None = None,
    chosen: torch.Tensor | None = None,
    kl_cov_coef: float | None = None,
) -> LossTerms:
    """Sum -min(ρA, clamp(ρ, 1 - clip, 1 + clip_high)A), normalised as the kind is.

    ρ = π/π_old (PPO, arXiv 1707.06347, equation 7). What the ratio is formed of and what a term is stands in the kind's row of
    `POLICY_KINDS`:

    - `ppo`, `dapo` (2503.14476, equation 8): ρ of a token, each token is one term, `.count` is T. As sums the two are the same
      loss.
    - `grpo` (2402.03300, equation 3): the mean over each sample's tokens is one term, `.count` is B.
    - `dr_grpo` (2503.20783): the sum over each sample's tokens / `max_length` is one term, `.count` is B.
    - `gspo` (2507.18071, equations 5 to 7): ρ of a whole sample, the geometric mean of its tokens'; `.count` is B.
    - `luspo` (2602.05261): the same times the sample's number of tokens, so that a long sample's tokens count as much as a
      short one's; `.count` is B.
    - `gmpo` (2507.20673): ρ of a whole sample, the geometric mean of its tokens', each of which counts e^-clip at least where
      the advantage is negative and e^clip_high at most where it is positive; `.count` is B.
    - `cispo` (2506.13585, equations 4 and 5): -sg(min(ρ, 1 + clip_high))·A·log π of a token; `.count` is T. A `clip` bounds the
      weight below too.
    - `sapo` (2511.20347): -4/τ·σ(τ(ρ - 1))·A of a token, whose gradient is that of ρA at 1 and fades on both sides of it; the
      mean over each sample's tokens is one term, `.count` is B.
    - `vespo` (2602.10693): -sg(φ(ρ))·A·log π of a token, ρ the product of its sample's, φ(ρ) = ρ^k·e^(λ(1 - ρ)), which is 1
      at 1 and falls on both sides of its peak at k/λ; `.count` is T. A token's log-ratio counts up to ±20, a sample's from
      log 1e-8 to 20, as in TRL.
    - `dppo_tv`, `dppo_kl` (2602.04879): -sg(ρ)·A·log π of a token, 0 where its probability p went too far the way that A pushes
      it: p - p_old above clip_high where A is above 0, and below -clip elsewhere, or the divergence of (p, 1 - p) from (p_old,
      1 - p_old) likewise; `.count` is T.
    - `gpg` (2504.02546): -A·log π of a token, without a ratio; `.count` is T.
    - `dro` (verl's form of 2405.19107): -A·log π + β/2·(log ρ)² of a token; `.count` is T.
    - `clip_cov` (2505.22617, equation 13): as `dapo`, and the tokens that `clip_cov_tokens` chose have no term; `.count` is T.
    - `kl_cov` (2505.22617, equation 15): -ρA of a token, and the tokens that `kl_cov_tokens` chose have `kl_cov_coef`·|log ρ|
      more, whose slope begins where |log ρ| is 1e-5, below which it is rounding; `.count` is T.
    - `online_dpo`, `online_ipo` (2402.04792): -A·log π of a whole sample, without a ratio: with the slope of a pair's DPO or
      IPO loss as A, its gradient on the policy that sampled is that loss's; `.count` is B.
    - `rloo` (2402.14740): ρ of a whole sample, from summed log-probabilities; `.count` is B.

    No term depends on another sample: what couples samples is the advantages, which are an argument (`group_advantages`,
    `gae`). Log-ratios above 40 (300 in float64) count as 40 (300). TRL's `bnpo` is `dapo` divided by the tokens of each
    micro-batch instead of those of the whole step.

    Args:
        logps: float[T], the policy's log-probabilities of the learned tokens, samples one after another, in nats.
        old_logps: float[T], those of the policy that sampled; `logps.detach()` for a first, on-policy step.
        advantages: float[B], or where tokens have losses of their own float[T] (as from `gae`); no gradient reaches them.
        lengths: int[B], tokens of each sample; they add up to T. On the CPU, so that nothing waits for the device.
        kind: a name in `POLICY_KINDS`: cispo, clip_cov, dapo, dppo_kl, dppo_tv, dr_grpo, dro, gmpo, gpg, grpo, gspo, kl_cov,
            luspo, online_dpo, online_ipo, ppo, rloo, sapo or vespo.
        ratio: whose ratio, in the place of the kind's: token, sequence_mean (as in `gspo`) or sequence_sum (as in `rloo`).
            Terms and what they are divided by stay the kind's: with `dapo` a sample's ratio then counts once a token. Not for
            `gmpo` and those whose ratio is no choice.
        reduce: what a term is, in the place of the kind's: a token ("tokens"), or of a sample the mean over its tokens
            ("mean"), their sum ("sum"), or that over `max_length` ("max_length").
        clip: above 0 and below 1; None is the kind's own: 0.2, 0.0003 for `gspo` and `luspo`, 0.4 for `gmpo`, no bound for
            `cispo`; of a divergence 0.15 for `dppo_tv`, 0.05 for `dppo_kl`. Not for those that clip nothing.
        clip_high: above 0; None is `clip`, or the kind's own where that is None too: 0.2, 0.0004 for `gspo` and
            `luspo`, 0.4 for `gmpo`, 4 for `cispo`. DAPO uses 0.28 over 0.2.
        dual_clip: above 1 + clip_high: what ρ counts at most where the advantage is negative, so that no such term is without
            bound (c of 1912.09729, equation 5, δ of 2505.07291, equation 1). Not for `cispo`, whose weights are bounded,
            `gmpo`, and those that clip nothing. With `dppo_tv` and `dppo_kl` for any advantage.
        max_length: tokens of the longest sample that was possible; for kinds that divide by it (`dr_grpo`), and only for them.
        ref_logps: float[T], the reference's; with a `kl_weight` above 0.
        kl_weight: from 0; adds this times the KL's estimate to each token (GRPO's β). Not for `rloo`, whose penalty is part of
            the reward. Where ratios are those of samples, the mean over a sample's tokens is added to its term.
        kl_estimator: k3 (2402.03300, equation 4), or unbiased: the token's ρ times k3, gradient and all, whose expectation over
            the policy that sampled has the true KL's gradient (DeepSeek-V3.2, 2512.02556, section 3.1).
        temperatures: of `sapo`, and only of it: τ where the advantage is above 0, and where it is not; (1, 1.05) by default.
            The larger, the faster the gradient fades.
        gamma_weights: of `vespo`, and only of it: (k, λ) where the advantage is not negative, and (k, λ) where it is; ((2, 3),
            (3, 2)) by default. k is from 0, λ above 0.
        off_policy_threshold: above 0: a sample whose advantage is negative, and whose tokens' mean log π_old - log π is above
            it, in nats, has no term but the KL's, the square of `dro` and what `kl_cov` adds (DeepSeek-V3.2, 2512.02556,
            section 3.1). It counts all the same.
        dro_beta: of `dro`, and needed there: β, above 0.
        chosen: bool[T], of `clip_cov` and `kl_cov`, and needed there: tokens chosen among all of a step's.
        kl_cov_coef: of `kl_cov`, and only of it: above 0; 1 by default.

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
    how = _row_of(kind, ratio, reduce)
    low, high = how.bounds(clip, clip_high)
    _check_settings(kind, how, low, high, dual_clip, max_length, ref_logps, kl_weight, kl_estimator)
    _check_unclipped(kind, clip, clip_high, dual_clip, temperatures, gamma_weights, dro_beta)
    given = _check.samples("ref_logps", logps=logps, old_logps=old_logps, ref_logps=ref_logps)
    new = given["logps"]
    _check_chosen(kind, chosen, kl_cov_coef, len(new))
    sizes = _check.cuts(lengths, new, "logps")
    row = _Row(sizes, torch.tensor(sizes, dtype=torch.int64, device=new.device))
    log_ratio = new - given["old_logps"].detach()
    if how.ratio != "token":
        log_ratio = log_ratio.clamp(-_MOST, _MOST) if how.clipped == "gamma" else log_ratio
        log_ratio = row.sums(log_ratio) if how.ratio == "sequence_sum" else row.means(log_ratio)
        log_ratio = row.spread(log_ratio) if how.per_token else log_ratio
    weights = _advantages(advantages, row, kind, of_tokens=how.per_token).to(new.dtype)
    rho = finite_exp(log_ratio)
    old = given["old_logps"].detach()
    if how.clipped == "gate":
        losses = _gated(rho, weights, GATE if temperatures is None else temperatures)
        below = above = torch.zeros_like(rho)
    elif how.clipped == "gamma":
        losses = -_gamma(log_ratio.detach(), weights, GAMMA if gamma_weights is None else gamma_weights) * weights * new
        below = above = torch.zeros_like(rho)
    elif how.clipped == "cov_kl":
        losses = -rho * weights
        below = above = torch.zeros_like(losses)
    elif how.clipped in ("none", "square"):
        losses = -weights * (new if how.per_token else row.sums(new))
        below = above = torch.zeros_like(losses)
    else:
        losses, below, above = _bounded(how, row, rho, new, old, weights, (low, high), dual_clip)
        losses = losses if chosen is None else torch.where(chosen, 0, losses)  # clip_cov's
    if off_policy_threshold is not None:
        _check.number("off_policy_threshold", off_policy_threshold, above=0)
        near = row.means((given["old_logps"] - new).detach()) <= off_policy_threshold
        near = row.spread(near) if how.per_token else near
        losses = torch.where(near | (weights >= 0), losses, 0)
    if dro_beta is not None:
        losses = losses + dro_beta / 2 * log_ratio.square()
    if how.clipped == "cov_kl" and chosen is not None:
        away = torch.where(log_ratio.abs() > _ROUNDING, log_ratio.abs(), log_ratio.abs().detach())
        losses = losses + torch.where(chosen, (1.0 if kl_cov_coef is None else kl_cov_coef) * away, 0)
    stats = {
        "clipped_low": below.to(new.dtype),
        "clipped_high": above.to(new.dtype),
        "ratio": rho,
        "approx_kl": estimate(-log_ratio.detach(), "k3"),
    }
    if "ref_logps" in given:
        ref_kl = estimate(new - given["ref_logps"].detach(), "k3")
        weighed = ref_kl * finite_exp(new - given["old_logps"].detach()) if kl_estimator == "unbiased" else ref_kl
        stats["ref_kl"], weighed = (ref_kl, weighed) if how.per_token else (row.means(ref_kl), row.means(weighed))
        losses = losses + kl_weight * weighed
    if not how.per_token and how.reduce == "sum":
        losses = losses * row.lengths
    if not how.per_token or how.reduce == "tokens":
        return summed(losses, stats)
    terms = row.means(losses) if how.reduce == "mean" else row.sums(losses) / (max_length or 1)
    return summed(terms, {name: row.means(values) for name, values in stats.items()})


def value(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None = 0.2) -> LossTerms:
    """Sum ½·max((V - R)², (V_clipped - R)²) with V_clipped = clamp(V, V_old ± clip).
    This is PPO's value loss as OpenAI's code has it.

    The squared error is arXiv 1707.06347, equation 9; the clip is from the paper's code (openai/baselines, ppo2), and ½ with
    it.

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


def _advantages(advantages: torch.Tensor, row: _Row, kind: str, *, of_tokens: bool) -> torch.Tensor:
    """Advantages of what has a loss: float[T] of tokens, or float[B] of samples."""
    found = _check.samples(advantages=advantages)["advantages"].detach()
    B, T = len(row.sizes), sum(row.sizes)
    if len(found) == B and not of_tokens:
        return found
    if B == T and of_tokens and 0 in row.sizes:
        raise LossError(f"advantages: with an empty sample, {B} of them could be one a sample or one a token; leave it out")
    # Otherwise, where both fit, every sample is one token, and both mean the same.
    if len(found) == T and of_tokens:
        return found
    if len(found) == B:
        return row.spread(found)
    wanted = f"{B} (one a sample) or {T} (one a token)" if of_tokens else f"{B} (one a sample)"
    raise LossError(f"advantages: {wanted} are wanted for {kind!r}, not {len(found)}")


def _row_of(kind: str, ratio: Ratio | None, reduce: Reduce | None) -> PolicyKind:
    """Return the kind's row with this ratio and these terms; raise LossError for others."""
    _check.one_of("kind", kind, POLICY_KINDS)
    how = POLICY_KINDS[kind]
    if ratio is not None:
        _check.one_of("ratio", ratio, get_args(Ratio))
        if how.fixed and ratio != how.ratio:
            raise LossError(f"ratio={ratio!r}: {kind!r} has a ratio of its own, or none; leave it out")
        how = attrs.evolve(how, ratio=ratio)
    if reduce is not None:
        _check.one_of("reduce", reduce, get_args(Reduce))
        if how.whole and reduce != how.reduce:
            raise LossError(f"reduce={reduce!r}: {kind!r} has a loss of whole samples; leave it out")
        how = attrs.evolve(how, reduce=reduce)
    return how


def _gated(rho: torch.Tensor, weights: torch.Tensor, temperatures: tuple[float, float]) -> torch.Tensor:
    """Compute -4/τ·σ(τ(ρ - 1))·A, τ by the sign of A."""
    positive, other = temperatures
    # A tensor: of two numbers torch makes float32, whatever the row is in.
    tau = torch.where(weights > 0, rho.new_full((), positive), other)
    return -4 / tau * torch.sigmoid(tau * (rho - 1)) * weights


def _gamma(
    log_ratio: torch.Tensor, weights: torch.Tensor, gamma_weights: tuple[tuple[float, float], tuple[float, float]]
) -> torch.Tensor:
    """Compute ρ^k·e^(λ(1 - ρ)), k and λ by the sign of A."""
    (k, rate), (k_below, rate_below) = gamma_weights
    log_w = log_ratio.clamp(_LEAST, _MOST)
    powers, rates = (torch.where(weights >= 0, log_w.new_full((), a), b) for a, b in ((k, k_below), (rate, rate_below)))
    return finite_exp(powers * log_w + rates * (1 - log_w.exp()))


def _bounded(
    how: PolicyKind,
    row: _Row,
    rho: torch.Tensor,
    new: torch.Tensor,
    old: torch.Tensor,
    weights: torch.Tensor,
    bounds: tuple[float | None, float],
    dual_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the losses of a kind with bounds, and where the lower and the upper one bind."""
    low, high = bounds
    if how.diverges:
        p, before = new.detach().exp(), old.exp()
        rise = p - before
        far = rise.abs() if how.clipped == "tv" else _binary_kl(new.detach(), old)
        above, below = (far > high) & (rise > 0) & (weights > 0), (far > (low or 0.0)) & (rise < 0) & (weights <= 0)
        weight = rho.detach() if dual_clip is None else rho.detach().clamp(max=dual_clip)
        return torch.where(above | below, 0.0, -weight * weights * new), below, above
    if how.clipped == "tokens":
        token_ratio = new - old
        positive = row.spread(weights > 0)
        held = torch.where(positive, token_ratio.clamp(max=high), token_ratio if low is None else token_ratio.clamp(min=-low))
        below, above = row.means((held > token_ratio).to(new.dtype)), row.means((held < token_ratio).to(new.dtype))
        return -finite_exp(row.means(held)) * weights, below, above
    held = rho.clamp(None if low is None else 1 - low, 1 + high)
    below, above = held > rho, held < rho
    if how.clipped == "weight":
        return -held.detach() * weights * new, below, above
    whole = rho if dual_clip is None else rho.clamp(max=dual_clip)
    losses = -torch.minimum(whole * weights, held * weights)
    return losses, below & (weights < 0), (above & (weights > 0)) | ((whole < rho) & (weights < 0))


def _binary_kl(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Compute the KL divergence of (p, 1 - p) from (p_old, 1 - p_old), as verl does."""
    rest, before = ((1 - each.exp()).clamp(min=0) + _LEAST_REST for each in (new, old))
    return old.exp() * (old - new) + (1 - old.exp()) * torch.log(before / rest)


def _check_chosen(kind: str, chosen: torch.Tensor | None, kl_cov_coef: float | None, tokens: int) -> None:
    """Raise LossError where tokens are chosen and none should be, or the reverse."""
    readers = [repr(name) for name, each in POLICY_KINDS.items() if each.chooses]
    if (chosen is not None) != POLICY_KINDS[kind].chooses:
        raise LossError(f"chosen: {' and '.join(readers)} need it (`clip_cov_tokens`), and no other does; kind is {kind!r}")
    if chosen is not None and (chosen.dtype != torch.bool or chosen.shape != (tokens,)):
        raise LossError(f"chosen: bool[{tokens}] is wanted, one of each token, not {_check.described(chosen)}")
    if kl_cov_coef is None:
        return
    if POLICY_KINDS[kind].clipped != "cov_kl":
        raise LossError(f"kl_cov_coef={kl_cov_coef}: 'kl_cov' reads it, and no other kind; kind is {kind!r}")
    _check.number("kl_cov_coef", kl_cov_coef, above=0)


def _check_unclipped(
    kind: str,
    clip: float | None,
    clip_high: float | None,
    dual_clip: float | None,
    temperatures: tuple[float, float] | None,
    gamma_weights: tuple[tuple[float, float], tuple[float, float]] | None,
    dro_beta: float | None,
) -> None:
    """Raise LossError for a bound where nothing is clipped, or numbers of another kind."""
    if (dro_beta is not None) != (POLICY_KINDS[kind].clipped == "square"):
        raise LossError(f"dro_beta={dro_beta}: 'dro' needs it, and no other kind reads it; kind is {kind!r}")
    if dro_beta is not None:
        _check.number("dro_beta", dro_beta, above=0)
    own = {"gate": ("temperatures", temperatures), "gamma": ("gamma_weights", gamma_weights)}
    for clipped, (name, given) in own.items():
        readers = [each for each, row in POLICY_KINDS.items() if row.clipped == clipped]
        if given is None:
            continue
        if kind not in readers:
            raise LossError(f"{name}: {either(list(map(repr, readers)))} has them, and no other kind; kind is {kind!r}")
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise LossError(f"{name}: two {'numbers' if clipped == 'gate' else 'pairs'} are wanted, not {given!r}")
    for value in temperatures or ():
        _check.number("temperatures", value, above=0)
    for pair in gamma_weights or ():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise LossError(f"gamma_weights: two pairs are wanted, not {gamma_weights!r}")
        _check.number("gamma_weights", pair[0], least=0)
        _check.number("gamma_weights", pair[1], above=0)
    if not POLICY_KINDS[kind].bounded:
        for name, bound in (("clip", clip), ("clip_high", clip_high), ("dual_clip", dual_clip)):
            if bound is not None:
                instead = own.get(POLICY_KINDS[kind].clipped)
                remedy = f", or set {instead[0]}" if instead else ""
                raise LossError(f"{name}={bound}: {kind!r} clips nothing; leave it out{remedy}")


def _check_settings(
    kind: str,
    how: PolicyKind,
    clip: float | None,
    clip_high: float,
    dual_clip: float | None,
    max_length: int | None,
    ref_logps: torch.Tensor | None,
    kl_weight: float,
    kl_estimator: str,
) -> None:
    """Raise LossError for a number that is out of range or not read by this kind."""
    if clip is not None:
        _check.number("clip", clip, above=0, below=1)
    _check.number("clip_high", clip_high, above=0)
    if dual_clip is not None:
        if POLICY_KINDS[kind].clipped in ("weight", "tokens", "cov"):
            raise LossError(f"dual_clip={dual_clip}: {kind!r} bounds its ratios by clip_high, and reads no other bound")
        _check.number("dual_clip", dual_clip, above=1 if how.diverges else 1 + clip_high)
    _check.number("kl_weight", kl_weight, least=0)
    _check.one_of("kl_estimator", kl_estimator, LOSS_ESTIMATORS)
    readers = [name for name, each in POLICY_KINDS.items() if each.reduce == "max_length"]
    if (max_length is not None) != (how.reduce == "max_length"):
        raise LossError(
            f"max_length={max_length}: {either(list(map(repr, readers)))} divides by it, and so does reduce='max_length'; "
            f"no other kind reads it; kind is {kind!r}"
        )
    if max_length is not None:
        _check.number("max_length", max_length, least=1)
    if (ref_logps is not None) != (kl_weight > 0):
        raise LossError("ref_logps and kl_weight: both or none, the weight above 0")
    if kl_estimator != "k3" and not kl_weight:
        raise LossError(f"kl_estimator={kl_estimator!r} has no effect without a kl_weight above 0")
    if kl_weight and not POLICY_KINDS[kind].kl:
        raise LossError(f"kl_weight: {kind!r} has its penalty in the reward (`kl(..., estimator='k1')`, summed over a sample)")
