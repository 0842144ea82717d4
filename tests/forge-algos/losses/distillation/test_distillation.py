"""Distillation: the generalised Jensen-Shannon divergence, its two limits, and its laws."""

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import distillation


def logits(M, V, seed):
    g = torch.Generator().manual_seed(seed)
    student, teacher = (3 * torch.randn(2, M, V, generator=g, dtype=torch.float64)).unbind()
    return student.requires_grad_(), teacher


def kl(p, q):
    return (p * torch.log(p / q)).sum(-1)


@given(
    M=st.integers(1, 4),
    V=st.integers(2, 7),
    seed=st.integers(0, 99),
    beta=st.sampled_from([0, 0.1, 0.5, 0.9, 1]),
    T=st.sampled_from([0.7, 1.0, 2.0]),
)
def test_is_the_papers_formula(M, V, seed, beta, T):
    """Every term and every gradient, from probabilities."""
    student, teacher = logits(M, V, seed)
    s, t = (student / T).softmax(-1), (teacher / T).softmax(-1)
    m = beta * t + (1 - beta) * s
    expected = {0: kl(t, s), 1: kl(s, t)}.get(beta, beta * kl(t, m) + (1 - beta) * kl(s, m))
    terms = distillation(student, teacher, beta=beta, temperature=T)
    assert terms.count == M
    torch.testing.assert_close(terms.per_sample, expected)
    ours, theirs = torch.autograd.grad(terms.sum, student), torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(ours, theirs)
    halves = sum(distillation(student[cut], teacher[cut], beta=beta, temperature=T).sum for cut in (slice(1), slice(1, M)))
    torch.testing.assert_close(halves, terms.sum)


@pytest.mark.parametrize(("beta", "limit"), [(1e-7, 0.0), (1 - 1e-7, 1.0)])
def test_the_ends_are_limits(beta, limit):
    """Divided by β(1-β) the divergence tends to the forward KL at 0, to the reverse KL at 1."""
    student, teacher = logits(3, 5, 0)
    near = distillation(student, teacher, beta=beta).sum / (beta * (1 - beta))
    torch.testing.assert_close(near, distillation(student, teacher, beta=limit).sum, rtol=1e-3, atol=0)


@given(seed=st.integers(0, 20), beta=st.sampled_from([0.0, 0.3, 1.0]))
def test_equal_distributions_have_no_divergence(seed, beta):
    """A student equal to its teacher has divergence 0, zero gradients, and full agreement."""
    _, teacher = logits(3, 5, seed)
    student = (teacher + 7).requires_grad_()
    terms = distillation(student, teacher, beta=beta)
    (slope,) = torch.autograd.grad(terms.sum, student)
    assert abs(terms.sum) < 1e-12
    assert slope.abs().max() < 1e-12
    assert terms.stats["agreed"] == 3


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@given(values=st.lists(st.sampled_from([-1e4, -50.0, 0.0, 1e4]), min_size=4, max_size=4))
def test_extremes_are_finite(beta, values):
    """Certain of different tokens, in float32, loss and gradients are finite."""
    student = torch.tensor([values[:2]], requires_grad=True)
    terms = distillation(student, torch.tensor([values[2:]]), beta=beta)
    terms.sum.backward()
    assert terms.sum.isfinite()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_teacher_is_not_trained(beta):
    """No gradient reaches the teacher's logits."""
    student, teacher = logits(2, 3, 0)
    terms = distillation(student, teacher.requires_grad_(), beta=beta)
    assert torch.autograd.grad(terms.sum, teacher, allow_unused=True) == (None,)


TWO = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distillation(TWO, TWO, beta=1.5), "beta: a number from 0 to 1 is wanted, not 1.5"),
        (lambda: distillation(TWO, TWO, beta=-0.1), "beta"),
        (lambda: distillation(TWO, TWO, temperature=0), "temperature"),
        (lambda: distillation(TWO, TWO[:, :2]), r"student_logits \[2, 3\], teacher_logits \[2, 2\]"),
        (lambda: distillation(TWO[0], TWO[0]), r"student_logits: .* not float32\[3\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    """One error names the argument, what was found and what is valid."""
    with pytest.raises(LossError, match=message):
        call()
