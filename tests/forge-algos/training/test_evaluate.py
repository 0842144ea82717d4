"""An evaluation is one mean over all learned tokens."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from forge_algos import SFT, NoTargetsError, evaluate

from ..oracle import make, naive, pack, samples

MODEL = make()
EXAMPLES = samples((5, 9, 2, 7, 13), seed=3)


@settings(max_examples=15)
@given(cut=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_the_cut_changes_nothing(cut):
    """Any cut into batches, empty ones among them, has the mean of one sample at a time."""
    batches = [pack([e for e, c in zip(EXAMPLES, cut, strict=True) if c == k]) for k in range(4)]
    found = evaluate(MODEL, batches, objective=SFT())
    with torch.no_grad():
        total, count = naive(MODEL, EXAMPLES)
    assert found.loss_count == count
    assert abs(found.loss / (total.item() / count) - 1) < 1e-6


def test_it_leaves_no_trace():
    """No dropout, no gradients; modes and random state are as before."""
    model = make()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    state = torch.get_rng_state()
    first, second = (evaluate(model, iter([pack(EXAMPLES)]), objective=SFT()) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("batches", [[], [pack([])], [pack(samples([4], learned=0.0))]])
def test_nothing_to_evaluate_is_an_error(batches):
    """An evaluation without terms is an error, not NaN."""
    with pytest.raises(NoTargetsError, match="no learned token"):
        evaluate(MODEL, batches, objective=SFT())
