"""One uniform number a row draws a token with its probability."""

import numpy as np
import pytest
import torch

from forge_algos._errors import RolloutError
from forge_algos.online.sampling._draw import DrawToken, inverse_cdf, uniforms


def test_tokens_come_with_their_probability():
    """A hundred thousand even numbers draw each token with its probability to 1e-4."""
    scores = torch.tensor([1.0, -2.0, 0.5, -torch.inf, 2.0])
    even = (torch.arange(100_000) + 0.5) / 100_000
    drawn = inverse_cdf(scores.expand(len(even), -1), even)
    shares = torch.bincount(drawn, minlength=5) / len(even)
    torch.testing.assert_close(shares, scores.softmax(0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-22])
def test_the_impossible_is_never_drawn(number):
    """A token of probability 0 is drawn by neither the smallest number nor the largest.
    Wherever it stands.
    """
    for possible in range(4):
        scores = torch.full((1, 4), -torch.inf).index_fill(1, torch.tensor([possible]), 3.0)
        assert inverse_cdf(scores, torch.tensor([number])).item() == possible


def test_probabilities_are_added_up_in_whole_numbers(monkeypatch):
    """Sums of floats, which a GPU takes in any order, decide nothing: the drawn token follows from whole numbers."""
    added, plain = [], torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda values, dim: (added.append(values.dtype), plain(values, dim))[1])
    inverse_cdf(torch.randn(3, 50), torch.rand(3))
    assert added == [torch.int64]


def test_random_numbers_are_a_completions_own():
    """Numbers follow from seed, prompt number and completion number alone; all differ."""
    together = uniforms(5, [(0, 0), (0, 1), (7, 1)], 6)
    assert torch.equal(together[2], uniforms(5, [(7, 1)], 6)[0])
    assert together.unique().numel() == together.numel()
    assert not torch.equal(together, uniforms(6, [(0, 0), (0, 1), (7, 1)], 6))
    assert 0 <= together.min() <= together.max() < 1


def test_the_processor_leaves_only_the_drawn_token():
    """After the processor greedy decoding takes the drawn token, from the scores after warping."""
    draw = DrawToken(
        [lambda _ids, scores: scores.masked_fill(torch.tensor([False, True, False]), -torch.inf)], torch.tensor([[0.1, 0.9]]), 2
    )
    scores = torch.tensor([[0.0, 9.0, 0.0]])
    picked = [draw(torch.zeros(1, width, dtype=torch.int64), scores) for width in (2, 3, 4)]
    assert [int(p.argmax()) for p in picked] == [0, 2, 2]
    assert all(int((p > -np.inf).sum()) == 1 for p in picked)


@pytest.mark.parametrize("score", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_are_an_error(score):
    """NaN and infinity, of which a draw would make some token; and a row in which nothing is possible."""
    draw = DrawToken([], torch.full((1, 1), 0.5), 1)
    for scores in (torch.tensor([[0.0, score, 1.0]]), torch.full((1, 3), -torch.inf)):
        with pytest.raises(RolloutError, match="are not numbers"):
            draw(torch.zeros(1, 1, dtype=torch.int64), scores)
