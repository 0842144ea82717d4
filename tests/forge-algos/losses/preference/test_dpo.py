"""DPO's losses: the papers' formulas, the same for every cut, finite at any log-probability."""

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import dpo
from forge_algos.losses.preference._dpo_types import TERMS
from forge_algos.settings._dpo_types import DPO_TYPES, Divergence

SMOOTHED = {"aot", "aot_unpaired", "exo_pair", "robust", "cdpo"}
WITH_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "cdpo", "discopop"}
SORTING = {"aot", "aot_unpaired"}
DIVERGENCES = get_args(Divergence)


def pairs(B, seed=0, scale=10.0, dtype=torch.float64):
    """Return four log-probabilities and two lengths."""
    g = torch.Generator().manual_seed(seed)
    logps = [(-scale * torch.rand(B, generator=g, dtype=torch.float64)).to(dtype).requires_grad_(n < 2) for n in range(4)]
    return logps, {f"{side}_lengths": torch.randint(1, 30, (B,), generator=g) for side in ("chosen", "rejected")}


def settings_for(kind, smoothing=0.1):
    return {"loss_type": kind, "label_smoothing": smoothing if kind in SMOOTHED else 0.0}


ALPHA, TAU = 0.3, 0.4


def naive(kind, logps, lengths, beta, eps, divergence="reverse_kl"):
    """Return the formulas as the papers print them, a pair at a time; [B]."""
    log, (pc, pr, rc, rr) = torch.log, logps
    Lc, Lr = lengths["chosen_lengths"].tolist(), lengths["rejected_lengths"].tolist()

    def f(log_t):
        t = torch.exp(log_t)
        return {
            "reverse_kl": lambda: torch.log(t),
            "forward_kl": lambda: -1 / t,
            "js_divergence": lambda: torch.log(2 * t / (1 + t)),
            "alpha_divergence": lambda: (1 - t ** -(1 - ALPHA)) / (1 - ALPHA),
        }[divergence]()

    def sigma(z):
        return 1 / (1 + torch.exp(-z))

    def quantiles(ours, theirs):
        order, found = torch.argsort(ours), [torch.zeros(())] * len(ours)
        for n, (high, low) in enumerate(zip(sorted(ours), sorted(theirs), strict=True)):
            z = beta * (high - low)
            found[order[n]] = -(1 - eps) * log(sigma(z)) - eps * log(sigma(-z))
        return torch.stack(found)

    def term(n):
        c, r = pc[n] - rc[n], pr[n] - rr[n]
        d = f(c) - f(r)
        # 1 - σ(z) is σ(-z): the difference would lose what a gradient is made of where σ(z) is near 1.
        win, lose = sigma(beta * d), sigma(-beta * d)
        # f′ is known up to a constant, which the division by lengths makes visible; for this one TRL takes 1 - 1/t.
        constant = 1 if divergence == "forward_kl" else 0
        normed = (f(c) + constant) / Lc[n] - (f(r) + constant) / Lr[n]
        return {
            "sigmoid": lambda: -log(win),
            "cdpo": lambda: -(1 - eps) * log(win) - eps * log(lose),
            "discopop": lambda: -log(win) * (1 - sigma(beta * d / TAU)) + torch.exp(-beta * d) * sigma(beta * d / TAU),
            "hinge": lambda: torch.clamp(1 - beta * d, min=0),
            "ipo": lambda: (normed - 1 / (2 * beta)) ** 2,
            "exo_pair": lambda: win * log(win / (1 - eps)) + lose * log(lose / eps),
            "nca_pair": lambda: -log(sigma(beta * c)) - log(sigma(-beta * c)) / 2 - log(sigma(-beta * r)) / 2,
            "robust": lambda: (-(1 - eps) * log(win) + eps * log(lose)) / (1 - 2 * eps),
            "bco_pair": lambda: -log(sigma(beta * c)) - log(sigma(-beta * r)),
            "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
            "apo_zero": lambda: 1 - sigma(beta * c) + sigma(beta * r),
            "apo_down": lambda: sigma(beta * c) + 1 - sigma(beta * (c - r)),
            "sft": lambda: -pc[n] / (sum(Lc) / len(Lc)),
            "sigmoid_norm": lambda: -log(sigma(beta * normed)),
        }[kind]()

    if kind in SORTING:
        return quantiles(pc - pr, rc - rr) if kind == "aot" else quantiles(pc - rc, pr - rr)
    return torch.stack([term(n) for n in range(len(pc))])


CASES = [(kind, "reverse_kl") for kind in DPO_TYPES] + list(itertools.product(sorted(WITH_DIVERGENCE), DIVERGENCES[1:]))


def test_the_table_is_complete():
    """Each of sixteen forms has terms and a row with the settings that it reads."""
    assert len(DPO_TYPES) == 16
    assert TERMS.keys() == DPO_TYPES.keys()
    assert {name for name, kind in DPO_TYPES.items() if kind.smoothing} == SMOOTHED
    assert {name for name, kind in DPO_TYPES.items() if kind.divergence} == WITH_DIVERGENCE
    assert {name for name, kind in DPO_TYPES.items() if kind.sorts} == SORTING


@pytest.mark.parametrize(("kind", "divergence"), CASES)
@given(B=st.integers(1, 5), seed=st.integers(0, 99), beta=st.floats(0.02, 0.9), eps=st.floats(0.01, 0.45))
def test_is_the_papers_formula(kind, divergence, B, seed, beta, eps):
    """Every term and gradient is that of the formula, evaluated plainly."""
    logps, lengths = pairs(B, seed, scale=4.0)
    own = {"f_divergence_alpha": ALPHA} if divergence == "alpha_divergence" else {}
    own |= {"discopop_tau": TAU} if kind == "discopop" else {}
    terms = dpo(*logps, beta=beta, **settings_for(kind, eps), **lengths, f_divergence=divergence, **own)
    expected = naive(kind, logps, lengths, beta, eps, divergence)
    assert terms.count == B
    torch.testing.assert_close(terms.per_sample, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(terms.sum, expected.sum(), rtol=1e-8, atol=1e-8)
    used = logps[: 1 if kind == "sft" else 2]
    ours, theirs = torch.autograd.grad(terms.sum, used), torch.autograd.grad(expected.sum(), used)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", sorted(set(DPO_TYPES) - SORTING))
@given(B=st.integers(2, 9), at=st.integers(1, 8), seed=st.integers(0, 99))
def test_any_cut_gives_the_same(kind, B, at, seed):
    """Sums, gradients and stats of two parts add up to the whole's: pairs are independent."""
    logps, lengths = pairs(B, seed)
    extra = {"tokens_per_pair": lengths["chosen_lengths"].sum().item() / B} if kind == "sft" else {}
    whole = dpo(*logps, **settings_for(kind), **lengths)
    cuts = [slice(0, min(at, B - 1)), slice(min(at, B - 1), B)]
    parts = [
        dpo(*(x[cut] for x in logps), **settings_for(kind), **{k: v[cut] for k, v in lengths.items()}, **extra) for cut in cuts
    ]
    assert sum(part.count for part in parts) == whole.count
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    for name, total in whole.stats.items():
        torch.testing.assert_close(sum(part.stats[name] for part in parts), total)
    ours = torch.autograd.grad(sum(part.sum for part in parts), logps[0])
    torch.testing.assert_close(ours, torch.autograd.grad(whole.sum, logps[0]))


@pytest.mark.parametrize("kind", [*sorted(SORTING), "sft"])
def test_what_is_coupled_says_so(kind):
    """The three forms that the docstring names depend on the pairs of a call, in any order."""
    logps, lengths = pairs(8, 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    settings = settings_for(kind)
    whole = dpo(*logps, **settings, **lengths)
    parts = [
        dpo(*(x[cut] for x in logps), **settings, **{k: v[cut] for k, v in lengths.items()}) for cut in (slice(4), slice(4, 8))
    ]
    assert abs(sum(part.sum for part in parts) - whole.sum) > 1e-4
    shuffled = dpo(*(x[order] for x in logps), **settings, **{k: v[order] for k, v in lengths.items()})
    torch.testing.assert_close(shuffled.sum, whole.sum)


@pytest.mark.parametrize(("kind", "divergence"), CASES)
@given(values=st.lists(st.sampled_from([0.0, -1e-9, -1.0, -39.0, -1e3, -1e5]), min_size=4, max_size=4), data=st.data())
def test_extremes_are_finite(kind, divergence, values, data):
    """In float32, at log-probabilities from 0 to -1e5, loss and gradients are finite."""
    beta = data.draw(st.sampled_from([0.01, 0.1, 1.0]))
    logps = [torch.tensor([value, -5.0], requires_grad=n < 2) for n, value in enumerate(values)]
    lengths = {"chosen_lengths": torch.tensor([1, 3]), "rejected_lengths": torch.tensor([2, 0])}
    terms = dpo(*logps, beta=beta, **settings_for(kind, 1e-3), **lengths, f_divergence=divergence)
    terms.sum.backward()
    assert terms.per_sample.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in logps[:2])


@pytest.mark.parametrize("B", [1, 7])
def test_starts_at_ln_2(B):
    """A policy that is its reference has ln 2 a pair, accuracy 0, opposite gradients of β/2."""
    logps, _ = pairs(B, dtype=torch.float32, scale=500.0)
    terms = dpo(logps[0], logps[1], logps[0].detach(), logps[1].detach(), beta=0.3)
    terms.sum.backward()
    assert terms.sum.item() / terms.count == pytest.approx(math.log(2), abs=1e-6)
    assert terms.stats["correct"] == terms.stats["margins"] == 0
    torch.testing.assert_close(logps[0].grad, torch.full((B,), -0.15))
    torch.testing.assert_close(logps[1].grad, torch.full((B,), 0.15))


@pytest.mark.parametrize("kind", DPO_TYPES)
def test_the_reference_is_not_trained(kind):
    """No gradient reaches the reference's log-probabilities."""
    logps, lengths = pairs(3)
    refs = [x.requires_grad_() for x in logps[2:]]
    terms = dpo(*logps, **settings_for(kind), **lengths)
    assert torch.autograd.grad(terms.sum, refs, allow_unused=True) == (None, None)
    assert not any(total.requires_grad for total in terms.stats.values())


@given(seed=st.integers(0, 99), alpha=st.sampled_from([0.0, 1 - 1e-9, 1.0, 1 + 1e-9]))
def test_alpha_ends_at_the_other_divergences(seed, alpha):
    """α = 0 is forward KL, α = 1 reverse KL, and no digit is lost beside 1."""
    logps, lengths = pairs(4, seed, scale=4.0, dtype=torch.float32)
    other = "forward_kl" if alpha == 0 else "reverse_kl"
    found = dpo(*logps, loss_type="ipo", **lengths, f_divergence="alpha_divergence", f_divergence_alpha=alpha)
    torch.testing.assert_close(found.per_sample, dpo(*logps, loss_type="ipo", **lengths, f_divergence=other).per_sample)


def test_what_sft_learns_may_be_another_sum():
    """`sft_logps` stand where `chosen_logps` are weighted; nothing else reads them."""
    logps, lengths = pairs(5)
    other = (2 * logps[0].detach()).requires_grad_()
    found = dpo(*logps, loss_type=["sigmoid", "sft"], **lengths, sft_logps=other)
    expected = dpo(*logps).per_sample - other / lengths["chosen_lengths"].double().mean()
    torch.testing.assert_close(found.per_sample, expected)


def test_a_mixture_is_the_weighted_sum():
    """Several types with weights (MPO) are the weighted sum of each; weights default to 1."""
    logps, lengths = pairs(5)
    kinds, weights = ["sigmoid", "bco_pair", "sft", "aot"], [0.8, 0.2, 1.0, -0.5]
    alone = [dpo(*logps, loss_type=kind, **lengths).per_sample for kind in kinds]
    mixed = dpo(*logps, loss_type=kinds, loss_weights=weights, **lengths)
    torch.testing.assert_close(mixed.per_sample, sum(w * x for w, x in zip(weights, alone, strict=True)))
    torch.testing.assert_close(dpo(*logps, loss_type=kinds, **lengths).per_sample, sum(alone))
    assert mixed.count == 5


def test_half_precision_is_summed_in_float32():
    """bfloat16 log-probabilities have a float32 loss, and gradients in their own dtype."""
    logps, _ = pairs(3, dtype=torch.bfloat16)
    terms = dpo(*logps)
    terms.sum.backward()
    assert terms.sum.dtype == terms.per_sample.dtype == torch.float32
    assert logps[0].grad.dtype == torch.bfloat16


def test_no_pairs_are_zero():
    """An empty batch is 0 over 0, with gradients."""
    logps, lengths = pairs(0)
    for kind in DPO_TYPES:
        terms = dpo(*logps, **settings_for(kind), **lengths)
        assert (terms.sum.item(), terms.count) == (0.0, 0)
        terms.sum.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "sigmod"}, r"loss_type: there is no 'sigmod'. Did you mean 'sigmoid'\?"),
        ({"loss_type": []}, "0 types"),
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]}, "2 types and 1 weight$"),
        ({"loss_weights": [math.nan]}, "loss_weights: a finite number"),
        ({"beta": 0.0}, "beta: a finite number above 0 is wanted, not 0.0"),
        ({"beta": -1}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"beta": True}, "beta"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "hinge does not read it; those that do: aot"),
        ({"discopop_tau": 0.0}, "discopop_tau: a finite number above 0 is wanted"),
        ({"discopop_tau": 0.1}, "sigmoid does not read it; 'discopop' does"),
        ({"f_divergence_alpha": 0.1}, "reverse_kl does not read it; 'alpha_divergence' does"),
        ({"f_divergence_alpha": -0.5}, "f_divergence_alpha: a finite number from 0 is wanted"),
        ({"label_smoothing": 0.5, "loss_type": "robust"}, "from 0 and below 0.5 is wanted, not 0.5"),
        ({"label_smoothing": -0.1, "loss_type": "robust"}, "label_smoothing"),
        ({"loss_type": "exo_pair"}, "must be above 0"),
        ({"loss_type": "ipo"}, "chosen_lengths and rejected_lengths: loss_type ipo divides"),
        ({"loss_type": "ipo", "chosen_lengths": torch.tensor([1, 2])}, "^rejected_lengths: "),
        ({"loss_type": "sft"}, "^chosen_lengths: "),
        ({"loss_type": "sft", "chosen_lengths": torch.tensor([1])}, "the lengths disagree: chosen_logps 2, chosen_lengths 1"),
        ({"chosen_lengths": torch.tensor([1.0, 2.0])}, r"chosen_lengths: a tensor of integers .* not float32\[2\]"),
        ({"f_divergence": "reverse"}, "Did you mean 'reverse_kl'"),
        ({"f_divergence": "forward_kl", "loss_type": ["sigmoid", "bco_pair"]}, "bco_pair is defined for reverse_kl alone"),
        ({"f_divergence": "forward_kl", "loss_type": "sft", "chosen_lengths": torch.tensor([1, 2])}, "sft is defined"),
        ({"tokens_per_pair": 3.0}, "does not read it; 'sft' does"),
    ],
)
def test_bad_settings_are_refused(change, message):
    """One error names the argument, what was found and what is valid; nothing is ignored."""
    with pytest.raises(LossError, match=message):
        dpo(*(torch.zeros(2) for _ in range(4)), **change)


@pytest.mark.parametrize(
    ("logps", "message"),
    [
        ([torch.zeros(2)] * 3 + [torch.zeros(3)], "the lengths disagree: chosen_logps 2, .* ref_rejected_logps 3"),
        ([torch.zeros(2, 1)] * 4, r"chosen_logps: .* not float32\[2, 1\]"),
        ([torch.zeros(2, dtype=torch.int64)] * 4, r"chosen_logps: .* not int64\[2\]"),
        ([[0.0, 0.0]] * 4, "chosen_logps: .* not list"),
    ],
)
def test_bad_tensors_are_refused(logps, message):
    """Tensors that are not one number a pair are named with their shape."""
    with pytest.raises(LossError, match=message):
        dpo(*logps)
