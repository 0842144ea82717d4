"""InfoNCE of text embeddings, beside a computation of one query at a time in float64."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import cosine_similarity

from forge_algos import LossError, losses

B, N, D = 6, 11, 5


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw B queries, N candidates and each query's positive, of which two share one."""
    source = torch.Generator().manual_seed(seed)
    queries, candidates = (torch.randn(n, D, generator=source, dtype=torch.float64).to(dtype) for n in (B, N))
    positives = torch.randperm(N, generator=source)[:B]
    positives[1] = positives[0]
    return queries.requires_grad_(), candidates.requires_grad_(), positives


def naive(
    queries: torch.Tensor, candidates: torch.Tensor, positives: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, int, float]:
    """Sum -log(e^own / Σ e^each), one query and one candidate at a time; count finds and ranks."""
    total, correct, reciprocal = torch.zeros((), dtype=queries.dtype), 0, 0.0
    for query, positive in zip(queries, positives.tolist(), strict=True):
        scores = [cosine_similarity(query, candidate, dim=0) / temperature for candidate in candidates]
        total = total - scores[positive] + torch.stack([score.exp() for score in scores]).sum().log()
        place = 1 + sum(bool(score >= scores[positive]) for at, score in enumerate(scores) if at != positive)
        correct, reciprocal = correct + (place == 1), reciprocal + 1 / place
    return total, correct, reciprocal


@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_it_is_infonce_of_one_query_at_a_time(temperature: float) -> None:
    """Loss to 1e-6 and gradients to 1e-5 of a float64 loop; figures alike."""
    queries, candidates, positives = drawn()
    terms = losses.contrastive(queries, candidates, positives, temperature=temperature)
    terms.sum.backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (queries, candidates)]
    total, correct, reciprocal = naive(exact[0], exact[1], positives, temperature)
    total.backward()
    assert terms.sum.dtype == torch.float32
    assert terms.count == B
    assert terms.sum.item() == pytest.approx(total.item(), rel=1e-6)
    assert terms.stats["correct"].item() == correct
    assert terms.stats["reciprocal_rank"].item() == pytest.approx(reciprocal, rel=1e-6)
    for found, wanted in zip((queries, candidates), exact, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5 * wanted.grad.abs().max().item())


@given(cut=st.integers(0, B), seed=st.integers(0, 1000), order=st.permutations(range(N)))
def test_no_division_of_the_queries_and_no_order_of_the_candidates_changes_it(cut: int, seed: int, order: list[int]) -> None:
    """Two parts, each with all candidates in another order, have the sums and gradients of the whole."""
    queries, candidates, positives = drawn(seed, torch.float64)
    whole = losses.contrastive(queries, candidates, positives)
    wanted = torch.autograd.grad(whole.sum, [queries, candidates])
    moved = torch.tensor(order).argsort()[positives]
    parts = [losses.contrastive(queries[part], candidates[order], moved[part]) for part in (slice(cut), slice(cut, None))]
    found = torch.autograd.grad(parts[0].sum + parts[1].sum, [queries, candidates])
    torch.testing.assert_close(parts[0].sum + parts[1].sum, whole.sum, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    for name, value in whole.stats.items():
        assert sum(part.stats[name].item() for part in parts) == pytest.approx(value.item(), abs=1e-12)


def test_sixteen_bits_are_computed_in_thirty_two() -> None:
    """bfloat16 embeddings give the float32 loss of the same numbers."""
    queries, candidates, positives = drawn()
    halves = queries.detach().bfloat16(), candidates.detach().bfloat16()
    found = losses.contrastive(*halves, positives)
    assert found.sum.dtype == torch.float32
    assert torch.equal(found.sum, losses.contrastive(halves[0].float(), halves[1].float(), positives).sum)


def test_autocast_does_not_round_the_cosines() -> None:
    """The loss under an autocast to bfloat16 is bit for bit the one without."""
    plain = losses.contrastive(*drawn()).sum
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(losses.contrastive(*drawn()).sum, plain)


def test_embeddings_that_are_all_alike_find_nothing() -> None:
    """A collapsed model loses log N a query, and its accuracy is 0."""
    terms = losses.contrastive(torch.ones(B, D), torch.ones(N, D), torch.arange(B))
    assert terms.sum.item() == pytest.approx(B * math.log(N), rel=1e-6)
    assert terms.stats["correct"].item() == 0
    assert terms.stats["reciprocal_rank"].item() == pytest.approx(B / N, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature: a finite number above 0 is wanted, not 0.0"),
        ({"queries_BD": torch.ones(B)}, r"queries_BD: a tensor of floats with two dimensions is wanted, not float32\[6\]"),
        ({"candidates_ND": torch.ones(N, D + 1)}, "embeddings of one width are wanted, not 5 and 6"),
        ({"positives": torch.arange(B - 1)}, r"positives: integers of the shape \[6\] are wanted.*int64\[5\]"),
        ({"positives": torch.ones(B)}, r"positives: integers of the shape \[6\] are wanted.*float32\[6\]"),
        ({"positives": torch.arange(B) + N - 1}, "positives: rows of the 11 candidates are wanted, found 10 to 15"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, object], message: str) -> None:
    """One error names the argument, what was found and what is wanted."""
    queries, candidates, positives = drawn()
    arguments = {"queries_BD": queries, "candidates_ND": candidates, "positives": positives, **wrong}
    with pytest.raises(LossError, match=message):
        losses.contrastive(**arguments)  # pyrefly: ignore[bad-argument-type]  wrong on purpose


def test_an_excluded_candidate_is_as_if_it_were_not_there() -> None:
    """Loss, gradients and place are those without it; a query's own positive stays, whatever is asked."""
    queries, candidates, positives = drawn(dtype=torch.float64)
    left_out = next(at for at in range(N) if at not in positives.tolist())
    excluded = torch.zeros(B, N, dtype=torch.bool)
    excluded[:, left_out] = True
    excluded[torch.arange(B), positives] = True
    found = losses.contrastive(queries, candidates, positives, excluded=excluded)
    kept = [at for at in range(N) if at != left_out]
    wanted = losses.contrastive(queries, candidates[kept], positives - (positives > left_out).long())
    torch.testing.assert_close(found.sum, wanted.sum)
    assert {name: value.item() for name, value in found.stats.items()} == {name: v.item() for name, v in wanted.stats.items()}
    torch.testing.assert_close(torch.autograd.grad(found.sum, queries), torch.autograd.grad(wanted.sum, queries))
    with pytest.raises(LossError, match="excluded"):
        losses.contrastive(queries, candidates, positives, excluded=excluded[:1])
