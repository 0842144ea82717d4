"""The distance between models of two tokenizers: the definition token by token, and in chunks of both heads' logits."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from forge_algos import LossError
from forge_algos.losses import SharedTokens, aligned_distillation
from forge_algos.losses._rows import Given, Projected
from forge_algos.losses.distillation._aligned import adaptive_weights, others
from forge_algos.losses.distillation._aligned_rows import SpanRows, Unshared, aligned_of_rows, logps_before

from ..test_nll import Largest


def naive(s, t, pairs, before, beta, temperature, weights):
    """Return one span's term by plain Python numbers, as GOLD's hybrid defines it."""

    def distribution(logits, log_before):
        exps = [math.exp(x / temperature) for x in logits]
        return [x / sum(exps) * math.exp(log_before) for x in exps]

    def kl(p, q):
        return p * math.log(p / q)

    p, q = distribution(s, before[0]), distribution(t, before[1])
    matched = 0.0
    for ours, theirs in pairs:
        a, b = max(p[ours], 1e-8), max(q[theirs], 1e-8)
        m = (1 - beta) * a + beta * b
        matched += kl(b, a) if beta == 0 else kl(a, b) if beta == 1 else beta * kl(b, m) + (1 - beta) * kl(a, m)
    rest_p = sorted((x for i, x in enumerate(p) if i not in {a for a, _ in pairs}), reverse=True)
    rest_q = sorted((x for i, x in enumerate(q) if i not in {b for _, b in pairs}), reverse=True)
    unmatched = 0.0
    if rest_p and rest_q:
        longest = max(len(rest_p), len(rest_q))
        rest_p += [0.0] * (longest - len(rest_p))
        rest_q += [0.0] * (longest - len(rest_q))
        unmatched = sum(abs(a - b) for a, b in zip(rest_p, rest_q, strict=True))
    share = len(pairs) / len(t)
    w_matched, w_unmatched = weights or (share, 1 - share)
    return w_matched * matched + w_unmatched * unmatched


def tensors(V, W, spans, seed, *, D=4):
    """Return both models' (hidden, weight, bias) with a row for each token of spans of these (own, teacher's) sizes."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for width, at in ((V, 0), (W, 1)):
        rows = sum(each[at] for each in spans)
        shapes = ((rows, D + at), (width, D + at), (width,))
        made.append([torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(not at) for shape in shapes])
    return made


def rows_of(sizes, vocabulary, seed):
    """Return the rows of spans of these sizes, in the order of a head: those before the last first."""
    of = torch.tensor([span for span, size in enumerate(sizes) for _ in range(size - 1)], dtype=torch.int64)
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocabulary, (len(of),), generator=g)
    return SpanRows(torch.arange(len(sizes)) + len(of), torch.arange(len(of)), targets, of)


def shared_of(number, V, W, seed):
    g = torch.Generator().manual_seed(seed)
    return SharedTokens(torch.randperm(V, generator=g)[:number], torch.randperm(W, generator=g)[:number])


@given(
    V=st.integers(1, 7),
    W=st.integers(1, 7),
    spans=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5),
    shared=st.integers(0, 7),
    beta=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([1.0, 0.6]),
    weights=st.sampled_from([None, (0.7, 0.2)]),
    weighted=st.booleans(),
    chunk_rows=st.integers(1, 6),
    given_logits=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(V, W, spans, shared, beta, temperature, weights, weighted, chunk_rows, given_logits, seed):
    """Chunks of two heads and the whole loss equal the definition in numbers, at any sizes; gradients equal autograd's."""
    student, teacher = tensors(V, W, spans, seed)
    both = shared_of(min(shared, V, W), V, W, seed)
    ours, theirs = (rows_of([each[at] for each in spans], width, seed + at) for at, width in ((0, V), (1, W)))
    s, t = (torch.nn.functional.linear(*each) for each in (student, teacher))
    before = []
    for logits, rows in ((s, ours), (t, theirs)):
        logps = (logits / temperature).log_softmax(1)[rows.before, rows.targets]
        before.append(torch.zeros(len(spans), dtype=torch.float64).index_add(0, rows.of, logps))
    how = {"beta": beta, "temperature": temperature, "weights": weights}
    whole = aligned_distillation(
        s[ours.last], t[theirs.last], shared=both, student_before=before[0], teacher_before=before[1], **how
    )
    pairs = list(zip(both.ours.tolist(), both.theirs.tolist(), strict=True))
    numbers = [
        naive(s[a].tolist(), t[b].tolist(), pairs, (x.item(), y.item()), beta, temperature, weights)
        for a, b, x, y in zip(ours.last, theirs.last, *before, strict=True)
    ]
    torch.testing.assert_close(whole.per_sample.tolist(), numbers, rtol=1e-9, atol=1e-12)
    shares = torch.linspace(0.5, 2, len(spans), dtype=torch.float32) if weighted else None
    expected = whole.sum if shares is None else (whole.per_sample * shares).sum()

    source = {"temperature": temperature, "chunk_rows": chunk_rows}
    if given_logits:
        way, mine, its = Given(given=torch.float64, **source), (s,), (t,)
    else:
        way, mine, its = Projected(product=torch.float64, **source), student, teacher
    logps = [logps_before(way, (each[0][: len(rows.of)], *each[1:]), rows) for each, rows in ((mine, ours), (its, theirs))]
    terms = aligned_of_rows(
        way,
        (mine[0][len(ours.of) :], *mine[1:]),
        (way, (its[0][len(theirs.of) :], *its[1:])),
        (logps[0], logps[1].detach()),
        shared=both,
        unshared=Unshared(others(both.ours, V), others(both.theirs, W)),
        parts=weights or adaptive_weights(both, W),
        beta=beta,
        weights=shares,
    )
    assert terms.count == len(spans)
    torch.testing.assert_close(terms.sum, expected, rtol=1e-9, atol=1e-12)
    if not weighted:
        torch.testing.assert_close(dict(terms.stats), dict(whole.stats), rtol=1e-9, atol=1e-12)
    wanted = torch.autograd.grad(expected, student, retain_graph=True)
    for found, each in zip(torch.autograd.grad(terms.sum, student), wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-7, atol=1e-10)


def test_equal_models_are_at_no_distance():
    """A model that is its own teacher, token for token, is at 0, under any order of the ids."""
    logits = torch.randn(4, 9)
    order = torch.randperm(9)
    assert aligned_distillation(logits, logits[:, order]).sum.item() == pytest.approx(0, abs=1e-6)
    same = SharedTokens(order, torch.arange(9))
    assert aligned_distillation(logits, logits[:, order], shared=same).sum.item() == pytest.approx(0, abs=1e-6)


def test_never_holds_all_logits():
    """No tensor comes near [G, V]; the whole loss makes one, so the measure works."""
    g = torch.Generator().manual_seed(0)
    student = [torch.randn(*shape, generator=g).requires_grad_() for shape in ((200, 4), (300, 4))]
    teacher = [torch.randn(*shape, generator=g) for shape in ((200, 3), (250, 3))]
    source, both = Projected(product=torch.float32, chunk_rows=16), shared_of(40, 300, 250, 0)
    zeros = torch.zeros(200)
    with Largest() as chunked:
        aligned_of_rows(
            source,
            (*student, None),
            (source, (*teacher, None)),
            (zeros, zeros),
            shared=both,
            unshared=Unshared(others(both.ours, 300), others(both.theirs, 250)),
            parts=(0.5, 0.5),
            beta=0.5,
        ).sum.backward()
    with Largest() as whole:
        aligned_distillation(student[0] @ student[1].T, teacher[0] @ teacher[1].T, shared=both)
    assert whole.numel >= 200 * 250
    assert chunked.numel <= 16 * 300


def test_bad_input_is_refused():
    """Numbers out of range, and other spans on either side, are refused."""
    s, t = torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(LossError, match=r"beta: a number from 0 to 1 is wanted, not 1\.5"):
        aligned_distillation(s, t, beta=1.5)
    with pytest.raises(LossError, match="2 spans of student_logits and 1 of teacher_logits"):
        aligned_distillation(s, t[:1])
    with pytest.raises(LossError, match="student_logits: a tensor of floats"):
        aligned_distillation(s.long(), t)
