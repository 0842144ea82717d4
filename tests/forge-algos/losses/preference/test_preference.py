"""ORPO, SimPO, CPO, KTO, reward and DFT losses: the papers' formulas, for every cut.
Finite at any log-probability.
"""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import cpo, dft, kto, orpo, reward, simpo
from forge_algos.losses._numeric import log1mexp


def batch(B, seed=0):
    """Return float64 log-probabilities of chosen, rejected and prompts, and lengths."""
    g = torch.Generator().manual_seed(seed)
    logps = [(-9 * torch.rand(B, generator=g, dtype=torch.float64) - 0.1).requires_grad_() for _ in range(3)]
    return logps, [torch.randint(1, 9, (B,), generator=g) for _ in range(3)]


def sigma(z):
    return 1 / (1 + torch.exp(-z))


def same(terms, expected, inputs):
    """Check the values of every term, their sum, and gradients."""
    torch.testing.assert_close(terms.per_sample, expected)
    torch.testing.assert_close(terms.sum, expected.sum())
    assert terms.count == len(expected)
    inputs = [x for x in inputs if x.requires_grad]
    ours = torch.autograd.grad(terms.sum, inputs, retain_graph=True, allow_unused=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.sum(), inputs, retain_graph=True, allow_unused=True))


@given(B=st.integers(1, 5), seed=st.integers(0, 99), beta=st.floats(0.01, 2))
def test_orpo_is_the_papers_formula(B, seed, beta):
    """ORPO is the odds of mean probabilities plus the likelihood a token of prompt and chosen."""
    (chosen, rejected, prompt), (Lc, Lr, Lp) = batch(B, seed)
    P, Q = torch.exp(chosen / Lc), torch.exp(rejected / Lr)
    ratio = (P / (1 - P)) / (Q / (1 - Q))
    tokens = (Lc + Lp).double().mean()
    preference = -beta * torch.log(sigma(torch.log(ratio)))
    lengths = {"chosen_lengths": Lc, "rejected_lengths": Lr}
    with_prompt = orpo(chosen, rejected, **lengths, beta=beta, nll_logps=prompt + chosen, nll_lengths=Lc + Lp)
    same(with_prompt, preference - (prompt + chosen) / tokens, (chosen, rejected, prompt))
    alone = orpo(chosen, rejected, **lengths, beta=beta)
    same(alone, preference - chosen / Lc.double().mean(), (chosen, rejected))


@given(B=st.integers(1, 5), seed=st.integers(0, 99), beta=st.floats(0.1, 5), gamma=st.floats(0, 2), eps=st.floats(0, 0.4))
def test_simpo_is_the_papers_formula(B, seed, beta, gamma, eps):
    """SimPO is -log σ of β times the difference a token, minus γ; smoothed."""
    (chosen, rejected, _), (Lc, Lr, _) = batch(B, seed)
    # Lengths as float64: a number divided by integers is float32.
    ahead = beta / Lc.double() * chosen - beta / Lr.double() * rejected - gamma
    terms = simpo(chosen, rejected, chosen_lengths=Lc, rejected_lengths=Lr, beta=beta, gamma=gamma, label_smoothing=eps)
    # σ(-x) and not 1 - σ(x), of which few digits are left where σ is near 1.
    same(terms, -(1 - eps) * torch.log(sigma(ahead)) - eps * torch.log(sigma(-ahead)), (chosen, rejected))


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
@given(B=st.integers(1, 5), seed=st.integers(0, 99), beta=st.floats(0.05, 1), nll_weight=st.sampled_from([0.0, 0.5]))
def test_cpo_is_the_papers_formula(kind, B, seed, beta, nll_weight):
    """CPO is the preference in three forms plus the chosen completion's likelihood a token."""
    (chosen, rejected, _), (Lc, Lr, _) = batch(B, seed)
    d = chosen - rejected
    preference = {
        "sigmoid": lambda: -torch.log(sigma(beta * d)),
        "hinge": lambda: torch.clamp(1 - beta * d, min=0),
        "ipo": lambda: (chosen / Lc - rejected / Lr - 1 / (2 * beta)) ** 2,
    }[kind]()
    terms = cpo(chosen, rejected, chosen_lengths=Lc, rejected_lengths=Lr, beta=beta, loss_type=kind, nll_weight=nll_weight)
    same(terms, preference - nll_weight * chosen / Lc.double().mean(), (chosen, rejected))


@pytest.mark.parametrize("classes", ["mixed", "desirable", "undesirable"])
@given(B=st.integers(1, 6), seed=st.integers(0, 99), beta=st.floats(0.05, 1), kl=st.floats(-2, 4))
def test_kto_is_the_papers_formula(classes, B, seed, beta, kl):
    """KTO is λ - v(x, y) for each class with the KL clamped at 0; for one class alone too."""
    (logps, ref, _), (lengths, _, _) = batch(B, seed)
    desirable = {"mixed": lengths % 2 == 0, "desirable": lengths > 0, "undesirable": lengths < 0}[classes]
    z = max(kl, 0.0)
    expected = [
        1.5 * (1 - sigma(beta * (p - q - z))) if good else 0.7 * (1 - sigma(beta * (z - p + q)))
        for p, q, good in zip(logps, ref, desirable.tolist(), strict=True)
    ]
    given_kl = torch.tensor(kl, requires_grad=True)
    terms = kto(logps, ref, desirable, given_kl, beta=beta, desirable_weight=1.5, undesirable_weight=0.7)
    assert terms.count == B
    torch.testing.assert_close(terms.per_sample, torch.stack(expected))
    ours = torch.autograd.grad(terms.sum, logps, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(sum(expected), logps))
    assert torch.autograd.grad(terms.sum, (given_kl, ref), allow_unused=True) == (None, None)
    assert terms.stats["desirable"] == desirable.sum()
    torch.testing.assert_close(terms.stats["chosen_rewards"] + terms.stats["rejected_rewards"], terms.stats["rewards"])


def test_kto_in_float64_has_its_weights_in_float64():
    """0.7 is not rounded to float32 where log-probabilities are float64."""
    logps, ref = torch.tensor([-3.0, -5.0], dtype=torch.float64), torch.tensor([-4.0, -4.5], dtype=torch.float64)
    terms = kto(logps, ref, torch.tensor([True, False]), 0.0, beta=0.1, desirable_weight=1.1, undesirable_weight=0.7)
    wanted = torch.stack([1.1 * torch.sigmoid(-0.1 * (logps - ref)[0]), 0.7 * torch.sigmoid(0.1 * (logps - ref)[1])])
    torch.testing.assert_close(terms.per_sample, wanted, rtol=1e-14, atol=0)


@given(B=st.integers(1, 6), seed=st.integers(0, 99), centering=st.sampled_from([0.0, 0.01]), with_margin=st.booleans())
def test_reward_is_the_papers_formula(B, seed, centering, with_margin):
    """The reward loss is Bradley-Terry with a margin, and rewards pulled towards 0."""
    (chosen, rejected, margin), _ = batch(B, seed)
    margin = margin.detach() if with_margin else None
    wanted = chosen - rejected - (margin if with_margin else 0)
    terms = reward(chosen, rejected, margin=margin, centering=centering)
    same(terms, -torch.log(sigma(wanted)) + centering * (chosen + rejected) ** 2, (chosen, rejected))
    assert terms.stats["correct"] == sum(c > r for c, r in zip(chosen, rejected, strict=True))


@given(T=st.integers(1, 9), seed=st.integers(0, 99))
def test_dft_weighs_by_the_probability(T, seed):
    """The gradient of a token's log-probability is -p, that of the probability with its sign."""
    (logps, _, _), _ = batch(T, seed)
    terms = dft(logps)
    p = logps.detach().exp()
    torch.testing.assert_close(terms.per_sample, -p * logps)
    torch.testing.assert_close(torch.autograd.grad(terms.sum, logps)[0], -p)
    torch.testing.assert_close(terms.stats["nll"], -logps.sum())


LOSSES = {
    "orpo": lambda x, n, s: orpo(*x[:2], chosen_lengths=n[0], rejected_lengths=n[1], tokens_per_pair=s),
    "orpo with prompts": lambda x, n, s: orpo(
        *x[:2], chosen_lengths=n[0], rejected_lengths=n[1], nll_logps=x[2], nll_lengths=n[2], tokens_per_pair=s
    ),
    "simpo": lambda x, n, s: simpo(*x[:2], chosen_lengths=n[0], rejected_lengths=n[1]),
    "cpo": lambda x, n, s: cpo(*x[:2], chosen_lengths=n[0], tokens_per_pair=s),
    "kto": lambda x, n, s: kto(*x[:2], n[0] % 2 == 0, 0.3),
    "reward": lambda x, n, s: reward(*x[:2], margin=x[2], centering=0.1),
    "dft": lambda x, n, s: dft(x[0]),
}


@pytest.mark.parametrize("name", LOSSES)
@given(B=st.integers(2, 8), at=st.integers(1, 7), seed=st.integers(0, 99))
def test_any_cut_gives_the_same(name, B, at, seed):
    """Two parts add up to the whole, in value, gradients and stats.
    Given the tokens of a pair over both.
    """
    logps, lengths = batch(B, seed)
    loss, at = LOSSES[name], min(at, B - 1)
    whole = loss(logps, lengths, None if name != "dft" else 1.0)
    size = lengths[2 if name == "orpo with prompts" else 0].sum().item() / B
    parts = [loss([x[cut] for x in logps], [n[cut] for n in lengths], size) for cut in (slice(at), slice(at, B))]
    assert sum(part.count for part in parts) == whole.count == B
    torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
    for key, total in whole.stats.items():
        torch.testing.assert_close(sum(part.stats[key] for part in parts), total)
    ours = torch.autograd.grad(sum(part.sum for part in parts), logps, allow_unused=True)
    torch.testing.assert_close(ours, torch.autograd.grad(whole.sum, logps, allow_unused=True))


@pytest.mark.parametrize("name", ["orpo", "cpo"])
def test_without_the_global_mean_the_likelihood_depends_on_the_cut(name):
    """Without the tokens of the whole step a call's own mean counts, as in TRL."""
    logps, lengths = batch(6, 1)
    whole = LOSSES[name](logps, lengths, None).sum
    parts = sum(LOSSES[name]([x[cut] for x in logps], [n[cut] for n in lengths], None).sum for cut in (slice(3), slice(3, 6)))
    assert abs(parts - whole) > 1e-3


@pytest.mark.parametrize("name", LOSSES)
@given(values=st.lists(st.sampled_from([0.0, -1e-30, -1e-7, -1.0, -90.0, -1e5]), min_size=3, max_size=3))
def test_extremes_are_finite(name, values):
    """In float32, at log-probabilities from 0 to -1e5, loss and gradients are finite."""
    logps = [torch.tensor([value, -5.0], requires_grad=True) for value in values]
    terms = LOSSES[name](logps, [torch.tensor([1, 2])] * 3, 1.5)
    terms.sum.backward()
    assert terms.per_sample.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in logps)


@given(st.floats(-80, -1e-6))
def test_log1mexp_is_exact(x):
    """log(1 - eˣ) in float32 is that of float64, on both sides of -ln 2."""
    single = torch.tensor(x, dtype=torch.float32)
    exact = math.log(-math.expm1(single.item()))
    assert log1mexp(single).item() == pytest.approx(exact, rel=3e-6)


TWO = torch.tensor([-1.0, -2.0])
LENGTHS = {"chosen_lengths": torch.tensor([1, 2]), "rejected_lengths": torch.tensor([1, 2])}
GOOD = torch.tensor([True, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: orpo(TWO, TWO, **LENGTHS, beta=0), "beta: a finite number above 0 is wanted, not 0"),
        (lambda: orpo(TWO, TWO, **LENGTHS, nll_logps=TWO), "nll_logps and nll_lengths: both or none"),
        (lambda: orpo(TWO, TWO, **LENGTHS, tokens_per_pair=0.0), "tokens_per_pair"),
        (lambda: orpo(TWO, TWO[:1], **LENGTHS), "chosen_logps 2, rejected_logps 1"),
        (lambda: simpo(TWO, TWO, **LENGTHS, gamma=-1), "gamma: a finite number from 0"),
        (lambda: simpo(TWO, TWO, **LENGTHS, label_smoothing=0.5), "label_smoothing"),
        (lambda: simpo(TWO, TWO, chosen_lengths=TWO, rejected_lengths=TWO), "chosen_lengths: a tensor of integers"),
        (lambda: cpo(TWO, TWO), "chosen_lengths: the likelihood part"),
        (lambda: cpo(TWO, TWO, loss_type="ipo", chosen_lengths=torch.tensor([1, 2])), "rejected_lengths: 'ipo'"),
        (lambda: cpo(TWO, TWO, **LENGTHS, loss_type="hinge", label_smoothing=0.1), "hinge does not read it"),
        (lambda: cpo(TWO, TWO, **LENGTHS, loss_type="simpo"), "loss_type: there is no 'simpo'"),
        (lambda: cpo(TWO, TWO, nll_weight=0.0, tokens_per_pair=2.0), "tokens_per_pair=2.0: nll_weight=0 leaves"),
        (lambda: kto(TWO, TWO, TWO, 0.0), r"desirable: bool\[2\] is wanted, not float32\[2\]"),
        (lambda: kto(TWO, TWO, GOOD[:1], 0.0), r"desirable: bool\[2\] is wanted, not bool\[1\]"),
        (lambda: kto(TWO, TWO, GOOD, TWO), "kl: one number"),
        (lambda: kto(TWO, TWO, GOOD, 0.0, undesirable_weight=0), "undesirable_weight"),
        (lambda: reward(TWO, TWO, centering=-0.1), "centering: a finite number from 0"),
        (lambda: reward(TWO, TWO, margin=TWO[:1]), "margin 1"),
        (lambda: dft(TWO[None]), r"logps: .* not float32\[1, 2\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    """One error names the argument, what was found and what is valid."""
    with pytest.raises(LossError, match=message):
        call()
