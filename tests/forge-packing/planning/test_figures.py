"""figures: what a step's division comes to, by hand and by a naive count."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import Cost, plan


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=40),
    world_size=st.integers(1, 4),
    overhead=st.sampled_from([0.0, 2.5]),
    counted=st.booleans(),
)
def test_figures_are_those_of_the_micro_batches(lengths, world_size, overhead, counted):
    """Every figure follows from the micro-batches that the plan hands out, and none beats its bound."""
    cost = Cost(per_token_squared=0.02, per_micro_batch=overhead)
    counts = [length - 1 for length in lengths] if counted else None
    made = plan(lengths, batch_size=4, max_tokens=30, world_size=world_size, cost=cost, loss_counts=counts)
    for step in range(made.num_steps):
        found = made.figures(step)
        rows = [made.micro_batches(step, rank) for rank in range(world_size)]
        costs = np.array([[cost.of(made.lengths[m]).sum() for m in row] for row in rows])
        assert (found.step, found.samples, found.micro_batches) == (step, made.samples(step).size, len(rows[0]))
        assert found.tokens == made.tokens[step]
        assert found.loss_tokens == (made.loss_tokens[step] if counted else None)
        assert found.makespan == pytest.approx((costs.max(axis=0) + overhead).sum())
        assert found.imbalance == pytest.approx(found.makespan / (costs.mean(axis=0) + overhead).sum())
        assert found.fill == pytest.approx(found.tokens / (costs.size * 30))
        assert found.fewest_micro_batches <= found.micro_batches
        assert found.least_makespan <= found.makespan * (1 + 1e-12)


def test_by_hand():
    """Two samples of 6 and one of 4 on two ranks: one micro-batch each would be over the budget."""
    found = plan([6, 6, 4], batch_size=3, max_tokens=9, world_size=2, shuffle=False, cost=Cost(1.0, 0.0, 1.0)).figures(0)
    assert found._asdict() == {
        "step": 0,
        "samples": 3,
        "tokens": 16,
        "loss_tokens": None,
        "micro_batches": 2,
        "fewest_micro_batches": 2,
        "fill": pytest.approx(16 / 36),
        "makespan": pytest.approx(6 + 4 + 2),
        "least_makespan": pytest.approx(6 + 4 + 2),  # of three samples one rank has two
        "imbalance": pytest.approx(12 / 10),
    }
