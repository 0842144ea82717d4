"""The divergence from a teacher's likeliest tokens equals one written class by class, and the whole one where all are known."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import TopTokens, distillation, top_distillation
from forge_algos.losses._rows import Projected
from forge_algos.losses.distillation._top import top_distillation_of_rows, top_of_rows

from ..test_nll import Largest


def naive(logits, top, beta):
    """The divergence over K + 1 classes, one position at a time, in Python's floats with autograd's gradients."""
    total = logits.new_zeros(())
    for row, ids, logps, rest in zip(logits, *(each.tolist() for each in top), strict=True):
        s = row.softmax(0)
        kept = [(at, logp) for at, logp in zip(ids, logps, strict=True) if logp > -math.inf]
        others = [at for at in range(len(row)) if at not in dict(kept)]
        p = [math.exp(logp) for _, logp in kept] + ([math.exp(rest)] if others else [])
        q = [s[at] for at, _ in kept] + ([s[others].sum()] if others else [])
        p = [each / sum(p) for each in p]
        if beta == 0:
            total = total + sum(a * (math.log(a) - b.log()) for a, b in zip(p, q, strict=True) if a)
        elif beta == 1:
            total = total + sum(b * (b.log() - math.log(a)) for a, b in zip(p, q, strict=True))
        else:
            m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
            total = total + beta * sum(a * (math.log(a) - c.log()) for a, c in zip(p, m, strict=True) if a)
            total = total + (1 - beta) * sum(b * (b / c).log() for b, c in zip(q, m, strict=True))
    return total


def made_up(M, V, K, *, seed=0):
    """Return the student's hidden and weight, and the teacher's logits with its K likeliest tokens."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((M, 3), (V, 3)))
    teacher = 2 * torch.randn(M, V, generator=g, dtype=torch.float64)
    top = top_of_rows(Projected(product=torch.float64), (teacher, torch.eye(V, dtype=torch.float64), None), K)
    return [hidden.requires_grad_(), weight.requires_grad_(), None], teacher, top


@given(
    M=st.integers(1, 6),
    V=st.integers(2, 8),
    K=st.integers(1, 8),
    chunk_rows=st.integers(1, 4),
    beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    left_out=st.booleans(),
    fewer=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_naive_one(M, V, K, chunk_rows, beta, left_out, fewer, weighted, seed):
    """Value and gradients, in chunks, with fewer tokens than K at a position, and without the rest's class."""
    student, _, top = made_up(M, V, K, seed=seed)
    if fewer and top.ids.shape[1] > 1:
        top.rest[0] = torch.logaddexp(top.rest[0], top.logps[0, -1])
        top.logps[0, -1], top.ids[0, -1] = -math.inf, 0
    if left_out and beta < 1:
        top = top._replace(rest=torch.full_like(top.rest, -math.inf))
    shares = torch.arange(1, M + 1, dtype=torch.float64) / 2 if weighted else None
    source = Projected(product=torch.float64, temperature=0.7, chunk_rows=chunk_rows)
    terms = top_distillation_of_rows(source, student, top, beta=beta, weights=shares)
    logits = student[0] @ student[1].T / 0.7
    each = [naive(logits[i : i + 1], top.part(slice(i, i + 1)), beta) * (1 if shares is None else shares[i]) for i in range(M)]
    assert terms.count == M
    torch.testing.assert_close(terms.sum, sum(each), rtol=1e-9, atol=1e-11)
    wanted = torch.autograd.grad(sum(each), student[:2])
    for mine, theirs in zip(torch.autograd.grad(terms.sum, student[:2]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@given(V=st.integers(1, 9), beta=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99))
def test_all_tokens_are_the_whole_divergence(V, beta, seed):
    """With K = V it is the divergence from the live teacher, and so is its gradient and its `kl`."""
    student, teacher, top = made_up(4, V, V, seed=seed)
    logits = student[0] @ student[1].T
    assert top.rest.isneginf().all()
    ours, live = top_distillation(logits, top, beta=beta), distillation(logits, teacher, beta=beta)
    torch.testing.assert_close(ours.sum, live.sum, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.stats["kl"], distillation(logits, teacher, beta=0.0).sum.detach(), rtol=1e-10, atol=1e-12)
    slopes = (torch.autograd.grad(each.sum, student[:2], retain_graph=True) for each in (ours, live))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_likeliest_tokens():
    """The likeliest come first, with what is left of the probability."""
    _, teacher, top = made_up(5, 7, 3)
    logps = teacher.log_softmax(1)
    torch.testing.assert_close(top.logps, logps.sort(descending=True).values[:, :3])
    torch.testing.assert_close(logps.gather(1, top.ids), top.logps)
    torch.testing.assert_close(top.rest.exp() + top.logps.exp().sum(1), torch.ones(5, dtype=torch.float64))


def test_ids_that_stand_for_no_token():
    """Of a vocabulary that is padded to a round number the ids beyond the tokenizer's are of the rest, however likely."""
    _, teacher, _ = made_up(5, 7, 3)
    teacher[:, 5:] += 9
    top = top_of_rows(Projected(product=torch.float64), (teacher, torch.eye(7, dtype=torch.float64), None), 9, below=5)
    assert top.ids.shape == (5, 5)
    assert top.ids.max() < 5
    torch.testing.assert_close(top.rest, teacher.log_softmax(1)[:, 5:].logsumexp(1))


def test_never_holds_all_logits():
    """No tensor comes near [M, V]."""
    g = torch.Generator().manual_seed(0)
    student = [torch.randn(200, 4, generator=g).requires_grad_(), torch.randn(300, 4, generator=g).requires_grad_(), None]
    top = TopTokens(torch.zeros(200, 1, dtype=torch.long), torch.full((200, 1), -1.0), torch.full((200,), -0.5))
    with Largest() as chunked:
        top_distillation_of_rows(Projected(product=torch.float32, chunk_rows=16), student, top, beta=0.5).sum.backward()
    assert chunked.numel <= 16 * 300


def test_refusals():
    """Other shapes and a β outside of its range are refused."""
    _, _, top = made_up(3, 4, 2)
    with pytest.raises(LossError, match="2 rows of the student"):
        top_distillation(torch.zeros(2, 4), top)
    with pytest.raises(LossError, match="from 0 to 1"):
        top_distillation(torch.zeros(3, 4), top, beta=1.5)
