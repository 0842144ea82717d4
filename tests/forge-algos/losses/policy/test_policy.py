"""Policy gradients, values, advantages and KL: the papers' formulas, for every cut.
Finite at any log-probability.
"""

import math
import statistics

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import (
    POLICY_KINDS,
    clip_cov_tokens,
    completion_logps,
    decoupled_advantages,
    gae,
    group_advantages,
    kl,
    kl_cov_tokens,
    policy_gradient,
    value,
    whitened,
)

KINDS = sorted(POLICY_KINDS)
TOKEN_MEANS = ("cispo", "clip_cov", "dapo", "dppo_kl", "dppo_tv", "dro", "gpg", "kl_cov", "ppo", "vespo")
UNBOUNDED = ("dro", "gpg", "kl_cov", "online_dpo", "online_ipo", "sapo", "vespo")
WITHOUT_KL = ("online_dpo", "online_ipo", "rloo")


def rollout(B, seed=0, shift=0.5):
    """Return new, old and reference log-probabilities[T], advantages[B] and lengths.
    Float64, samples of 1 to 5 tokens.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (B,), generator=g).tolist()
    T = sum(lengths)
    old, ref = (-3 * torch.rand(2, T, generator=g, dtype=torch.float64)).unbind()
    new = (old + shift * torch.randn(T, generator=g, dtype=torch.float64)).clamp(max=-1e-3).requires_grad_()
    return new, old, ref, torch.randn(B, generator=g, dtype=torch.float64), lengths


def settings_for(kind, chosen=None):
    own = {"chosen": chosen} if POLICY_KINDS[kind].chooses else {}
    return (
        {"kind": kind} | own | ({"max_length": 7} if kind == "dr_grpo" else {}) | ({"dro_beta": 0.3} if kind == "dro" else {})
    )


def some_of(T):
    """Return bool[T]: tokens as if they were chosen by their covariance."""
    return torch.arange(T) % 3 == 0


def naive(kind, new, old, ref, advantages, lengths, low, high, kl_weight, *, estimator="k3", most=None, ratio="token"):
    """Return the loss sample by sample, token by token, as the papers print it."""
    terms, start = [], 0
    for advantage, length in zip(advantages, lengths, strict=True):
        tokens = range(start, start + length)
        start += length

        def clipped(rho, A):
            bound = min(max(rho.item(), 1 - low), 1 + high)
            if most is not None and A.item() < 0 and rho.item() > most:
                return most * A + 0 * rho
            return rho * A if rho.item() * A.item() <= bound * A.item() else bound * A + 0 * rho

        def penalty(t):
            if not kl_weight:
                return 0
            q = torch.exp(ref[t] - new[t])
            k3 = q - torch.log(q) - 1
            return kl_weight * (k3 if estimator == "k3" else torch.exp(new[t] - old[t]) * k3)

        if kind in ("online_dpo", "online_ipo"):
            terms.append(-advantage * sum(new[t] for t in tokens))
            continue
        if kind == "rloo":
            rho = torch.exp(sum(new[t] for t in tokens) - sum(old[t] for t in tokens))
            terms.append(-clipped(rho, advantage))
            continue
        if kind == "gmpo":
            held = [min(new[t] - old[t], high) if advantage > 0 else max(new[t] - old[t], -low) for t in tokens]
            # 0 * new: a gradient of zero where the bounds hold all of them.
            rho = torch.exp(sum((torch.as_tensor(each) for each in held), 0 * new.sum()) / length)
            terms.append(-rho * advantage + sum(penalty(t) for t in tokens) / length)
            continue
        if kind in ("gspo", "luspo"):
            rho = torch.exp(sum(new[t] - old[t] for t in tokens) / length)
            term = -clipped(rho, advantage) + sum(penalty(t) for t in tokens) / length
            terms.append(term if kind == "gspo" else length * term)
            continue
        losses = []
        for t in tokens:
            if kind == "vespo":
                w = torch.exp(sum(new[t] - old[t] for t in tokens)).item()
                k, rate = (2, 3) if advantage >= 0 else (3, 2)
                losses.append(-(w**k * math.exp(rate * (1 - w))) * advantage * new[t] + penalty(t))
                continue
            of = [t] if ratio == "token" else tokens
            rho = torch.exp(sum(new[t] - old[t] for t in of) / (1 if ratio == "sequence_sum" else len(of)))
            weight = min(max(rho.item(), 1 - low), 1 + high)
            tau = 1.0 if advantage > 0 else 1.05
            gate = 4 / tau / (1 + torch.exp(-tau * (rho - 1)))
            p, q = math.exp(new[t].item()), math.exp(old[t].item())
            far = p - q
            if kind == "dppo_kl":
                far = math.copysign(q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8)), p - q)
            inside = far <= high if advantage > 0 else far >= -low
            bounded = rho.item() if most is None else min(rho.item(), most)
            loss = {
                "cispo": -weight * advantage * new[t],
                "sapo": -gate * advantage,
                "gpg": -advantage * new[t],
                "clip_cov": 0 * new[t] if t % 3 == 0 else -clipped(rho, advantage),
                "kl_cov": -rho * advantage + abs(new[t] - old[t]) * (t % 3 == 0),
                "dro": -advantage * new[t] + 0.15 * (new[t] - old[t]) ** 2,
                **dict.fromkeys(("dppo_tv", "dppo_kl"), -bounded * advantage * new[t] * inside),
            }.get(kind, -clipped(rho, advantage))
            losses.append(loss + penalty(t))
        if kind in TOKEN_MEANS:
            terms += losses
        else:
            terms.append(sum(losses) / (7 if kind == "dr_grpo" else length))
    return torch.stack(terms)


@pytest.mark.parametrize("kind", KINDS)
@given(
    B=st.integers(1, 4),
    seed=st.integers(0, 99),
    high=st.sampled_from([0.2, 0.28]),
    kl_weight=st.sampled_from([0.0, 0.04]),
    estimator=st.sampled_from(["k3", "unbiased"]),
    most=st.sampled_from([None, 1.5]),
)
def test_is_the_papers_formula(kind, B, seed, high, kl_weight, estimator, most):
    """Every term and gradient of each kind is the formula's, on both sides of the clip."""
    new, old, ref, advantages, lengths = rollout(B, seed)
    kl_weight = 0.0 if kind in WITHOUT_KL else kl_weight
    most = None if kind in ("cispo", "clip_cov", "gmpo", *UNBOUNDED) else most
    bounds = {} if kind in UNBOUNDED else {"clip": 0.2, "clip_high": high, "dual_clip": most}
    extra = {"ref_logps": ref, "kl_weight": kl_weight, "kl_estimator": estimator} if kl_weight else {}
    terms = policy_gradient(new, old, advantages, lengths, **bounds, **extra, **settings_for(kind, some_of(len(new))))
    expected = naive(kind, new, old, ref, advantages, lengths, 0.2, high, kl_weight, estimator=estimator, most=most)
    assert terms.count == (sum(lengths) if kind in TOKEN_MEANS else B)
    torch.testing.assert_close(terms.per_sample, expected)
    torch.testing.assert_close(torch.autograd.grad(terms.sum, new), torch.autograd.grad(expected.sum(), new))


@pytest.mark.parametrize("ratio", ["sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.04])
def test_another_ratio_in_the_place_of_the_kinds(kind, ratio, kl_weight):
    """Each token has its sample's ratio, and terms are the kind's.
    Advantages by token give the same, where tokens have losses.
    """
    new, old, ref, advantages, lengths = rollout(5, 1)
    bounds = {} if kind == "sapo" else {"clip": 0.2, "clip_high": 0.3}
    extra = {"ref_logps": ref, "kl_weight": kl_weight} if kl_weight else {}
    found = policy_gradient(new, old, advantages, lengths, ratio=ratio, **bounds, **extra, **settings_for(kind))
    expected = naive(kind, new, old, ref, advantages, lengths, 0.2, 0.3, kl_weight, ratio=ratio)
    torch.testing.assert_close(found.per_sample, expected)
    assert found.count == len(expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum, new), torch.autograd.grad(expected.sum(), new))
    if kind in ("dr_grpo", "dapo", "cispo"):
        spread = advantages.repeat_interleave(torch.tensor(lengths))
        other = policy_gradient(new, old, spread, lengths, ratio=ratio, **bounds, **extra, **settings_for(kind))
        torch.testing.assert_close(other.per_sample, found.per_sample)


def test_each_kind_has_a_clip_of_its_own():
    """Where no clip is set it is 0.2, GSPO's 0.0003 and 0.0004, and for CISPO 4 above and no bound below."""
    new, old, _, advantages, lengths = rollout(6, shift=2.0)
    for kind, bounds in (("grpo", (0.2, 0.2)), ("gspo", (3e-4, 4e-4)), ("rloo", (0.2, 0.2)), ("cispo", (1 - 1e-12, 4.0))):
        found = policy_gradient(new, old, advantages, lengths, **settings_for(kind))
        torch.testing.assert_close(found.per_sample, naive(kind, new, old, None, advantages, lengths, *bounds, 0.0))
    one = policy_gradient(new, old, advantages, lengths, clip=0.1).per_sample
    torch.testing.assert_close(one, naive("dapo", new, old, None, advantages, lengths, 0.1, 0.1, 0.0))


def test_the_temperatures_of_a_gate_are_as_wide_as_the_row():
    """To the last digit of float64, in which 1.05 is not float32's 1.05."""
    one, minus = torch.ones(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)
    found = policy_gradient(minus, 2 * minus, minus, [1], kind="sapo", temperatures=(1.0, 1.05))
    wanted = 4 / 1.05 * torch.sigmoid(1.05 * (one.exp() - 1))
    torch.testing.assert_close(found.per_sample, wanted, rtol=1e-14, atol=0)


def test_the_unbiased_estimator_has_the_gradient_of_the_kl():
    """Its expectation over the policy that sampled is the KL, gradient and all, though that policy is another one."""
    g = torch.Generator().manual_seed(3)
    p, q, r = torch.randn(3, 7, generator=g, dtype=torch.float64).unbind()
    p.requires_grad_()
    new, old, ref = (x.log_softmax(0) for x in (p, q, r))
    true = (new.exp() * (new - ref)).sum()
    (slope,) = torch.autograd.grad(true, p, retain_graph=True)
    found = {}
    for estimator in ("k3", "unbiased"):
        terms = policy_gradient(
            new, old, torch.zeros(7).double(), [1] * 7, ref_logps=ref, kl_weight=1.0, kl_estimator=estimator
        )
        mean = (old.exp() * terms.per_sample).sum()
        found[estimator] = mean, torch.autograd.grad(mean, p, retain_graph=True)[0]
    torch.testing.assert_close(found["unbiased"][0], true)
    torch.testing.assert_close(found["unbiased"][1], slope)
    assert (found["k3"][1] - slope).norm() > 0.1 * slope.norm()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if POLICY_KINDS[kind].grpo])
@pytest.mark.parametrize("of_tokens", [False, True])
def test_what_is_far_off_the_policy_is_left_out(kind, of_tokens):
    """A completion that became unlikelier than the threshold, and whose advantage is negative, has its KL alone."""
    new, old, ref, advantages, lengths = rollout(12, seed=4)
    given = (
        advantages.repeat_interleave(torch.tensor(lengths)) if of_tokens and POLICY_KINDS[kind].ratio == "token" else advantages
    )
    with_kl = settings_for(kind, some_of(len(new))) | ({} if kind in WITHOUT_KL else {"ref_logps": ref, "kl_weight": 0.1})
    found = policy_gradient(new, old, given, lengths, off_policy_threshold=0.05, **with_kl)
    fallen = [(a - b).mean().item() > 0.05 for a, b in zip(old.split(lengths), new.split(lengths), strict=True)]
    left = torch.tensor(fallen) & (advantages < 0)
    assert 0 < left.sum() < (torch.tensor(fallen) | (advantages < 0)).sum()
    expected = policy_gradient(new, old, torch.where(left, 0, advantages), lengths, **with_kl)
    torch.testing.assert_close(found.per_sample, expected.per_sample)
    assert found.count == expected.count
    torch.testing.assert_close(torch.autograd.grad(found.sum, new), torch.autograd.grad(expected.sum, new))


@pytest.mark.parametrize("kind", KINDS)
@given(B=st.integers(2, 6), at=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_cut_gives_the_same(kind, B, at, seed):
    """Two parts add up to the whole, in value, gradients and stats."""
    new, old, ref, advantages, lengths = rollout(B, seed)
    at = min(at, B - 1)
    extra = {} if kind in WITHOUT_KL else {"kl_weight": 0.1}
    edge, chosen = sum(lengths[:at]), some_of(len(new))
    whole = policy_gradient(
        new, old, advantages, lengths, **settings_for(kind, chosen), **extra, **({"ref_logps": ref} if extra else {})
    )
    parts = [
        policy_gradient(
            new[tokens], old[tokens], advantages[mine], lengths[mine], **settings_for(kind, chosen[tokens]), **extra,
            **({"ref_logps": ref[tokens]} if extra else {}),
        )
        for mine, tokens in ((slice(at), slice(edge)), (slice(at, B), slice(edge, None)))
    ]  # fmt: skip
    assert sum(part.count for part in parts) == whole.count
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    for name, total in whole.stats.items():
        torch.testing.assert_close(sum(part.stats[name] for part in parts), total)
    ours = torch.autograd.grad(sum(part.sum for part in parts), new)
    torch.testing.assert_close(ours, torch.autograd.grad(whole.sum, new))


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_is_the_policy_gradient(kind):
    """At ρ = 1 nothing is clipped, and the gradient is -A for each token, however normalised."""
    new, _, _, advantages, lengths = rollout(4)
    terms = policy_gradient(new, new.detach(), advantages, lengths, **settings_for(kind, torch.zeros(len(new)) > 0))
    assert terms.stats["clipped_low"] == terms.stats["clipped_high"] == terms.stats["approx_kl"] == 0
    (grad,) = torch.autograd.grad(terms.sum, new)
    sizes = torch.tensor(lengths)
    divisors = {"grpo": sizes, "gspo": sizes, "gmpo": sizes, "sapo": sizes, "dr_grpo": torch.full_like(sizes, 7)}.get(
        kind, torch.ones_like(sizes)
    )
    torch.testing.assert_close(grad, -(advantages / divisors).repeat_interleave(sizes))


@pytest.mark.parametrize("kind", sorted(name for name, row in POLICY_KINDS.items() if row.first_as))
def test_on_policy_another_kind_has_the_same_gradients(kind):
    """What `first_as` names: alike while every ratio is 1, and not where one is not."""
    new, old, _, advantages, lengths = rollout(4)

    def gradient(kind, old):
        terms = policy_gradient(new, old, advantages, lengths, **settings_for(kind, some_of(len(new))))
        return torch.autograd.grad(terms.sum / terms.count, new)[0]

    plain = POLICY_KINDS[kind].first_as
    torch.testing.assert_close(gradient(kind, new.detach()), gradient(plain, new.detach()))
    assert not torch.allclose(gradient(kind, old), gradient(plain, old))


def test_advantages_of_tokens():
    """Advantages may be given by token, as from gae; one a sample is the same repeated."""
    new, old, _, advantages, lengths = rollout(4)
    spread = advantages.repeat_interleave(torch.tensor(lengths))
    one, other = (policy_gradient(new, old, a, lengths, kind="ppo").per_sample for a in (advantages, spread))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
@given(
    values=st.lists(st.sampled_from([0.0, -1e-7, -30.0, -200.0, -1e5]), min_size=3, max_size=3), A=st.sampled_from([-2.0, 2.0])
)
def test_extremes_are_finite(kind, values, A):
    """Loss and gradients are finite in float32, however far apart new, old and reference are."""
    new, old, ref = (torch.tensor([v, -5.0]) for v in values)
    new.requires_grad_()
    extra = {} if kind in WITHOUT_KL else {"ref_logps": ref, "kl_weight": 0.1}
    terms = policy_gradient(new, old, torch.tensor([A]), [2], **settings_for(kind, some_of(2)), **extra)
    terms.sum.backward()
    assert terms.per_sample.isfinite().all()
    assert new.grad.isfinite().all()


@given(T=st.integers(1, 9), seed=st.integers(0, 99), clip=st.sampled_from([None, 0.2, 1.0]))
def test_value_is_the_clipped_squared_error(T, seed, clip):
    """The value loss is ½·max of two squared errors; where the clip binds it has no gradient."""
    g = torch.Generator().manual_seed(seed)
    new, old, target = torch.randn(3, T, generator=g, dtype=torch.float64).unbind()
    new.requires_grad_()
    terms = value(new, old, target, clip=clip)
    expected, grads = [], []
    for v, o, r in zip(new.tolist(), old.tolist(), target.tolist(), strict=True):
        held = v if clip is None else min(max(v, o - clip), o + clip)
        expected.append(max((v - r) ** 2, (held - r) ** 2) / 2)
        grads.append(0.0 if (held - r) ** 2 > (v - r) ** 2 else v - r)
    torch.testing.assert_close(terms.per_sample, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(torch.autograd.grad(terms.sum, new)[0], torch.tensor(grads, dtype=torch.float64))
    assert terms.count == T
    assert terms.stats["clipped"] == grads.count(0.0)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    ended=st.booleans(),
)
def test_gae_is_the_sum_of_the_paper(lengths, gamma, lam, ended):
    """A_t = Σ (γλ)^l δ_{t+l} within each sample, independent of its neighbours in the row.
    The bootstrap is not changed.
    """
    g = torch.Generator().manual_seed(sum(lengths))
    r, v = torch.randn(2, sum(lengths), generator=g, dtype=torch.float64).unbind()
    last = torch.zeros(len(lengths)).double() if ended else torch.randn(len(lengths), generator=g, dtype=torch.float64)
    kept = last.clone()
    found = gae(r, v, lengths, gamma=gamma, lam=lam, bootstrap=None if ended else last)
    expected, start = [], 0
    for n, length in enumerate(lengths):
        own = slice(start, start + length)
        start += length
        after = [*v[own].tolist()[1:], last[n].item()][:length]
        deltas = [a + gamma * b - c for a, b, c in zip(r[own].tolist(), after, v[own].tolist(), strict=True)]
        expected += [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(length)]
    torch.testing.assert_close(found.advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(found.returns, found.advantages + v)
    assert torch.equal(last, kept)


@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99), data=st.data())
def test_group_advantages_are_those_of_each_group(groups, seed, data):
    """Means, deviations and leave-one-out baselines are each group's, in any order.
    NaN counts nowhere.
    """
    baseline, scale = data.draw(st.sampled_from(["mean", "leave_one_out"])), data.draw(st.sampled_from(["group", "none"]))
    missing = data.draw(st.sets(st.integers(0, len(groups) - 1), max_size=2))
    rewards = torch.randint(0, 4, (len(groups),), generator=torch.Generator().manual_seed(seed)).double()
    rewards[sorted(missing)] = math.nan
    found = group_advantages(rewards, groups, baseline=baseline, scale=scale)
    for n, own in enumerate(groups):
        others = [rewards[m].item() for m in range(len(groups)) if groups[m] == own and m != n and m not in missing]
        if n in missing or not others:
            assert found[n] == 0
            continue
        everyone = [*others, rewards[n].item()]
        expected = rewards[n].item() - statistics.mean(others if baseline == "leave_one_out" else everyone)
        expected /= statistics.stdev(everyone) + 1e-4 if scale == "group" else 1
        assert found[n].item() == pytest.approx(expected, abs=1e-9)


@given(groups=st.lists(st.integers(0, 2), min_size=2, max_size=9), seed=st.integers(0, 99))
def test_decoupled_advantages_are_their_formula(groups, seed):
    """Each reward within its group, the weighted sum over all that are scored; NaN adds nothing."""
    g, weights = torch.Generator().manual_seed(seed), [1.0, -0.5]
    rewards = torch.randint(0, 4, (2, len(groups)), generator=g).double()
    rewards[torch.rand(rewards.shape, generator=g) < 0.2] = math.nan
    sums = {}
    for n, own in enumerate(groups):
        for weight, row in zip(weights, rewards.tolist(), strict=True):
            mine = [r for r, group in zip(row, groups, strict=True) if group == own and r == r]
            if row[n] == row[n]:
                deviation = statistics.stdev(mine) if len(mine) > 1 else 0.0
                sums[n] = sums.get(n, 0.0) + weight * (row[n] - statistics.mean(mine)) / (deviation + 1e-4)
    found = decoupled_advantages(rewards, groups, weights=weights)
    several = len(sums) > 1
    mean, deviation = (statistics.mean(sums.values()), statistics.stdev(sums.values())) if several else (0.0, 1 - 1e-4)
    expected = [(sums[n] - mean) / (deviation + 1e-4) if n in sums else 0.0 for n in range(len(groups))]
    assert found.tolist() == pytest.approx(expected, abs=1e-8)


def test_a_batch_wide_scale():
    """scale="batch" divides by the deviation of all scored rewards."""
    rewards = torch.tensor([1.0, 0.0, 3.0, math.nan])
    found = group_advantages(rewards, [0, 0, 1, 1], scale="batch")
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.0, 0.0]) / (statistics.stdev([1, 0, 3]) + 1e-4))


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("size", [1e20, 1e37])
def test_squares_of_large_rewards_do_not_overflow(size, scale):
    """A punishment of -1e20 has the advantages that float64 gives it, and only in its group."""
    rewards = torch.tensor([0.5, 1.0, -size, 0.0, 1.0, 0.5])
    groups = [0, 0, 0, 1, 1, 1]
    found, wide = (group_advantages(each, groups, scale=scale) for each in (rewards, rewards.double()))
    torch.testing.assert_close(found.double(), wide, rtol=1e-6, atol=1e-12)
    assert found[2] < -1
    if scale == "group":
        assert torch.equal(found[3:], group_advantages(rewards[3:], [0, 0, 0]))


@given(st.floats(-10, 10, width=32), st.integers(2, 7))
def test_equal_rewards_have_advantages_of_zero(reward, size):
    """Equal rewards have advantages of exactly 0.
    The rounding of a mean divided by 1e-4 would be an advantage.
    """
    for baseline in ("mean", "leave_one_out"):
        assert not group_advantages(torch.full((size,), reward), [0] * size, baseline=baseline).any()


def test_kl_estimators_are_their_formulas():
    """k1 to k3 are their formulas, token by token.
    k1 and k3 average to the true KL, and k2's gradient is the true one (an exact expectation).
    """
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = p.log_softmax(0)
    true = (logp.exp() * (logp - q)).sum()
    (slope,) = torch.autograd.grad(true, p, retain_graph=True)
    terms = {name: kl(logp, q, estimator=name) for name in ("k1", "k2", "k3")}
    ratio = (q - logp).exp()
    torch.testing.assert_close(terms["k1"].per_sample, logp - q)
    torch.testing.assert_close(terms["k2"].per_sample, (logp - q) ** 2 / 2)
    torch.testing.assert_close(terms["k3"].per_sample, ratio - 1 - ratio.log())
    assert all(found.count == 3 for found in terms.values())
    weights = logp.exp().detach()
    for name in ("k1", "k3"):
        torch.testing.assert_close((weights * terms[name].per_sample).sum(), true)
    (ours,) = torch.autograd.grad((weights * terms["k2"].per_sample).sum(), p, retain_graph=True)
    torch.testing.assert_close(ours, slope)
    (none,) = torch.autograd.grad((weights * terms["k1"].per_sample).sum(), p)
    torch.testing.assert_close(none, torch.zeros_like(none))


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_completion_logps_are_sums(lengths):
    """Log-probabilities are summed by completion, with gradients of 1."""
    tokens = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).requires_grad_()
    pieces = tokens.split(lengths)
    found = completion_logps(tokens, torch.tensor(lengths))
    torch.testing.assert_close(found, torch.stack([piece.sum() for piece in pieces]))
    found.sum().backward()
    torch.testing.assert_close(tokens.grad, torch.ones_like(tokens))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: policy_gradient(x, y[0], y[1], [1, 1, 1], ref_logps=y[2], kl_weight=0.1),
        lambda x, y: value(x, y[0], y[1]),
        lambda x, y: kl(x, y[0]),
    ],
)
def test_gradients_reach_the_policy_alone(call):
    """Only the policy's log-probabilities get gradients; stats hold no graph.
    Old and reference log-probabilities, advantages, old values and returns are constants.
    """
    leaf = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    constants = [torch.tensor([-1.5, -1.0, -3.5], requires_grad=True) for _ in range(3)]
    terms = call(leaf, constants)
    assert torch.autograd.grad(terms.sum, constants, allow_unused=True, retain_graph=True) == (None,) * 3
    assert torch.autograd.grad(terms.sum, leaf)[0].any()
    assert not any(total.requires_grad for total in terms.stats.values())
    assert not any(x.requires_grad for x in gae(leaf, constants[0], [3], bootstrap=constants[1][:1]))
    assert not group_advantages(leaf, [0, 0, 0]).requires_grad


T3, B2 = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="grop"), "kind: there is no 'grop'. Did you mean 'grpo'"),
        (
            lambda: policy_gradient(T3, T3, B2, [1, 2], kind="vespo", clip=0.1),
            "clip=0.1: 'vespo' clips nothing; .* gamma_weights",
        ),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], gamma_weights=((1, 1), (1, 1))), "gamma_weights: 'vespo' has them"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="vespo", gamma_weights=(1, 2)), "gamma_weights: two pairs"),
        (
            lambda: policy_gradient(T3, T3, B2, [1, 2], kind="vespo", gamma_weights=((1, 0), (1, 1))),
            "gamma_weights: a finite number above 0",
        ),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], ratio="word"), "ratio: there is no 'word'"),
        (lambda: policy_gradient(T3, T3, B2, [1, 1]), "2 lengths from 1 that add up to 2, but logps has 3 tokens"),
        (lambda: policy_gradient(T3, T3, B2, [4, -1]), "from -1"),
        (lambda: policy_gradient(T3, T3[:2], B2, [1, 2]), "logps 3, old_logps 2"),
        (
            lambda: policy_gradient(T3, None, B2, [1, 2]),
            "old_logps: a tensor of floats with one dimension",
        ),
        (lambda: policy_gradient(T3, T3, None, [1, 2]), "advantages: a tensor of floats"),
        (lambda: policy_gradient(T3, T3, T3[:1], [1, 2]), r"advantages: 2 \(one a sample\) or 3 \(one a token\)"),
        (lambda: policy_gradient(T3, T3, T3, [1, 2], kind="rloo"), r"advantages: 2 \(one a sample\) are wanted for 'rloo'"),
        (lambda: policy_gradient(T3, T3, T3, [0, 1, 2]), "leave it out"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="dr_grpo"), "max_length=None: 'dr_grpo' divides by it"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], max_length=9), "no other kind reads it"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], clip=0), "clip: a finite number above 0 and below 1"),
        *(
            (lambda each=each: policy_gradient(T3, T3, B2, [1, 2], kind="sapo", temperatures=each), "temperatures: two numbers")
            for each in (1.0, (1.0,), "ab c")
        ),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], dual_clip=1.1), "dual_clip: a finite number above 1.2"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="cispo", dual_clip=9.0), "'cispo' bounds its ratios by clip_high"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="gmpo", dual_clip=9.0), "'gmpo' bounds its ratios by clip_high"),
        (
            lambda: policy_gradient(T3, T3, B2, [1, 2], kind="gmpo", ratio="token"),
            "ratio='token': 'gmpo' has a ratio of its own",
        ),
        (lambda: group_advantages(B2, [0, 0], baseline="length"), "lengths: the tokens of each of 2 samples are wanted"),
        (lambda: group_advantages(B2, [0, 0], baseline="length", lengths=[1]), "of each of 2 samples are wanted, not list"),
        (lambda: whitened(B2, [1, -1]), "lengths: the tokens of each of 2 samples are wanted"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="sapo", clip=0.1), "clip=0.1: 'sapo' clips nothing"),
        (
            lambda: policy_gradient(T3, T3, B2, [1, 2], temperatures=(1.0, 2.0)),
            "temperatures: 'sapo' has them, and no other kind",
        ),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="sapo", temperatures=(0.0, 2.0)), "temperatures"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kl_estimator="unbiased"), "no effect without a kl_weight above 0"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="kl_cov"), "chosen: 'clip_cov' and 'kl_cov' need it"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], chosen=T3 > 0), "no other does; kind is 'dapo'"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="kl_cov", chosen=T3), r"chosen: bool\[3\] is wanted"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kl_cov_coef=1.0), "'kl_cov' reads it, and no other kind"),
        (lambda: clip_cov_tokens(T3, T3, T3, T3, least=2.0, most=2.0), "least=2.0 is not below most=2.0"),
        (lambda: kl_cov_tokens(T3, T3, T3, share=0), "share: a finite number above 0"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kl_estimator="k1"), "kl_estimator: there is no 'k1'"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kl_weight=0.1), "ref_logps and kl_weight: both or none"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], ref_logps=T3), "both or none"),
        (lambda: policy_gradient(T3, T3, B2, [1, 2], kind="rloo", ref_logps=T3, kl_weight=0.1), "penalty in the reward"),
        (lambda: value(T3, T3, T3, clip=0), "clip: a finite number above 0"),
        (lambda: value(T3, T3, B2), "returns 2"),
        (lambda: gae(T3, T3, [3], gamma=1.1), "gamma: a number from 0 to 1"),
        (lambda: gae(T3, T3, [3], lam=-0.1), "lam"),
        (lambda: gae(T3, T3, [3], bootstrap=B2), "lengths 1, bootstrap 2"),
        (lambda: gae(T3, B2, [3]), "rewards 3, values 2"),
        (lambda: policy_gradient(T3, T3, B2, None), "lengths: integers in one dimension are wanted, not NoneType None"),
        (lambda: decoupled_advantages(B2, [0, 0]), "rewards: one row for each reward is wanted"),
        (lambda: decoupled_advantages(B2[None], [0, 0], weights=[1.0, 2.0]), "weights: 1 numbers are wanted"),
        (lambda: group_advantages(B2, None), "groups: integers in one dimension"),
        (lambda: group_advantages(B2, [0]), "groups: one integer for each of 2 rewards"),
        (lambda: group_advantages(B2, [0, -1]), "sample 1: reward -1.0 in group -1"),
        (lambda: group_advantages(torch.tensor([0.0, math.inf]), [0, 0]), "sample 1: reward inf"),
        (lambda: group_advantages(B2, [0, 0], scale="std"), "scale: there is no 'std'"),
        (lambda: group_advantages(B2, [0, 0], baseline="loo"), "baseline: there is no 'loo'"),
        (lambda: kl(T3, T3, estimator="k4"), "estimator: there is no 'k4'. Known: k1, k2, k3"),
        (lambda: kl(T3, B2), "logps 3, ref_logps 2"),
        (lambda: completion_logps(T3, [1, 3]), "2 lengths from 1 that add up to 4, but token_logps has 3 tokens"),
    ],
)
def test_bad_input_is_refused(call, message):
    """One error names the argument, what was found and what is valid."""
    with pytest.raises(LossError, match=message):
        call()


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("gap", [3.0, -3.0, 1e4, -1e4])
@pytest.mark.parametrize("pair", [(2.0, 3.0), (1000.0, 1.0), (0.0, 500.0)])
def test_weights_of_vespo_are_finite(pair, gap, advantage):
    """Also where k and λ give a weight beyond the dtype, which would make a loss of no advantage NaN."""
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    terms = policy_gradient(new, new.detach() - gap, torch.tensor([advantage]), [3], kind="vespo", gamma_weights=(pair, pair))
    terms.sum.backward()
    assert terms.sum.isfinite()
    assert new.grad.isfinite().all()
