"""mini-trainer's packer beside ours: in no trial fewer micro-batches, in no family of lengths a smaller makespan."""

from __future__ import annotations

import numpy as np
import pytest

import forge_packing
from forge_packing.dividing.kernels._spread import greedy

from .packing_lengths import lengths as families

pytest.importorskip("numba", reason="numba is not installed here: `hatch run peers:test`")
PACK = families.mini_trainer()
pytestmark = pytest.mark.skipif(PACK is None, reason="mini-trainer is not installed here: `hatch run peers:test`")
TRIALS = 1000
COST = forge_packing.Cost()


@pytest.mark.parametrize("family", families.FAMILIES)
def test_never_more_micro_batches_and_less_waiting(family):
    """None of 1,000 steps has more micro-batches than mini-trainer's, all together take no longer; both divide exactly."""
    counts = {"ours": 0, "theirs": 0}
    taken = {"ours": 0.0, "theirs": 0.0}
    for step in families.trials(family, TRIALS):
        ours = forge_packing.divide(step.lengths, max_tokens=step.max_tokens, world_size=8)
        theirs = families.mini_trainers_division(PACK, step, 8)
        assert len(ours[0]) <= len(theirs[0])
        costs = COST.of(step.lengths)
        for side, division in (("ours", ours), ("theirs", theirs)):
            everything = [micro_batch for rank in division for micro_batch in rank]
            assert sorted(np.concatenate(everything).tolist()) == list(range(step.lengths.size))
            assert max(step.lengths[m].sum() for m in everything) <= step.max_tokens
            counts[side] += len(division[0])
            taken[side] += families.makespan(division, costs)
    assert taken["ours"] <= taken["theirs"] * (1 + 1e-12)
    # With one giant and little else both are at the bound in most steps; everywhere else ours are fewer.
    assert counts["ours"] < counts["theirs"] or family == "a giant"


def test_51_and_49_percent():
    """The case that made mini-trainer's twelve of eight: sixteen samples a rank, half of 51 % of the budget, half of 49 %."""
    step = families.FAMILIES["51 and 49 percent"](np.random.Generator(np.random.Philox(0)))
    assert len(families.mini_trainers_division(PACK, step, 8)[0]) == 12
    assert len(forge_packing.divide(step.lengths, max_tokens=step.max_tokens, world_size=8)[0]) == 8


@pytest.mark.parametrize("family", families.FAMILIES)
def test_our_greedy_is_their_packer(family):
    """The kernel that stands for mini-trainer among the candidates makes its loads, pass for pass."""
    for step in families.trials(family, 50):
        ordered = np.sort(step.lengths)[::-1]
        bin_of = [0] * ordered.size
        passes = greedy(ordered.tolist(), 8, step.max_tokens, bin_of)
        ours = np.bincount(bin_of, weights=ordered, minlength=passes * 8).reshape(-1, 8)
        theirs = families.mini_trainers_division(PACK, step, 8)
        loads = np.array([[step.lengths[m].sum() for m in row] for row in zip(*theirs, strict=True)])
        assert np.sort(ours, axis=1).tolist() == np.sort(loads, axis=1).tolist()
