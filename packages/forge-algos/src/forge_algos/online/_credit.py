"""Advantages of a whole rollout's tokens, and returns for a value head.

All that couples completions happens here, once for the whole rollout and before anything is cut: baselines of groups,
deviations, whitening. So an update does not depend on how it is cut.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from forge_algos.losses import decoupled_advantages, gae, group_advantages, kl, optimal_token_advantages, whitened
from forge_algos.losses.policy._advantages import EPSILON, WHITE

Floats = NDArray[np.float32]


@attrs.frozen(kw_only=True, eq=False)
class Scored:
    """Input of a credit function: B completions of G prompts, M tokens in all."""

    rewards: Floats
    """float32[B]; NaN where unscored."""
    parts: Mapping[str, tuple[float, Floats]]
    """What adds up to `rewards`: name of a reward or penalty → its weight, and float32[B];
    NaN where it could not score."""
    groups: NDArray[np.int64]
    """int64[B], from 0 to G - 1."""
    lengths: NDArray[np.int64]
    """int64[B]."""
    trained: NDArray[np.bool_]
    """bool[B]: whether updates train on a completion."""
    counted: NDArray[np.bool_]
    """bool[B]: whether it is one of those over which a mean is taken: trained, or masked."""
    penalty: Floats
    """float32[M]: `kl_weight` · k1 of each token;
    0 without a reference, NaN for completions that were not measured."""
    values: Floats | None
    """float32[M], the value head's; None without one."""
    greedy: Floats | None = None
    """float32[G]: the reward of each prompt's greedy completion; None without one."""
    old_logps: Floats | None = None
    """float32[M]: log-probabilities, where a token's baseline reads them."""
    collision: Floats | None = None
    """float32[M]: log Σ p² over the vocabulary, likewise; NaN for completions that were not measured."""


Credit = Callable[[Any, Scored], tuple[Floats, Floats | None]]
"""Function (settings, scored) → advantages float32[B] of completions or float32[M] of
tokens, and returns float32[M] or None."""


def advantages_of(
    settings: Any,
    *,
    rewards: Floats,
    parts: Mapping[str, tuple[float, Floats]],
    groups: NDArray[np.int64],
    lengths: NDArray[np.int64],
    trained: NDArray[np.bool_],
    counted: NDArray[np.bool_],
    old_logps: Floats,
    ref_logps: Floats | None,
    values: Floats | None,
    greedy: Floats | None = None,
    collision: Floats | None = None,
) -> tuple[Floats, Floats | None]:
    """Compute advantages float32[M], and returns float32[M] or None, by the settings' `credit`.

    Both are 0 for completions that are not trained on.

    Args:
        settings: of the method.
        rewards: float32[B]; NaN where unscored.
        parts: name → weight and float32[B], which add up to them.
        groups: int[B].
        lengths: int[B].
        trained: bool[B].
        counted: bool[B]; those that are trained, and those that are masked.
        old_logps: float32[M]; NaN for completions that were not measured.
        ref_logps: float32[M], likewise; None without a KL.
        values: float32[M], for PPO.
        greedy: float32[G], rewards of greedy completions; none of prompts that are trained on is NaN.
        collision: float32[M], log Σ p² before each token, for a baseline of each.
    """
    penalty = np.zeros_like(old_logps)
    if ref_logps is not None:
        k1 = kl(torch.from_numpy(old_logps), torch.from_numpy(ref_logps), estimator="k1").per_sample
        assert k1 is not None
        penalty = (settings.kl_weight * k1).numpy()
    scored = Scored(
        rewards=rewards,
        parts=parts,
        groups=groups,
        lengths=lengths,
        trained=trained,
        counted=counted,
        penalty=penalty,
        values=values,
        greedy=greedy,
        old_logps=None if collision is None else old_logps,
        collision=collision,
    )
    found, returns = CREDITS[settings.credit](settings, scored)
    if returns is None:
        of_tokens = found if len(found) == len(old_logps) else np.repeat(found, lengths)
        found = np.where(np.repeat(trained, lengths), of_tokens, 0).astype(np.float32)
    return found, returns


def group(settings: Any, scored: Scored) -> tuple[Floats, None]:
    """Subtract each group's baseline, divide by a deviation (GRPO), whiten if asked;
    of each reward by itself with multi_objective_aggregation="normalize_then_sum" (GDPO). Of pairs it is `pair`.

    With `kl_in_reward` a completion's reward is less Σ k1 · kl_weight over its tokens. Where there is no baseline of the group
    an advantage is a token's, less the penalties from it on, as REINFORCE++ and ReMax have it.
    """
    rewards, groups = torch.from_numpy(scored.rewards), torch.from_numpy(scored.groups)
    if settings.paired:
        return pair(settings, scored), None
    if settings.decoupled:
        if not scored.parts:
            return np.zeros_like(scored.rewards), None
        weights, values = zip(*scored.parts.values(), strict=True)
        each = torch.from_numpy(np.stack(values))
        # A penalty is a number for each completion, also for one that no reward could score.
        each[:, rewards.isnan()] = torch.nan
        return decoupled_advantages(each, groups, weights=weights, among=torch.from_numpy(scored.counted)).numpy(), None
    lengths, baseline = torch.from_numpy(scored.lengths), settings.baseline
    if baseline == "greedy":
        assert scored.greedy is not None
        rewards, baseline = rewards - torch.from_numpy(scored.greedy)[groups], "none"
    of_tokens = settings.kl_in_reward and baseline == "none"
    if settings.kl_in_reward and not of_tokens:
        rewards = torch.from_numpy((scored.rewards - _penalties(scored)).astype(np.float32))
    found = group_advantages(rewards, groups, baseline=_of_group(baseline), scale=settings.scale, lengths=lengths).numpy()
    if of_tokens:
        found = _from_each_token(found, scored)
    if settings.baseline == "optimal_token":
        found, of_tokens = _above_each_token(settings, scored), True
    if of_tokens:
        lengths = torch.ones(len(scored.penalty), dtype=torch.int64)
    if settings.whiten:
        trained = np.repeat(scored.trained, scored.lengths) if of_tokens else scored.trained
        found = found.copy()
        found[trained] = whitened(torch.from_numpy(found[trained]), lengths[torch.from_numpy(trained)]).numpy()
    return found, None


def _penalties(scored: Scored) -> NDArray[np.float64]:
    """Sum the penalty of each completion: float64[B]."""
    lengths, penalty = scored.lengths, scored.penalty.astype(np.float64)
    return np.add.reduceat(penalty, lengths.cumsum() - lengths) if len(lengths) else np.zeros(0)


def _from_each_token(advantages: Floats, scored: Scored) -> Floats:
    """Subtract from each completion's advantage the penalties from a token on: float32[M]."""
    penalty = np.nan_to_num(scored.penalty.astype(np.float64))  # of completions that are not trained on
    through, ends = penalty.cumsum(), scored.lengths.cumsum() - 1
    rest = np.repeat(through[ends], scored.lengths) - through + penalty if len(ends) else penalty
    return (np.repeat(advantages, scored.lengths) - rest).astype(np.float32)


def _of_group(baseline: str) -> str:
    """Return the baseline of completions; where one of tokens takes its place, none."""
    return "none" if baseline == "optimal_token" else baseline


def _above_each_token(settings: Any, scored: Scored) -> Floats:
    """Subtract from what is rewarded from each token on the baseline of that place: float32[M]."""
    assert scored.old_logps is not None
    assert scored.collision is not None
    known = np.repeat(scored.counted, scored.lengths)
    lengths = scored.lengths[scored.counted]
    found = np.zeros_like(scored.penalty)
    rewards = -scored.penalty[known] if settings.kl_in_reward else np.zeros(int(lengths.sum()), np.float32)
    rewards[lengths.cumsum() - 1] += scored.rewards[scored.counted]
    found[known] = optimal_token_advantages(
        torch.from_numpy(rewards),
        torch.from_numpy(scored.old_logps[known]),
        torch.from_numpy(scored.collision[known]),
        scored.groups[scored.counted].tolist(),
        lengths.tolist(),
    ).numpy()
    return found


def pairs_of(rewards: Floats, groups: NDArray[np.int64], usable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the best and the worst usable completion of each group that has two: int64[P, 2].

    Of equal ones the first is the better, and the last the worse.
    """
    found = []
    at = np.flatnonzero(usable & ~np.isnan(rewards))
    for members in np.split(at, np.flatnonzero(np.diff(groups[at])) + 1):
        if len(members) > 1:
            last = len(members) - 1
            found.append((members[rewards[members].argmax()], members[last - rewards[members][::-1].argmin()]))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def pair(settings: Any, scored: Scored) -> Floats:
    """Compute ±2β·σ(-β(c - r)) of the better and the worse completion of each pair (online DPO).

    c and r are log π/π_ref of both. It is the slope of -log σ(β(c - r)), twice, as the mean is over completions; of IPO's
    (c - r - 1/2β)² it is ±4(1/2β - (c - r)). A pair of equal rewards prefers nothing: 0.
    """
    lengths, advantages = scored.lengths, np.zeros_like(scored.rewards)
    starts = lengths.cumsum() - lengths
    ratios = np.add.reduceat(scored.penalty.astype(np.float64), starts) if len(lengths) else np.zeros(0)
    for chosen, rejected in pairs_of(scored.rewards, scored.groups, scored.trained).tolist():
        if scored.rewards[chosen] > scored.rewards[rejected]:
            margin, beta = ratios[chosen] - ratios[rejected], settings.kl_weight  # margin is β(c - r)
            slope = 2 * beta / (1 + math.exp(min(margin, 700.0)))
            if settings.loss_type == "online_ipo":
                slope = 4 * (1 / 2 - margin) / beta
            advantages[chosen], advantages[rejected] = slope, -slope
    return advantages


def leave_one_out(settings: Any, scored: Scored) -> tuple[Floats, None]:
    """Subtract the mean of the others of its group from each penalised reward (RLOO).
    The penalty is Σ k1 · kl_weight over the completion; `normalize_advantages` scales the rest.
    """
    found = group_advantages(
        torch.from_numpy((scored.rewards - _penalties(scored)).astype(np.float32)),
        torch.from_numpy(scored.groups),
        baseline="leave_one_out",
        scale="none",
    ).numpy()
    # One that is scored alone in its group has no baseline, and an advantage of 0.
    several = np.bincount(scored.groups, ~np.isnan(scored.rewards))[scored.groups] > 1 if len(found) else scored.counted
    among = found[scored.counted & several].astype(np.float64)
    if settings.normalize_advantages and len(among) > 1:
        found = np.where(several, (found - among.mean()) / (among.std(ddof=1) + EPSILON), 0).astype(np.float32)
    return found, None


def generalized(settings: Any, scored: Scored) -> tuple[Floats, Floats]:
    """Estimate each token's advantage by GAE, and whiten over all trained tokens if asked (PPO).

    A token's reward is its penalty -k1 · kl_weight; the last one's has the completion's reward too.
    """
    values = scored.values
    assert values is not None
    of_token = np.repeat(scored.trained, scored.lengths)
    cut: Sequence[int] = scored.lengths[scored.trained].tolist()
    if not cut:  # no completion could be scored
        return np.zeros_like(values), np.zeros_like(values)
    each = -scored.penalty[of_token]
    each[np.cumsum(cut, dtype=np.int64) - 1] += scored.rewards[scored.trained]
    found = gae(torch.from_numpy(each), torch.from_numpy(values[of_token]), cut, gamma=settings.gamma, lam=settings.lam)
    mine = found.advantages.numpy()
    if settings.whiten and len(mine) > 1:
        wide = mine.astype(np.float64)
        mine = ((wide - wide.mean()) / (wide.std(ddof=1) + WHITE)).astype(np.float32)
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    advantages[of_token], returns[of_token] = mine, found.returns.numpy()
    return advantages, returns


CREDITS: dict[str, Credit] = {"group": group, "leave_one_out": leave_one_out, "gae": generalized}
"""Credit functions, by the name in a settings class's `credit`."""
