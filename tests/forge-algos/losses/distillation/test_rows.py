"""The divergence in chunks of two heads' logits equals that of whole logits.
Value and gradients, without a tensor [M, V] of either model.
"""

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import distillation
from forge_algos.losses._rows import Given, Projected
from forge_algos.losses.distillation._rows import distillation_of_rows

from ..test_nll import Largest


def two_heads(M, V, *, D=4, teacher_D=3, seed=0, dtype=torch.float64):
    """Return (student's hidden, weight, bias), (teacher's), of different widths."""
    g = torch.Generator().manual_seed(seed)
    student = [torch.randn(*shape, generator=g, dtype=dtype).requires_grad_() for shape in ((M, D), (V, D), (V,))]
    return student, [
        torch.randn(M, teacher_D, generator=g, dtype=dtype),
        torch.randn(V, teacher_D, generator=g, dtype=dtype),
        None,
    ]


def logits_of(tensors, scale):
    return torch.nn.functional.linear(*tensors) * scale


@given(
    M=st.integers(1, 7),
    V=st.integers(1, 9),
    chunk_rows=st.integers(1, 8),
    beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 0.6, 3.0]),
    upstream=st.sampled_from([1.0, -0.25]),
    given_logits=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_whole_one(M, V, chunk_rows, beta, temperature, upstream, given_logits, seed):
    """Value, count, forward KL and every gradient equal the whole divergence's.
    At odd sizes, for any chunk, from heads or from logits.
    """
    student, teacher = two_heads(M, V, seed=seed)
    how = {"temperature": temperature, "chunk_rows": chunk_rows}
    ways = Projected(product=torch.float64, scale=0.5, **how), Projected(product=torch.float64, scale=2.0, **how)
    s, t = logits_of(student, 0.5), logits_of(teacher, 2.0)
    expected = distillation(s, t, beta=beta, temperature=temperature)
    if given_logits:
        ways, ours, theirs = (Given(given=torch.float64, **how),) * 2, (s,), (t,)
    else:
        ours, theirs = student, teacher
    terms = distillation_of_rows(ways[0], ours, (ways[1], theirs), beta=beta)
    assert terms.count == M
    torch.testing.assert_close(terms.sum, expected.sum, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(terms.stats["kl"], distillation(s, t, beta=0.0, temperature=temperature).sum.detach())
    wanted = torch.autograd.grad(expected.sum * upstream, student, retain_graph=True)
    for mine, theirs_ in zip(torch.autograd.grad(terms.sum * upstream, student), wanted, strict=True):
        torch.testing.assert_close(mine, theirs_, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_never_holds_all_logits(beta):
    """No tensor comes near [M, V]; the whole computation makes one, so the measure works."""
    student, teacher = two_heads(200, 300, dtype=torch.float32)
    source = Projected(product=torch.float32, chunk_rows=16)
    with Largest() as chunked:
        distillation_of_rows(source, student, (source, teacher), beta=beta).sum.backward()
    with Largest() as whole:
        distillation(logits_of(student, 1.0), logits_of(teacher, 1.0), beta=beta)
    assert whole.numel == 200 * 300
    assert chunked.numel <= 16 * 300


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_without_gradients(beta):
    """Under no_grad only the value is computed; without rows it is 0, with gradients of 0."""
    student, teacher = two_heads(5, 7)
    source = Projected(product=torch.float64)
    with torch.no_grad():
        terms = distillation_of_rows(source, student, (source, teacher), beta=beta)
    assert not terms.sum.requires_grad
    torch.testing.assert_close(
        terms.sum, distillation(logits_of(student, 1.0), logits_of(teacher, 1.0), beta=beta).sum.detach()
    )
    student, teacher = two_heads(0, 7)
    terms = distillation_of_rows(source, student, (source, teacher), beta=beta)
    terms.sum.backward()
    assert (terms.sum.item(), terms.count, terms.stats["kl"].item()) == (0.0, 0, 0.0)
    assert student[1].grad.abs().max() == 0


def test_bad_input_is_refused():
    """A β out of range and heads over two vocabularies are refused."""
    student, teacher = two_heads(3, 7)
    source = Projected(product=torch.float64)
    with pytest.raises(LossError, match="beta: a number from 0 to 1 is wanted, not 1.5"):
        distillation_of_rows(source, student, (source, teacher), beta=1.5)
    _, other = two_heads(3, 8)
    with pytest.raises(LossError, match="vocabulary of 7 tokens and its teacher one of 8"):
        distillation_of_rows(source, student, (source, other), beta=0.5)
