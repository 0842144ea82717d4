"""Advantages from rewards: over time against a value function, or within a prompt's group."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check

BASELINES = ("mean", "leave_one_out", "length", "second_best", "none")
SCALES = ("group", "batch", "nonzero", "none")
EPSILON = 1e-4
"""Added to a standard deviation before anything is divided by it, as TRL does."""
WHITE = 1e-8
"""Added to the deviation of whitened advantages, as in TRL's and OpenAI's code."""


class Advantages(NamedTuple):
    """Result of `gae`, float32[T] each, without gradients."""

    advantages: torch.Tensor
    returns: torch.Tensor
    """Advantages plus values: the targets of the value function."""


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor | Sequence[int],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: torch.Tensor | None = None,
) -> Advantages:
    """Compute A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γV_{t+1} - V_t, within each sample.
    It is arXiv 1506.02438, equations 11 and 16. Nothing is whitened: that would couple the samples of a batch.

    Nothing is whitened: that would couple the samples of a batch.

    Args:
        rewards: float[T], samples one after another.
        values: float[T], V before each token.
        lengths: int[B], tokens of each sample; they add up to T. On the CPU, so that nothing waits for the device.
        gamma: γ, from 0 to 1.
        lam: λ, from 0 (one step) to 1 (Monte Carlo).
        bootstrap: float[B], V after each sample's last token; None is 0, for samples that ended by themselves.

    Returns:
        Advantages: `advantages` and `returns`, float32[T] each (float64 where that came in), detached.

    Raises:
        LossError: lengths that disagree, or a number out of range.

    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), [2], lam=1.0)
    Advantages(advantages=tensor([0.5000, 0.5000]), returns=tensor([1., 1.]))
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        _check.number(name, factor, least=0)
        if factor > 1:
            raise LossError(f"{name}: a number from 0 to 1 is wanted, not {factor!r}")
    given = _check.samples(rewards=rewards, values=values)
    r, v = given["rewards"].detach(), given["values"].detach()
    cut = torch.tensor(_check.cuts(lengths, r, "rewards"), dtype=torch.int64, device=r.device)
    after = (
        _check.samples("bootstrap", bootstrap=bootstrap).get("bootstrap", r.new_zeros(len(cut))).detach().to(r.dtype, copy=True)
    )
    if len(after) != len(cut):
        raise LossError(
            f"the lengths disagree: lengths {len(cut)}, bootstrap {len(after)}; all of them are over the same samples"
        )
    ends = cut.cumsum(0)
    running = torch.zeros_like(after)
    advantages = torch.empty_like(r)
    # Backwards from every sample's end at once: as many steps as the longest sample has tokens.
    for back in range(1, int(cut.max()) + 1 if len(cut) else 0):
        alive = (cut >= back).nonzero().squeeze(1)
        at = ends[alive] - back
        running[alive] = r[at] + gamma * after[alive] - v[at] + gamma * lam * running[alive]
        after[alive] = v[at]
        advantages[at] = running[alive]
    return Advantages(advantages, advantages + v)


def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor | Sequence[int],
    *,
    baseline: str = "mean",
    scale: str = "group",
    lengths: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Compute each reward minus its group's baseline, over a standard deviation.
    A group is all samples of one prompt.

    GRPO (arXiv 2402.03300, section 4.1.2) is `mean` and `group`, Dr. GRPO (2503.20783) `mean` and `none`, RLOO (2402.14740,
    equation 7) `leave_one_out` and `none`, OPO (2505.23585) `length` and `none`. REINFORCE++ (2501.03262) is `none` and
    `none`, and with a baseline `mean` and `none`, whitened. GPG (2504.02546), as verl has it, is `mean` and `nonzero`. With
    `second_best` (Pass@k training, 2503.19595) only a group's best sample has an advantage: what it has above the second best.

    What is coupled: the samples of a group, and with scale="batch" or "nonzero" all samples of one call. So call it with whole
    groups, once for a whole step, before the step is cut.

    Args:
        rewards: float[B]; NaN is a sample that could not be scored: it counts in no mean, and its advantage is 0.
        groups: int[B], which group each sample belongs to: any numbers from 0, in any order, groups of any size.
        baseline: mean, leave_one_out (the mean of the others), length (the mean by number of tokens), second_best, or none (0).
        scale: group or batch (divide by that standard deviation, with Bessel's correction, plus 1e-4), nonzero (by the share
            of rewards other than 0), or none.
        lengths: int[B], tokens of each sample, from 1; read by `length` alone.

    Returns:
        torch.Tensor: float32[B], detached. 0 where a group has one scored sample, or rewards that are all equal, unless the
        baseline is none.

    Raises:
        LossError: lengths that disagree, an infinite reward, a group below 0, or an unknown name.

    >>> group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), [0, 0, 1, 1], baseline="leave_one_out", scale="none")
    tensor([ 1., -1.,  0.,  0.])
    """
    _check.one_of("baseline", baseline, BASELINES)
    _check.one_of("scale", scale, SCALES)
    r = _check.samples(rewards=rewards)["rewards"].detach()
    ids = _check.integers("groups", groups).to(r.device)
    if ids.shape != r.shape:
        raise LossError(f"groups: one integer for each of {len(r)} rewards is wanted, not {_check.described(groups)}")
    if len(r) == 0:
        return r
    if bool(r.isinf().any()) or int(ids.min()) < 0:
        row = int((r.isinf() | (ids < 0)).nonzero()[0])
        raise LossError(f"sample {row}: reward {float(r[row])} in group {int(ids[row])}; rewards are finite and groups from 0")
    scored = ~r.isnan()
    _, ids = ids.unique(return_inverse=True)
    G = int(ids.max()) + 1
    zeroed = torch.where(scored, r, 0)
    count_G = r.new_zeros(G).index_add(0, ids, scored.to(r.dtype))
    mean_G = r.new_zeros(G).index_add(0, ids, zeroed) / count_G.clamp(min=1)
    centred = torch.where(scored, r - mean_G[ids], 0)
    # Equal rewards must give 0; the rounding of their mean, divided by 1e-4, would not.
    lowest = r.new_full((G,), torch.inf).scatter_reduce(0, ids, torch.where(scored, r, torch.inf), "amin")
    highest = r.new_full((G,), -torch.inf).scatter_reduce(0, ids, torch.where(scored, r, -torch.inf), "amax")
    centred = torch.where((lowest == highest)[ids], 0, centred)
    if scale == "group":
        unit = _unit(torch.where(count_G > 0, highest - lowest, 0))[ids]
        squares = r.new_zeros(G).index_add(0, ids, (centred / unit).square())
        deviation = (squares / (count_G - 1).clamp(min=1)).sqrt()[ids] * unit
    elif scale == "batch":
        deviation = r[scored].std() if int(scored.sum()) > 1 else r.new_zeros(())
    else:
        deviation = None
    if baseline == "leave_one_out":
        # r - mean of the others = (r - mean of all) · n / (n - 1).
        centred = centred * (count_G / (count_G - 1).clamp(min=1))[ids]
    elif baseline == "length":
        # r - Σ L r / Σ L = (r - mean) - Σ L (r - mean) / Σ L.
        weight = torch.where(scored, _lengths(lengths, r), 0)
        sums = r.new_zeros(2, G).index_add(1, ids, torch.stack([weight * centred, weight]))
        centred = torch.where(scored, centred - (sums[0] / sums[1].clamp(min=1))[ids], 0)
    elif baseline == "second_best":
        centred = _above_second(r, ids, G, count_G)
    elif baseline == "none":
        centred = zeroed
    if scale == "nonzero":
        given = int(scored.sum())
        return centred * (given / max(int((zeroed != 0).sum()), 1))
    return centred if deviation is None else centred / (deviation + EPSILON)


def decoupled_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor | Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    among: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise each of K rewards within its group, add them up, and normalise the sums (GDPO).

    It is arXiv 2601.05242: rewards of other scales, or of which one seldom differs, keep their part in the
    sum. All samples of one call are coupled: call it once for a whole rollout.

    Args:
        rewards: float[K, B]; NaN where a reward could not score a sample, which then adds 0. A sample that none could score
            counts in no mean, and its advantage is 0.
        groups: int[B], as in `group_advantages`.
        weights: K numbers; 1 by default.
        among: bool[B], the samples over whose sums the second mean and deviation are taken; all that are scored by default.

    Returns:
        torch.Tensor: float32[B], detached.

    Raises:
        LossError: as `group_advantages`, or weights or samples of another number.

    >>> decoupled_advantages(torch.tensor([[1.0, 0.0], [0.0, 100.0]]), [0, 0], weights=[2.0, 1.0])
    tensor([ 0.7070, -0.7070])
    """
    if rewards.dim() != 2 or not len(rewards):
        raise LossError(f"rewards: one row for each reward is wanted, not {_check.described(rewards)}")
    factors = [1.0] * len(rewards) if weights is None else list(weights)
    if len(factors) != len(rewards):
        raise LossError(f"weights: {len(rewards)} numbers are wanted, one for each reward, not {len(factors)}")
    scored = ~rewards.isnan().all(0)
    each = [factor * group_advantages(row, groups) for factor, row in zip(factors, rewards, strict=True)]
    found = torch.stack(each).sum(0)
    within = found[scored if among is None else scored & among]
    if len(within) > 1:
        found = (found - within.mean()) / (within.std() + EPSILON)
    return torch.where(scored, found, 0)


def optimal_token_advantages(
    rewards: torch.Tensor,
    logps: torch.Tensor,
    collisions: torch.Tensor,
    groups: torch.Tensor | Sequence[int],
    lengths: torch.Tensor | Sequence[int],
) -> torch.Tensor:
    """Subtract from each token's return the optimal baseline of its place in its group (OTB).

    G_t is what a sample is rewarded from token t on, and W_t the sum of 1 - 2π + Σp² over its tokens up to t, a measure of how
    large its gradient has become. The baseline of a group's t-th tokens is Σ G_t W_t / Σ W_t over its samples, as verl's
    `optimal_token_baseline` has it; a place that one sample alone reaches has none, and one whose returns are all equal an
    advantage of 0. The samples of a group are coupled: call it with whole groups, before a step is cut.

    Args:
        rewards: float[T], of each token, samples one after another; a sample's own belongs to its last.
        logps: float[T], log π of the tokens under the policy that sampled, in nats.
        collisions: float[T], log Σ p² over the vocabulary.
        groups: int[B], as in `group_advantages`.
        lengths: int[B], tokens of each sample; they add up to T.

    Returns:
        torch.Tensor: float32[T] (float64 where that came in), detached.

    Raises:
        LossError: lengths that disagree.

    >>> rewards, logps = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.25]).log()
    >>> optimal_token_advantages(rewards, logps, torch.tensor([0.5, 0.25]).log(), [0, 0], [1, 1])
    tensor([ 0.6000, -0.4000])
    """
    given = _check.samples(rewards=rewards, logps=logps, collisions=collisions)
    r = given["rewards"].detach().double()
    cut = torch.tensor(_check.cuts(lengths, r, "rewards"), dtype=torch.int64, device=r.device)
    ids = _check.integers("groups", groups).to(r.device)
    if ids.shape != cut.shape:
        raise LossError(f"groups: one integer for each of {len(cut)} samples is wanted, not {_check.described(groups)}")
    if not len(r):
        return given["rewards"].detach()
    sample = torch.arange(len(cut), device=r.device).repeat_interleave(cut)
    starts = (cut.cumsum(0) - cut)[sample]
    energy = (1 - 2 * given["logps"].detach().double().exp() + given["collisions"].detach().double().exp()).clamp(min=0)
    through_r, through_w = r.cumsum(0), energy.cumsum(0)
    returns = through_r[starts + cut[sample] - 1] - through_r + r
    weight = through_w - through_w[starts] + energy[starts]
    place = torch.stack([ids[sample], torch.arange(len(r), device=r.device) - starts])
    _, at = place.unique(dim=1, return_inverse=True)
    N = int(at.max()) + 1
    sums = r.new_zeros(3, N).index_add(1, at, torch.stack([returns * weight, weight, torch.ones_like(r)]))
    low = r.new_full((N,), torch.inf).scatter_reduce(0, at, returns, "amin")
    high = r.new_full((N,), -torch.inf).scatter_reduce(0, at, returns, "amax")
    baseline = (sums[0] / (sums[1] + WHITE))[at]
    several, equal = (sums[2] > 1)[at], (low == high)[at]
    return torch.where(several, torch.where(equal, 0, returns - baseline), returns).to(given["rewards"].dtype)


def whitened(advantages: torch.Tensor, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Scale advantages to mean 0 and deviation 1 over the tokens of their samples.

    It is how REINFORCE++ (arXiv 2501.03262) normalises a whole batch. All samples of one call are coupled.

    Args:
        advantages: float[B], each of all tokens of its sample.
        lengths: int[B], tokens of each sample.

    Returns:
        torch.Tensor: float32[B] (float64 where that came in), detached; as they are where there is one token.

    Raises:
        LossError: lengths that disagree.

    >>> whitened(torch.tensor([1.0, 0.0]), [1, 3])
    tensor([ 1.5000, -0.5000])
    """
    a = _check.samples(advantages=advantages)["advantages"].detach()
    weight = _lengths(lengths, a).double()
    wide, tokens = a.double(), weight.sum()
    if tokens < 2:
        return a
    wide = wide - (weight * wide).sum() / tokens
    deviation = ((weight * wide.square()).sum() / (tokens - 1)).sqrt()
    return (wide / (deviation + WHITE)).to(a.dtype)


def _above_second(r: torch.Tensor, ids: torch.Tensor, G: int, count_G: torch.Tensor) -> torch.Tensor:
    """Return what each group's best reward has above the second best; 0 for other samples."""
    known = torch.where(r.isnan(), -torch.inf, r)
    best_G = r.new_full((G,), -torch.inf).scatter_reduce(0, ids, known, "amax")
    places = torch.arange(len(r), device=r.device)
    first_G = places.new_full((G,), len(r)).scatter_reduce(0, ids, torch.where(known == best_G[ids], places, len(r)), "amin")
    others = torch.where(places == first_G[ids], -torch.inf, known)
    second_G = r.new_full((G,), -torch.inf).scatter_reduce(0, ids, others, "amax")
    above_G = torch.where(count_G > 1, best_G - second_G, 0)
    return torch.where((places == first_G[ids]) & (count_G > 1)[ids], above_G[ids], 0)


def _lengths(lengths: torch.Tensor | Sequence[int] | None, values: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each sample, in the dtype of its value."""
    found = None if lengths is None else _check.integers("lengths", lengths).to(values.device)
    if found is None or found.shape != values.shape or (len(found) and int(found.min()) < 0):
        raise LossError(f"lengths: the tokens of each of {len(values)} samples are wanted, not {_check.described(lengths)}")
    return found.to(values.dtype)


def _unit(size: torch.Tensor) -> torch.Tensor:
    """Return a power of two, divided by which numbers of this size have squares in float32.
    It is 1, which changes no bit, up to 2^48.
    """
    return torch.ldexp(torch.ones_like(size), (torch.frexp(size).exponent - 48).clamp(min=0))
