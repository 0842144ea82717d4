"""divide and plan where samples begin alike: a prefix takes room once in each micro-batch."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import BatchPlan, Cost, PackingError, divide, plan
from forge_packing.dividing import _compile
from forge_packing.dividing._divide import divide_steps
from forge_packing.dividing._prefixes import Prefixes

from ..naive import COSTS


@st.composite
def shared_steps(draw, most_samples=40, most_ranks=6):
    """One step: lengths, prefixes, prefix_tokens, max_tokens, world_size."""
    max_tokens = draw(st.integers(2, 120))
    tokens = draw(st.lists(st.integers(1, max_tokens - 1), min_size=1, max_size=4))
    of = draw(st.lists(st.integers(-1, len(tokens) - 1), min_size=1, max_size=most_samples))
    least = [1 if each < 0 else tokens[each] + 1 for each in of]
    lengths = [draw(st.integers(each, max_tokens)) for each in least]
    return lengths, of, tokens, max_tokens, draw(st.integers(1, most_ranks))


def size(micro_batch, lengths, of, tokens):
    """Tokens of a micro-batch, one sample after another."""
    seen, total = set(), 0
    for at in micro_batch:
        own = 0 if of[at] < 0 else tokens[of[at]]
        total += lengths[at] - own + (own if of[at] not in seen else 0)
        seen |= {of[at]} if of[at] >= 0 else set()
    return total


def cost_of(micro_batch, lengths, of, tokens, cost):
    """Cost of a micro-batch, one sample after another."""
    seen, total = set(), 0.0
    for at in micro_batch:
        total += cost.of(lengths[at])
        if of[at] in seen:
            total -= cost.of(tokens[of[at]])
        seen |= {of[at]} if of[at] >= 0 else set()
    return total


def makespan(ranks, *about, cost):
    return sum(max(cost_of(each, *about, cost) for each in row) + cost.per_micro_batch for row in zip(*ranks, strict=True))


@settings(deadline=None, max_examples=1000)
@given(shared_steps(), COSTS)
def test_laws_of_a_division(step, cost):
    """Exact partition, budget with prefixes once and eight budgets with repetitions, equal counts; never later than without."""
    lengths, of, tokens, max_tokens, world_size = step
    about = {"max_tokens": max_tokens, "world_size": world_size, "cost": cost}
    ranks = divide(lengths, prefixes=of, prefix_tokens=tokens, **about)
    assert len({len(rank) for rank in ranks}) == 1
    everything = [micro_batch for rank in ranks for micro_batch in rank]
    assert sorted(np.concatenate(everything).tolist()) == list(range(len(lengths)))
    for micro_batch in everything:
        assert (np.diff(micro_batch) > 0).all()
        assert size(micro_batch, lengths, of, tokens) <= max_tokens
        assert np.asarray(lengths)[micro_batch].sum() <= 8 * max_tokens
    taken = makespan(ranks, lengths, of, tokens, cost=cost)
    assert taken <= makespan(divide(lengths, **about), lengths, of, tokens, cost=cost) * (1 + 1e-9)


@settings(deadline=None, max_examples=300)
@given(st.lists(shared_steps(most_samples=10), min_size=1, max_size=4), st.integers(1, 4), COSTS)
def test_many_steps_at_once(given_steps, world_size, cost):
    """Steps that are divided together are divided as each would be alone, and as compiled code divides them."""
    max_tokens = max(step[3] for step in given_steps)
    lengths = [np.array(step[0]) for step in given_steps]
    firsts = np.cumsum([0, *(len(step[2]) for step in given_steps)])
    of = [
        np.where(np.array(step[1]) < 0, -1, np.array(step[1]) + first) for step, first in zip(given_steps, firsts, strict=False)
    ]
    tokens = np.concatenate([step[2] for step in given_steps])
    starts = np.cumsum([0, *map(len, lengths)])
    order, ends, passes = divide_steps(
        np.concatenate(lengths), starts, max_tokens, world_size, cost, Prefixes(np.concatenate(of), tokens)
    )
    for number, (own, own_of) in enumerate(zip(lengths, of, strict=True)):
        alone = divide(own, max_tokens=max_tokens, world_size=world_size, cost=cost, prefixes=own_of, prefix_tokens=tokens)
        for rank in range(world_size):
            at = range(passes[number] * world_size + rank, passes[number + 1] * world_size, world_size)
            found = [(order[ends[m] : ends[m + 1]] - starts[number]).tolist() for m in at]
            assert found == [micro_batch.tolist() for micro_batch in alone[rank]]


def data(count=4000):
    """Lengths of samples, half of them behind one of three prefixes."""
    random = np.random.default_rng(0)
    of, tokens = random.integers(-3, 3, count).clip(-1), np.array([600, 40, 1500])
    return random.integers(10, 500, count) + np.append(tokens, 0)[of], of, tokens


def test_few_micro_batches():
    """What three long prefixes spare is a third of the micro-batches and most of the work, on one rank and on four."""
    lengths, of, tokens = data()
    for world_size in (1, 4):
        about = {"batch_size": 128, "max_tokens": 4096, "world_size": world_size, "prefixes": of, "prefix_tokens": tokens}
        shared = plan(lengths, **about)
        shared.check()
        alone = shared.alone()
        assert alone.fingerprint == plan(lengths, **{**about, "prefixes": None, "prefix_tokens": None}).fingerprint
        count = [sum(each.figures(step).micro_batches for step in range(10)) for each in (shared, alone)]
        assert count[0] < 0.7 * count[1]
        works = [
            sum(shared.cost_of(m) for step in range(10) for rank in range(world_size) for m in each.micro_batches(step, rank))
            for each in (shared, alone)
        ]
        assert works[0] < 0.7 * works[1]


@pytest.mark.slow
def test_compiled_code_divides_alike(monkeypatch):
    """Both ways of running the kernels."""
    lengths, of, tokens = data()
    found = []
    for least in (2**40, 0):
        monkeypatch.setattr(_compile, "COMPILE_FROM", least)
        made = plan(lengths, batch_size=100, max_tokens=3000, world_size=2, prefixes=of, prefix_tokens=tokens)
        found.append([m.tolist() for step in range(40) for rank in (0, 1) for m in made.micro_batches(step, rank)])
    assert found[0] == found[1]


def test_what_samples_have_twice(tmp_path):
    """It takes room once, beside a prefix or without; steps, their tokens and the order stay, and keys are limited."""
    lengths, of, tokens = data(500)
    twice = (lengths - np.append(tokens, 0)[of]) // 3
    shape = {"batch_size": 32, "max_tokens": 4096, "world_size": 2}
    prefixes = {"prefixes": of, "prefix_tokens": tokens}
    plain = plan(lengths, **shape)
    for more in ({}, prefixes):
        made = plan(lengths, **shape, **more, repeated=twice)
        made.check()
        assert made.order_fingerprint == plain.order_fingerprint
        assert made.fingerprint != plan(lengths, **shape, **more).fingerprint
        assert made.alone().fingerprint == plain.fingerprint
        assert made.alone(repeat=False).fingerprint == plan(lengths, **shape, repeated=twice).fingerprint
        assert np.array_equal(np.asarray(made.tokens), np.asarray(plain.tokens))
        less = plan(lengths - twice, **shape, **more)
        for step in range(made.num_steps):
            assert made.figures(step).tokens == plain.figures(step).tokens
            for rank in (0, 1):
                found = made.micro_batches(step, rank)
                assert [made.places(each) for each in found] == [less.places(each) for each in found]
                assert max(int(lengths[each].sum()) for each in found) <= 8 * 4096
                if not more:
                    assert [each.tolist() for each in found] == [each.tolist() for each in less.micro_batches(step, rank)]
        made.save(tmp_path / "plan.npz")
        assert BatchPlan.load(tmp_path / "plan.npz").fingerprint == made.fingerprint
    many = {"prefixes": [0] * 64, "prefix_tokens": [49], "repeated": [40] * 64}
    assert max(len(each) for each in plan([90] * 64, batch_size=64, max_tokens=100, **many).micro_batches(0)) == 8
    assert max(len(each) for each in divide([90] * 64, max_tokens=100, **many)[0]) == 8


@settings(deadline=None, max_examples=200)
@given(shared_steps(), COSTS)
def test_figures(step, cost):
    """Fill and makespan are those of the micro-batches, one sample after another; bounds are below them."""
    lengths, of, tokens, max_tokens, world_size = step
    batch_size = max(len(lengths), world_size)
    made = plan(
        lengths,
        batch_size=batch_size,
        max_tokens=max_tokens,
        world_size=world_size,
        cost=cost,
        prefixes=of,
        prefix_tokens=tokens,
    )
    found, ranks = made.figures(0), [made.micro_batches(0, rank) for rank in range(world_size)]
    sizes = [[size(each, lengths, of, tokens) for each in rank] for rank in ranks]
    assert [[made.places(each) for each in rank] for rank in ranks] == sizes
    assert found.fill == pytest.approx(np.sum(sizes) / (len(ranks[0]) * world_size * max_tokens))
    assert found.makespan == pytest.approx(makespan(ranks, lengths, of, tokens, cost=cost), rel=1e-9, abs=1e-12)
    assert found.tokens == sum(lengths)
    assert found.fewest_micro_batches <= found.micro_batches
    assert found.least_makespan <= found.makespan * (1 + 1e-9)
    assert found.imbalance >= 1 - 1e-9


def test_a_file_and_its_order(tmp_path):
    """A saved plan comes back; the steps' samples are those without prefixes, and so is their fingerprint."""
    lengths, of, tokens = data(500)
    made = plan(lengths, batch_size=32, max_tokens=4096, prefixes=of, prefix_tokens=tokens)
    made.save(tmp_path / "plan.npz")
    loaded = BatchPlan.load(tmp_path / "plan.npz")
    assert loaded.fingerprint == made.fingerprint != made.alone().fingerprint
    assert made.order_fingerprint == made.alone().order_fingerprint
    assert made.alone().alone() is not None
    for step in range(made.num_steps):
        assert made.samples(step).tolist() == made.alone().samples(step).tolist()
    assert "fill" in made.summary()
    made.reshape(world_size=3, max_tokens=2048).check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefixes": [0, 0]}, "prefixes and prefix_tokens are given together"),
        ({"prefix_tokens": [1]}, "prefixes and prefix_tokens are given together"),
        ({"prefixes": [0], "prefix_tokens": [1]}, "one entry a sample: got 1 for 2 lengths"),
        ({"prefixes": [0, 0], "prefix_tokens": [0]}, "prefix_tokens must be at least 1, found 0 at index 0"),
        (
            {"prefixes": [0, 1], "prefix_tokens": [1]},
            "numbers below 1, one of each of prefix_tokens, or -1 for none, found 1 at",
        ),
        ({"prefixes": [-2, 0], "prefix_tokens": [1]}, "found -2 at index 0"),
        ({"prefixes": [-1, 0], "prefix_tokens": [5]}, "sample 1 has 5 tokens and a prefix of 5: it must have one more"),
        ({"prefixes": [0.5, 0], "prefix_tokens": [5]}, "prefixes must be integers"),
        ({"prefixes": [0, 0], "prefix_tokens": [1], "widths": [4, 5]}, "widths and prefixes are both given"),
    ],
)
def test_refused(arguments, message):
    """What cannot be meant is refused, by `plan` as by `divide`."""
    with pytest.raises(PackingError, match=message):
        divide([4, 5], max_tokens=8, **arguments)
    with pytest.raises(PackingError, match=message):
        plan([4, 5], batch_size=2, max_tokens=8, cost=Cost(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repeated": [1]}, "repeated must have one entry a sample: got 1 for 2 lengths"),
        ({"repeated": [-1, 0]}, "sample 0 has 4 tokens, of which it cannot have -1 twice"),
        ({"repeated": [2, 0]}, "sample 0 has 4 tokens, of which it cannot have 2 twice"),
        ({"repeated": [1, 1], "widths": [4, 5]}, "widths and repeated are both given"),
        (
            {"repeated": [1, 1], "prefixes": [0, 0], "prefix_tokens": [3]},
            "sample 0 has 4 tokens, 1 of them twice, and a prefix of 3",
        ),
    ],
)
def test_refused_of_what_samples_have_twice(arguments, message):
    """As many tokens as the sample has twice at most, of which a prefix leaves one."""
    with pytest.raises(PackingError, match=message):
        plan([4, 5], batch_size=2, max_tokens=8, **arguments)
    with pytest.raises(PackingError, match=message):
        divide([4, 5], max_tokens=8, **arguments)
