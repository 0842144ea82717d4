"""summary: a few lines whose numbers can be checked by hand."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_packing import Cost, plan
from forge_packing.dividing import _compile
from forge_packing.ordering._mixture import drawn, draws, whole_shares
from forge_packing.planning import _summary


def test_one_rank():
    """Items by their name, steps, epochs, tokens, micro-batches beside their bound, fill."""
    made = plan([6, 6, 6, 2], batch_size=3, max_tokens=10, shuffle=False, loss_counts=[5, 5, 0, 0], epochs=2)
    assert made.summary().splitlines() == [
        "samples        8 (4 in the data), in the order of the data",
        "steps          4 of at most 3 samples, 2 epochs",
        "tokens         40, a step 2 to 18",
        "loss tokens    20, a step 0 to 10; steps with none: 2",
        "micro-batches  8 on 1 rank, at most 3 a step; the fewest possible",
        "fill           50.0% of the 10 tokens that a micro-batch may have",
    ]


def test_what_is_planned_has_its_name():
    """A plan of blocks says blocks."""
    lines = plan([6, 6], batch_size=2, max_tokens=10).summary("blocks").splitlines()
    assert lines[0] == "blocks         2 (2 in the data), shuffled by seed 0"
    assert lines[1] == "steps          1 of at most 2 blocks, 1 epoch"


@pytest.mark.parametrize(
    ("max_steps", "said"),
    [
        (1, "0.14 of an epoch"),
        (6, "0.86 of an epoch"),
        (7, "1 epoch"),
        (8, "1.14 epochs"),
        (14, "2 epochs"),
        (9000, "1,285.71 epochs"),
    ],
)
def test_a_part_of_an_epoch_is_said_as_such(max_steps, said):
    """Of 14 samples, two a step: the steps over those of an epoch."""
    made = plan([1] * 14, batch_size=2, max_tokens=10, epochs=None, max_steps=max_steps)
    assert made.summary().splitlines()[1].endswith(f"of at most 2 samples, {said}")


@pytest.mark.parametrize(("steps", "words"), [(1999, "0.99 of an epoch"), (2001, "1 epoch and 1 step"), (3999, "1.99 epochs")])
def test_a_share_is_not_rounded_to_a_whole_epoch(steps, words):
    """Of 2,000 steps an epoch: `1 of an epoch` and `1 epochs` were said."""
    made = plan([10] * 4000, batch_size=2, max_tokens=64, epochs=None, max_steps=steps)
    assert made.summary(divided=False).splitlines()[1].endswith(f"of at most 2 samples, {words}")


def test_steps_that_are_divided_otherwise():
    """Without ranks and micro-batches, all other lines are the same."""
    made = plan([6, 6, 6, 2], batch_size=3, max_tokens=10, world_size=2, loss_counts=[5, 5, 0, 0], epochs=2)
    lines = made.summary().splitlines()
    assert made.summary(divided=False).splitlines() == lines[:4]
    assert [line.split()[0] for line in lines[4:]] == ["micro-batches", "fill", "waiting"]


def test_several_ranks():
    """Bounds are of one rank, rounded up where the ranks are; empty micro-batches count as room not filled, and as waiting."""
    made = plan([6, 6, 6], batch_size=3, max_tokens=10, world_size=2, seed=4, cost=Cost(1.0, 0.0))
    assert made.summary().splitlines() == [
        "samples        3 (3 in the data), shuffled by seed 4",
        "steps          1 of at most 3 samples, 1 epoch",
        "tokens         18, a step 18",
        "micro-batches  2 on each of 2 ranks, at most 2 a step; the fewest possible",
        "fill           45.0% of the 10 tokens that a micro-batch may have",
        "waiting        25.0% of the time, for the slowest rank; another division takes at most 0.0% less time",
    ]


def test_mixtures_show_their_shares():
    """The sources' shares are beside their number, and how often each is drawn; of many, the first eight."""
    made = plan([1, 1, 1], batch_size=3, max_tokens=10, sources=[0, 1, 1], weights=[3, 1], epochs=4)
    assert made.summary().splitlines()[2:4] == ["sources        2, with shares 0.75, 0.25", "drawn          9, 3 samples"]
    many = plan([1] * 10, batch_size=3, max_tokens=10, sources=list(range(10)), weights=[1] * 10)
    assert many.summary().splitlines()[2].endswith("0.1, 0.1 and 2 more")


def test_a_source_that_is_never_drawn_is_named():
    """A share may be too small for a run of few samples: its rows are not lost without a word."""
    made = plan([1] * 3, batch_size=3, max_tokens=10, sources=[0, 1, 2], weights=[1000, 1, 999])
    assert "drawn          2, 0, 1 samples" in made.summary().splitlines()
    assert "never drawn    source 2: too small a share of so few samples" in made.summary().splitlines()
    endless = plan([1] * 3, batch_size=3, max_tokens=10, sources=[0, 1, 2], weights=[1000, 1, 999], epochs=None)
    assert "drawn" not in endless.summary()


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), stop=st.integers(0, 200))
def test_draws_are_counted(weights, stop):
    """The number of each source's draws is that of the draws themselves."""
    shares = whole_shares(weights)
    source, _ = draws(shares, 0, stop)
    assert drawn(shares, stop).tolist() == np.bincount(source, minlength=len(weights)).tolist()


def test_shared_prefixes():
    """That prefixes take room once is said, and what is planned without; steps that are divided otherwise share none."""
    made = plan([22, 22, 22, 3], batch_size=4, max_tokens=30, shuffle=False, prefixes=[0, 0, 0, -1], prefix_tokens=[20])
    lines = made.summary().splitlines()
    assert lines[2:4] == [
        "tokens         69, a step 69",
        "shared tokens  computed once a micro-batch: 29 tokens in place of 69; 3 micro-batches without that",
    ]
    assert lines[4].startswith("micro-batches  1 on 1 rank")
    lone = plan([22, 3], batch_size=1, max_tokens=30, prefixes=[0, -1], prefix_tokens=[20])  # no two in one micro-batch
    for other in (made.summary(divided=False), made.alone().summary(), lone.summary()):
        assert "shared" not in other


def test_one_micro_batch_is_in_the_singular():
    """Where one holds all even without sharing; queries that are one a step."""
    made = plan([22, 22], batch_size=2, max_tokens=50, shuffle=False, prefixes=[0, 0], prefix_tokens=[20])
    assert made.summary().splitlines()[3].endswith("; 1 micro-batch without that")
    assert (
        plan([6], batch_size=1, max_tokens=10)
        .summary("queries")
        .splitlines()[1]
        .startswith("steps          1 of at most 1 query,")
    )


def test_a_long_run_is_measured_in_part(monkeypatch):
    """The summary of a long run names the steps that were measured; what is known of all steps is given for all."""
    monkeypatch.setattr(_summary, "MEASURED_SAMPLES", 57)
    made = plan([1] * 100, batch_size=1, max_tokens=1, max_steps=10**9, epochs=None)
    assert made.summary().splitlines() == [
        "samples        1,000,000,000 (100 in the data), shuffled by seed 0",
        "steps          1,000,000,000 of at most 1 sample, 10,000,000 epochs",
        "measured       56 steps, in 8 stretches from the first to the last:",
        "tokens         56, a step 1",
        "micro-batches  56 on 1 rank, at most 1 a step; the fewest possible",
        "fill           100.0% of the 1 token that a micro-batch may have",
    ]
    endless = plan([1] * 100, batch_size=1, max_tokens=1, epochs=None).summary().splitlines()
    assert endless[:3] == [
        "samples        100 in the data, shuffled by seed 0",
        "steps          without end, of at most 1 sample",
        "measured       the first 57 steps:",
    ]


@pytest.mark.parametrize(("batch_size", "epochs"), [(1, 1), (2, None), (64, 3), (200_000, 1)])
def test_it_measures_little(monkeypatch, batch_size, epochs):
    """However long the run and short its steps, few samples are divided, few bounds computed, and nothing is compiled."""
    divided, bounded = [], []
    monkeypatch.setattr(_compile, "compiled", lambda name: pytest.fail(f"{name} was compiled"))
    monkeypatch.setattr(_compile, "_seen", dict.fromkeys(_compile._seen, 0))
    whole = _summary.block_figures
    monkeypatch.setattr(_summary, "block_figures", lambda *given: _note(whole(*given), divided, bounded))
    plan([5] * 30_000, batch_size=batch_size, max_tokens=5 * batch_size, epochs=epochs).summary()
    assert sum(divided) <= 30_000
    assert sum(bounded) <= 1024


def _note(found, divided, bounded):
    divided.append(found.samples.sum())
    bounded.append(found.samples.size)
    return found


def test_stretches_reach_from_the_first_step_to_the_last():
    """Every run's first and last step is measured, and no step twice."""
    for total in (1, 7, 8, 9, 56, 57, 58, 1000, 10**9):
        made = plan([1] * 10, batch_size=1, max_tokens=1, epochs=None, max_steps=total)
        for most in (2, 7, 8, 57):
            steps = [step for first, stop in made._steps.sampled_stretches(most, 8) for step in range(first, stop)]
            assert len(set(steps)) == len(steps) <= most
            assert (steps[0], steps[-1]) == (0, total - 1)


def test_a_division_above_its_bound():
    """Where more micro-batches were made than the lower bound, which none reaches here, the bound is named."""
    made = plan([4, 10, 4, 3, 1, 4, 4], batch_size=7, max_tokens=10)
    assert "micro-batches  4 on 1 rank, at most 4 a step; at least 3 are needed" in made.summary().splitlines()
