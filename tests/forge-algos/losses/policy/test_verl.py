"""Losses and advantages of verl: its functions, written down as they are there, on random arrays.

They are those of verl/trainer/ppo/core_algos.py and verl/utils/torch_functional.py (verl-project/verl, Apache-2.0, commit
1dda039b of 2026-08-22), without their figures, configuration and distribution.
"""

from collections import defaultdict

import pytest
import torch
from hypothesis import assume, given, strategies as st

from forge_algos.losses import (
    clip_cov_tokens,
    covariances,
    gae,
    group_advantages,
    kl_cov_tokens,
    optimal_token_advantages,
    policy_gradient,
    whitened,
)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def masked_whiten(values, mask):
    mean = (values * mask).sum() / mask.sum()
    variance = ((values - mean) ** 2 * mask).sum() / mask.sum()
    variance = variance * (mask.sum() / (mask.sum() - 1))  # Bessel's correction, as there
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def agg_loss(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor=None):
    if loss_agg_mode == "token-mean":
        return (loss_mat * loss_mask).sum() / loss_mask.sum()
    seq_mask = (loss_mask.sum(-1) > 0).to(loss_mat.dtype)
    if loss_agg_mode == "seq-mean-token-mean":
        seq_losses = (loss_mat * loss_mask).sum(-1) / (loss_mask.sum(-1) + 1e-8)
        return (seq_losses * seq_mask).sum() / seq_mask.sum()
    loss = ((loss_mat * loss_mask).sum(-1) * seq_mask).sum() / seq_mask.sum()
    return loss / (loss_scale_factor or loss_mask.shape[-1]) if loss_agg_mode == "seq-mean-token-sum-norm" else loss


def vanilla(old_log_prob, log_prob, advantages, response_mask, mode, low, high, clip_ratio_c):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    pg_losses1 = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    pg_losses3 = -advantages * clip_ratio_c
    clip_pg_losses2 = torch.min(pg_losses3, clip_pg_losses1)
    pg_losses = torch.where(advantages < 0, clip_pg_losses2, clip_pg_losses1)
    return agg_loss(pg_losses, response_mask, mode)


def geo_mean(old_log_prob, log_prob, advantages, response_mask, low, high):
    negative_approx_kl = log_prob - old_log_prob
    sgn_advantage = torch.sign(advantages)
    negative_approx_kl_clamp = torch.clamp(negative_approx_kl, -low, high)
    negative_approx_kl_min = torch.min(sgn_advantage * negative_approx_kl, sgn_advantage * negative_approx_kl_clamp)
    negative_approx_kl_min = sgn_advantage * negative_approx_kl_min
    response_mask_sum = response_mask.sum(dim=-1)
    ratio = torch.exp((negative_approx_kl_min * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8))
    advantage = (advantages * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8)
    return torch.mean(-advantage * ratio)


def gspo(old_log_prob, log_prob, advantages, response_mask, low, high):
    negative_approx_kl = log_prob - old_log_prob
    seq_lengths = torch.sum(response_mask, dim=-1).clamp(min=1)
    negative_approx_kl_seq = torch.sum(negative_approx_kl * response_mask, dim=-1) / seq_lengths
    log_ratio = log_prob - log_prob.detach() + negative_approx_kl_seq.detach().unsqueeze(-1)
    ratio = torch.exp(torch.clamp(log_ratio, max=10.0))
    pg_losses = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high))
    return agg_loss(pg_losses, response_mask, "seq-mean-token-mean")


def sapo(old_log_prob, log_prob, advantages, response_mask, tau_pos, tau_neg):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    taus = torch.where(advantages > 0, tau_pos, tau_neg)
    gates = torch.sigmoid(taus * (ratio - 1.0)) * (4.0 / taus)
    return agg_loss(-gates * advantages, response_mask, "seq-mean-token-mean")


def cispo(old_log_prob, log_prob, advantages, response_mask, mode, low, high):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    return agg_loss(-torch.clamp(ratio, 1 - low, 1 + high).detach() * advantages * log_prob, response_mask, mode)


def dppo(old_log_prob, log_prob, advantages, response_mask, mode, low, high, clip_ratio_c, kind):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    truncated_ratio = torch.clamp(ratio, max=clip_ratio_c).detach()
    prob, old_prob = torch.exp(log_prob), torch.exp(old_log_prob)
    valid_positive_mask = (prob - old_prob) <= high
    valid_negative_mask = (prob - old_prob) >= -low
    if kind == "dppo_kl":
        binary_kl = old_prob * (old_log_prob - log_prob) + (1 - old_prob) * torch.log(
            (1.0 - old_prob + 1e-8) / (1.0 - prob + 1e-8)
        )
        valid_positive_mask = (binary_kl <= high) | (prob <= old_prob)
        valid_negative_mask = (binary_kl <= low) | (prob >= old_prob)
    valid_mask = torch.where(advantages > 0, valid_positive_mask, valid_negative_mask).detach()
    return agg_loss(-advantages * truncated_ratio * log_prob * valid_mask, response_mask, mode)


def dro(old_log_prob, log_prob, advantages, response_mask, mode, beta):
    log_ratio = log_prob - old_log_prob
    return agg_loss(-(log_prob * advantages - 0.5 * beta * log_ratio.square()), response_mask, mode)


def clip_cov(old_log_prob, log_prob, advantages, response_mask, mode, low, high, clip_cov_ratio, lb, ub, lots):
    """`compute_policy_loss_clip_cov`, whose permutation is that of the lots."""
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses1 = -advantages * ratio
    corr = torch.ones_like(advantages)
    pg_losses2 = -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    clip_by_origin = (pg_losses2 > pg_losses1) & (response_mask > 0)
    cov_all = (advantages - masked_mean(advantages, response_mask)) * (log_prob - masked_mean(log_prob.detach(), response_mask))
    cov_all[response_mask == 0] = -torch.inf
    cov_all[clip_by_origin] = -torch.inf
    clip_num = max(int(clip_cov_ratio * response_mask.sum().item()), 1)
    top_k_idx = (cov_all < ub) & (cov_all > lb) & (response_mask > 0)
    top_k_idx = torch.nonzero(top_k_idx)
    if len(top_k_idx) > 0:
        perm = lots[top_k_idx[:, 0], top_k_idx[:, 1]].argsort()
        top_k_idx = top_k_idx[perm[: min(clip_num, len(top_k_idx))]]
    else:
        top_k_idx = torch.empty((0, 2), dtype=torch.long)
    corr[top_k_idx[:, 0], top_k_idx[:, 1]] = 0
    return agg_loss(torch.maximum(pg_losses1, pg_losses2) * corr, response_mask, mode)


def kl_cov(old_log_prob, log_prob, advantages, response_mask, mode, kl_cov_ratio, ppo_kl_coef):
    negative_approx_kl = log_prob - old_log_prob
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses_kl = -advantages * ratio + ppo_kl_coef * negative_approx_kl.abs()
    pg_losses = pg_losses1
    all_valid = response_mask > 0
    all_valid_idx = torch.nonzero(all_valid.reshape(-1), as_tuple=True)[0]
    all_valid_adv = advantages[all_valid].detach().reshape(-1)
    all_valid_logp = log_prob[all_valid].detach().reshape(-1)
    cov_lst_all = (all_valid_adv - all_valid_adv.mean()) * (all_valid_logp - all_valid_logp.mean())
    k_percent_nums = max(1, int(len(cov_lst_all) * kl_cov_ratio))
    large_cov_idxs = all_valid_idx[torch.topk(cov_lst_all, k_percent_nums, largest=True).indices]
    at = large_cov_idxs // advantages.shape[1], large_cov_idxs % advantages.shape[1]
    pg_losses[at] = pg_losses_kl[at]
    return agg_loss(pg_losses, response_mask, mode)


def batch(seed, shift=0.7):
    """Return (padded mask, old, new, advantages of completions, lengths), and how a row of all tokens is cut from padded."""
    g = torch.Generator().manual_seed(seed)
    B = int(torch.randint(2, 7, (), generator=g))
    lengths = torch.randint(1, 8, (B,), generator=g)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).double()
    old = -3 * torch.rand(mask.shape, generator=g, dtype=torch.float64)
    new = (old + shift * torch.randn(mask.shape, generator=g, dtype=torch.float64)).clamp(max=-1e-3).requires_grad_()
    advantages = torch.randn(B, generator=g, dtype=torch.float64)
    return mask, old, new, advantages, lengths


CASES = [
    ("token-mean", {"kind": "dapo"}),
    ("token-mean", {"kind": "ppo"}),
    ("seq-mean-token-mean", {"kind": "grpo"}),
    ("seq-mean-token-sum", {"kind": "luspo", "ratio": "token"}),
    ("seq-mean-token-sum-norm", {"kind": "dr_grpo"}),
    ("geo_mean", {"kind": "gmpo"}),
    ("gspo", {"kind": "gspo"}),
    ("sapo", {"kind": "sapo"}),
    ("cispo", {"kind": "cispo"}),
]


@pytest.mark.parametrize(("theirs", "ours"), CASES)
@given(seed=st.integers(0, 999), high=st.sampled_from([0.2, 0.28]), c=st.sampled_from([1.5, 3.0]))
def test_a_loss_is_verls(theirs, ours, seed, high, c):
    """Loss and gradient of each `loss_mode` and `loss_agg_mode` that a row of POLICY_KINDS is."""
    mask, old, new, advantages, lengths = batch(seed)
    of_tokens = advantages[:, None] * mask
    bounds = {"clip": 0.2, "clip_high": high}
    if theirs == "geo_mean":
        expected = geo_mean(old, new, of_tokens, mask, 0.2, high)
    elif theirs == "gspo":
        expected = gspo(old, new, of_tokens, mask, 0.2, high)
    elif theirs == "sapo":
        bounds = {"temperatures": (1.0, 1.05)}
        expected = sapo(old, new, of_tokens, mask, *torch.tensor([1.0, 1.05], dtype=torch.float64))
    elif theirs == "cispo":
        expected = cispo(old, new, of_tokens, mask, "token-mean", 0.2, high)
    else:
        bounds["dual_clip"] = c
        expected = vanilla(old, new, of_tokens, mask, theirs, 0.2, high, c)
    here = mask > 0
    bounds |= {"max_length": mask.shape[1]} if ours["kind"] == "dr_grpo" else {}
    terms = policy_gradient(new[here], old[here], advantages, lengths, **ours, **bounds)
    found = terms.sum / terms.count
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, new), torch.autograd.grad(expected, new))


MODES = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "mean",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-sum-norm": "max_length",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl", "gpg", "dro", "cispo", "dapo"])
@given(seed=st.integers(0, 999), c=st.sampled_from([1.5, 20.0]))
def test_a_loss_is_verls_whatever_is_averaged(kind, mode, seed, c):
    """Loss and gradient of `loss_mode` with each `loss_agg_mode`, which `reduce` is."""
    mask, old, new, advantages, lengths = batch(seed)
    of_tokens = advantages[:, None] * mask
    own = {"clip": 0.1, "clip_high": 0.05, "dual_clip": c}
    if kind.startswith("dppo"):
        expected = dppo(old, new, of_tokens, mask, mode, 0.1, 0.05, c, kind)
    elif kind == "gpg":
        own, expected = {}, agg_loss(-new * of_tokens, mask, mode)
    elif kind == "dro":
        own, expected = {"dro_beta": 0.4}, dro(old, new, of_tokens, mask, mode, 0.4)
    elif kind == "cispo":
        own, expected = {"clip": 0.1, "clip_high": 0.05}, cispo(old, new, of_tokens, mask, mode, 0.1, 0.05)
    else:
        expected = vanilla(old, new, of_tokens, mask, mode, 0.1, 0.05, c)
    here = mask > 0
    own |= {"max_length": mask.shape[1]} if mode.endswith("norm") else {}
    terms = policy_gradient(new[here], old[here], advantages, lengths, kind=kind, reduce=MODES[mode], **own)
    found = terms.sum / terms.count
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, new), torch.autograd.grad(expected, new))


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 999), share=st.sampled_from([0.02, 0.3]), least=st.sampled_from([-9.0, 0.1]))
def test_tokens_of_a_large_covariance_are_verls(mode, seed, share, least):
    """Loss and gradient of `clip_cov` and `kl_cov`, by the tokens chosen among all of a step's."""
    mask, old, new, advantages, lengths = batch(seed)
    of_tokens = advantages[:, None] * mask
    lots = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    here = mask > 0
    mine = new[here].detach(), of_tokens[here], lots[here]
    clipped = clip_cov_tokens(mine[0], old[here], *mine[1:], share=share, least=least, most=2.0, clip=0.2, clip_high=0.3)
    drawn = kl_cov_tokens(*mine, share=share)
    # Of equal covariances, as of log-probabilities at the bound above, verl's `topk` takes any, and a lot another one.
    largest = covariances(*mine[:2]).sort(descending=True).values
    number = int(drawn.sum())
    assume(number == len(largest) or largest[number - 1] - largest[number] > 1e-3)
    for expected, options in (
        (
            clip_cov(old, new, of_tokens, mask, mode, 0.2, 0.3, share, least, 2.0, lots),
            {"kind": "clip_cov", "clip": 0.2, "clip_high": 0.3, "chosen": clipped},
        ),
        (
            kl_cov(old, new, of_tokens, mask, mode, share, 0.7),
            {"kind": "kl_cov", "chosen": drawn, "kl_cov_coef": 0.7},
        ),
    ):
        longest = {"max_length": mask.shape[1]} if mode.endswith("norm") else {}
        terms = policy_gradient(new[here], old[here], advantages, lengths, reduce=MODES[mode], **options, **longest)
        found = terms.sum / terms.count
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, new), torch.autograd.grad(expected, new))


def outcome(scores, index, baseline, lengths, mask, epsilon=1e-4):  # 1e-6 by default there
    """`compute_*_outcome_advantage` for grpo, rloo, opo, gpg, grpo_passk and reinforce_plus_plus(_baseline): float[B, S]."""
    scores, of_group = scores.clone(), defaultdict(list)
    for i, group in enumerate(index):
        of_group[group].append(i)
    given = scores.clone()
    for i, group in enumerate(index):
        own = given[of_group[group]]
        if baseline == "rloo" and len(own) > 1:
            n = len(own)
            scores[i] = given[i] * n / (n - 1) - own.mean() * n / (n - 1)
        elif baseline == "opo":
            weight = lengths[of_group[group]]
            scores[i] = given[i] - (weight * own).sum() / weight.sum()
        elif baseline in ("grpo", "reinforce_plus_plus_baseline"):
            scores[i] = given[i] - own.mean()
            scores[i] /= own.std() + epsilon if baseline == "grpo" else 1
        elif baseline == "gpg":
            scores[i] = len(given) / torch.count_nonzero(given).clamp(min=1) * (given[i] - own.mean())
        elif baseline == "grpo_passk":
            topk, topk_idx = torch.topk(own, 2)
            best = of_group[group][int(topk_idx[0])]
            scores[i] = (topk[0] - topk[1]) / (own.std() + epsilon) if i == best else 0
    scores = scores[:, None] * mask
    return masked_whiten(scores, mask) * mask if baseline.startswith("reinforce") else scores


def optimal_token_baseline(token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, epsilon=1e-8):
    """`compute_optimal_token_baseline_advantage`, with `handle_zero_tail` as by default."""
    returns = (token_level_rewards * response_mask).flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])
    w_per_timestep = 1 - 2 * torch.exp(old_log_probs) + sum_pi_squared
    w_cumulative = (w_per_timestep * response_mask).cumsum(dim=-1)
    prompt_groups = defaultdict(list)
    for i, group in enumerate(index):
        prompt_groups[group].append(i)
    baselines = torch.zeros_like(returns)
    for trajectory_indices in prompt_groups.values():
        N = len(trajectory_indices)
        if N == 1:
            continue
        traj_idx = torch.tensor(trajectory_indices)
        mask_group = response_mask[traj_idx]
        numerator = (returns[traj_idx] * w_cumulative[traj_idx] * mask_group).sum(dim=0)
        denominator = (w_cumulative[traj_idx] * mask_group).sum(dim=0) + epsilon
        baselines[traj_idx] = (numerator / denominator).unsqueeze(0).expand(N, -1)
        response_lengths = mask_group.sum(dim=-1)
        sorted_lengths, _ = torch.sort(response_lengths)
        max_length = int(sorted_lengths[-1].item())
        second_max_length = int(sorted_lengths[-2].item())
        max_length_idx = (response_lengths == max_length).nonzero(as_tuple=True)[0]
        if max_length_idx.numel() == 1 and max_length > second_max_length:
            baselines[trajectory_indices[int(max_length_idx[0])], second_max_length:] = 0.0
    return (returns - baselines) * response_mask


@given(seed=st.integers(0, 999), each=st.integers(1, 4))
def test_the_optimal_baseline_of_each_token_is_verls(seed, each):
    """`optimal_token_baseline`, with rewards of every token, as a KL gives them, and groups in any order."""
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(3).repeat_interleave(each)[torch.randperm(3 * each, generator=g)].tolist()
    lengths = torch.randint(1, 8, (len(index),), generator=g)
    mask = (torch.arange(8)[None] < lengths[:, None]).double()
    rewards = torch.randn(mask.shape, generator=g, dtype=torch.float64) * mask
    all_logps = torch.randn(*mask.shape, 5, generator=g, dtype=torch.float64).log_softmax(-1)
    logps, collisions = all_logps[..., 0], all_logps.exp().square().sum(-1)
    expected = optimal_token_baseline(rewards, mask, index, logps, collisions)
    here = mask > 0
    found = optimal_token_advantages(rewards[here], logps[here], collisions[here].log(), index, lengths)
    torch.testing.assert_close(found, expected[here])


def test_returns_that_are_all_equal_have_no_advantage_at_a_place():
    """To the bit, where several samples reach it; where one alone does, it has what it is rewarded, as verl has it."""
    rewards = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.1])
    logps, collisions = torch.tensor([-0.5, -1.0, -2.0, -0.1, -0.3]), torch.full((5,), -0.7)
    assert optimal_token_advantages(rewards, logps, collisions, [4, 4], [2, 3]).tolist() == [0, 0, 0, 0, rewards[1]]


ESTIMATORS = {
    "grpo": {"scale": "group"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length", "scale": "none"},
    "gpg": {"scale": "nonzero"},
    "grpo_passk": {"baseline": "second_best", "scale": "group"},
    "reinforce_plus_plus_baseline": {"scale": "none"},
    "reinforce_plus_plus": {"baseline": "none", "scale": "none"},
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 999), each=st.integers(2, 4))
def test_an_advantage_is_verls(name, seed, each):
    """Each `adv_estimator` that baseline, scale and whitening are, with an epsilon of 1e-4."""
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(3).repeat_interleave(each)[torch.randperm(3 * each, generator=g)].tolist()
    lengths = torch.randint(1, 8, (len(index),), generator=g)
    mask = (torch.arange(8)[None] < lengths[:, None]).double()
    scores = 10 * torch.rand(len(index), generator=g, dtype=torch.float64)
    scores[:: each + 1] = 0
    expected = outcome(scores, index, name, lengths.double(), mask)
    found = group_advantages(scores, index, lengths=lengths, **ESTIMATORS[name])
    found = whitened(found, lengths) if name.startswith("reinforce") else found
    torch.testing.assert_close(found[:, None] * mask, expected, rtol=1e-6, atol=1e-6)


def test_equal_rewards_have_a_length_baseline_of_their_own():
    """Rewards that are all equal teach nothing, to the bit, whatever the lengths; without a baseline they stay."""
    rewards, lengths = torch.full((3,), 0.1), [1, 3, 7]
    assert group_advantages(rewards, [0, 0, 0], baseline="length", scale="none", lengths=lengths).tolist() == [0, 0, 0]
    assert torch.equal(group_advantages(rewards, [0, 0, 0], baseline="none", scale="none"), rewards)
    missing = torch.tensor([0.1, torch.nan, 0.3])
    found = group_advantages(missing, [0, 0, 0], baseline="length", scale="none", lengths=lengths)
    torch.testing.assert_close(found, torch.tensor([-0.175, 0.0, 0.025]))


def test_of_equal_bests_none_is_above_the_second():
    """Pass@k: ties, a group of which one sample alone was scored, and one of none, teach nothing."""
    rewards = torch.tensor([2.0, 2.0, 1.0, torch.nan, 5.0, torch.nan, torch.nan, 3.0, -1.0])
    groups = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    found = group_advantages(rewards, groups, baseline="second_best", scale="none")
    assert found.tolist() == [0, 0, 0, 0, 0, 0, 0, 4, 0]


@given(seed=st.integers(0, 99))
def test_gae_is_verls(seed):
    """`compute_gae_advantage_return`, token by token, whitened over the tokens of the batch."""
    mask, _, _, _, lengths = batch(seed)
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(2, *mask.shape, generator=g, dtype=torch.float64) * mask).unbind()
    nextvalues, lastgaelam, backwards = 0, 0, []
    for t in reversed(range(mask.shape[1])):
        lastgaelam_ = rewards[:, t] + 0.99 * nextvalues - values[:, t] + 0.99 * 0.9 * lastgaelam
        nextvalues = values[:, t] * mask[:, t] + (1 - mask[:, t]) * nextvalues
        lastgaelam = lastgaelam_ * mask[:, t] + (1 - mask[:, t]) * lastgaelam
        backwards.append(lastgaelam)
    expected = torch.stack(backwards[::-1], dim=1)
    here = mask > 0
    found = gae(rewards[here], values[here], lengths, gamma=0.99, lam=0.9)
    torch.testing.assert_close(found.advantages, expected[here])
    torch.testing.assert_close(found.returns, (expected + values)[here])
    if len(found.advantages) > 2:
        whole = whitened(found.advantages, torch.ones(len(found.advantages), dtype=torch.int64))
        torch.testing.assert_close(whole, masked_whiten(expected, mask)[here], rtol=1e-6, atol=1e-6)
