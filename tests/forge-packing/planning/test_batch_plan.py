"""BatchPlan: its queries."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_packing import Cost, PackingError, plan
from forge_packing.planning import _steps


@pytest.fixture
def made():
    return plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, world_size=2, shuffle=False, loss_counts=[1, 2, 0, 4, 3])


def test_answers(made):
    """Steps, samples, micro-batches, sums and epochs of a plan small enough to be done by hand."""
    assert (made.num_steps, made.num_samples) == (3, 5)
    assert [made.samples(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [4]]
    of_ranks = [sorted(m.tolist() for rank in (0, 1) for m in made.micro_batches(step, rank)) for step in range(3)]
    assert of_ranks == [[[0], [1]], [[2], [3]], [[], [4]]]
    assert made.tokens.tolist() == [8, 9, 4]
    assert made.loss_tokens.tolist() == [3, 4, 3]
    assert [made.epoch(step) for step in range(3)] == [0, 0, 0]
    assert [made.position(step) for step in range(4)] == [0, 2, 4, 5]
    assert [made.step_at(position) for position in range(6)] == [0, 0, 1, 1, 2, 3]


def test_several_micro_batches():
    """Micro-batches come in the order in which they are run, the costliest first."""
    made = plan([6, 5, 6, 4, 2], batch_size=5, max_tokens=8, shuffle=False)
    tokens = [int(made.lengths[m].sum()) for m in made.micro_batches(0)]
    assert tokens == sorted(tokens, reverse=True)
    assert sum(tokens) == 23


def test_answers_are_copies(made):
    """Whoever changes an answer does not change the plan; the sums cannot be changed at all."""
    made.samples(0)[:] = 9
    before = made.micro_batches(0)[0].tolist()
    made.micro_batches(0)[0][:] = 9
    assert made.samples(0).tolist() == [0, 1]
    assert made.micro_batches(0)[0].tolist() == before
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.tokens[0] = 1


@pytest.mark.parametrize("step", [-1, 3])
def test_step_out_of_range(made, step):
    """No negative or late step: it would silently be another one."""
    for ask in (made.samples, made.micro_batches, made.epoch, made.tokens.__getitem__, made.figures):
        with pytest.raises(IndexError, match=rf"step {step} is out of range: this plan has 3 \(step 0 to 2\)"):
            ask(step)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(made, rank):
    """A rank that the plan was not made for gets nothing."""
    with pytest.raises(IndexError, match=rf"rank {rank} is out of range: this plan has 2"):
        made.micro_batches(0, rank)


def test_loss_tokens_need_loss_counts():
    """Without loss_counts there is no normaliser, and no zero in its place."""
    with pytest.raises(PackingError, match=r"made without loss_counts\. Pass loss_counts to plan"):
        _ = plan([1], batch_size=1, max_tokens=1).loss_tokens


def test_fingerprint_tells_plans_apart():
    """Every parameter and both input arrays are in the fingerprint."""
    base = {
        "lengths": [3, 5, 2, 7, 4],
        "batch_size": 2,
        "max_tokens": 8,
        "world_size": 1,
        "seed": 0,
        "epochs": 2,
        "max_steps": 4,
        "loss_counts": [1] * 5,
        "shuffle": True,
        "drop_last": False,
        "sources": [0, 1, 0, 1, 0],
        "weights": [1, 1],
        "cost": Cost(),
    }
    changes = {
        "lengths": [3, 5, 2, 7, 5],
        "batch_size": 3,
        "max_tokens": 9,
        "world_size": 2,
        "seed": 1,
        "epochs": 3,
        "max_steps": 5,
        "loss_counts": [1, 1, 1, 1, 2],
        "shuffle": False,
        "drop_last": True,
        "sources": [0, 1, 0, 1, 1],
        "weights": [2, 1],
        "cost": Cost(per_micro_batch=1.0),
    }
    assert base.keys() == changes.keys()
    fingerprints = [plan(**{**base, name: value}).fingerprint for name, value in changes.items()]
    fingerprints += [plan(**{**base, name: None}).fingerprint for name in ("loss_counts", "weights")]
    assert len({*fingerprints, plan(**base).fingerprint}) == len(changes) + 3
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)


def test_the_orders_fingerprint_is_that_of_what_decides_the_samples():
    """It changes with the data, the batch size, the seed and the shuffling, and with nothing that leaves `samples(step)`."""
    base = {"lengths": [5, 4, 3, 2, 6], "batch_size": 2, "max_tokens": 10, "loss_counts": [1, 1, 1, 1, 1]}
    first = plan(**base).order_fingerprint
    same = [{"max_tokens": 20}, {"world_size": 2}, {"epochs": 3}, {"max_steps": 1}, {"loss_counts": None}]
    assert all(plan(**{**base, **change}).order_fingerprint == first for change in same)
    other = [{"seed": 1}, {"batch_size": 3}, {"shuffle": False}, {"drop_last": True}, {"lengths": [5, 4, 3, 2, 7]}]
    other.append({"sources": [0, 0, 0, 1, 1], "weights": [1, 1]})
    other.append({"sources": [0, 0, 0, 1, 1], "weights": [1, 2]})
    assert len({first, *(plan(**{**base, **change}).order_fingerprint for change in other)}) == 1 + len(other)


def test_golden_fingerprint():
    """The same plan on every machine and in every version that can read its file."""
    made = plan([3, 5, 2, 7, 4, 8, 1], batch_size=3, max_tokens=9, world_size=2, seed=11, epochs=2, loss_counts=[1] * 7)
    assert made.fingerprint == "8b50b0680ed6300f4ef540a36d5cb10af716dfea69917fbd4238b4d81f3246aa"


def test_sources_without_weights_change_nothing():
    """Without weights a sample comes once an epoch, whatever source it is from."""
    base = {"lengths": [3, 4, 5], "batch_size": 2, "max_tokens": 9}
    assert plan(**base, sources=[0, 1, 1]).fingerprint == plan(**base).fingerprint


def test_frozen(made):
    """A plan cannot be changed in place."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.seed = 3
    with pytest.raises(ValueError, match="read-only"):
        made.lengths[0] = 3


def test_prints_in_one_line(made):
    """Printing a plan shows its parameters, not its arrays."""
    assert repr(made).startswith(
        "BatchPlan(batch_size=2, max_tokens=8, world_size=2, seed=0, epochs=1, max_steps=None, shuffle=False, drop_last=False, "
    )
    assert "array" not in repr(made)


def test_numpy_integers_are_places(made):
    """A step that came out of an array is as good as an int."""
    assert made.samples(np.int32(1)).tolist() == [2, 3]


def test_a_billion_steps_are_there_at_once(monkeypatch):
    """A plan of a billion steps answers for its last step as for its first, and caches only a few blocks of them."""
    monkeypatch.setattr(_steps, "BLOCK", 2**8)
    made = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, epochs=None, max_steps=10**9, loss_counts=[1] * 5)
    assert made.num_steps == 10**9
    assert made.num_samples == 333_333_333 * 5 + 2
    for step in (10**9 - 1, 0, 123_456_789):
        assert made.tokens[step] == made.lengths[made.samples(step)].sum()
        assert made.loss_tokens[step] == made.samples(step).size
        assert sorted(np.concatenate(made.micro_batches(step)).tolist()) == sorted(made.samples(step).tolist())
    for step in range(0, 10**9, 10**8):
        made.micro_batches(step)
    assert len(made._steps._divided) <= 4
    made.check(most_steps=2_000)


def test_an_endless_plan():
    """epochs=None without max_steps has no last step: it is asked by step, and says so where it has no answer."""
    endless = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, epochs=None)
    ends = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, epochs=None, max_steps=40)
    assert (endless.endless, ends.endless) == (True, False)
    assert [endless.samples(step).tolist() for step in range(40)] == [ends.samples(step).tolist() for step in range(40)]
    assert endless.tokens[:40].tolist() == ends.tokens.tolist()
    assert endless.step_at(endless.position(10**15)) == 10**15
    mixed = plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, epochs=None, sources=[0, 1, 1, 0, 1], weights=[0.4, 0.6])
    assert (endless.samples(10**30).size, mixed.samples(10**18).size) in {(1, 2), (2, 2)}
    with pytest.raises(IndexError, match=f"is out of range: draws of weighted sources are counted up to {2**62}"):
        mixed.samples(2**62)
    for ask in (lambda: endless.num_steps, lambda: endless.num_samples, lambda: len(endless.tokens)):
        with pytest.raises(PackingError, match="this plan is endless: epochs=None and no max_steps"):
            ask()
    with pytest.raises(PackingError, match="an endless plan cannot be verified whole"):
        endless.check()
    endless.check(most_steps=100)
    assert "without end" in endless.summary()


def test_reshape_refuses(made):
    """A shape that the samples do not fit is refused as plan() refuses it."""
    with pytest.raises(PackingError, match="sample 3 has 7 tokens, more than max_tokens=6"):
        made.reshape(max_tokens=6)
    with pytest.raises(PackingError, match="batch_size=2 is less than world_size=3"):
        made.reshape(world_size=3)
    with pytest.raises(PackingError, match="world_size must be an integer from 1 to 1048576, got 0"):
        made.reshape(world_size=0)
    assert made.reshape().fingerprint == made.fingerprint


@pytest.mark.parametrize("position", [-1, 6])
def test_position_out_of_range(made, position):
    """No position before the run or beyond it."""
    with pytest.raises(IndexError, match=rf"position {position} is out of range: this plan has 6"):
        made.step_at(position)


def test_travels_between_processes(made):
    """A plan that a loader's worker gets answers as the one that it was sent from."""
    made.micro_batches(0)
    copy = pickle.loads(pickle.dumps(made))
    assert copy.fingerprint == made.fingerprint
    assert [m.tolist() for m in copy.micro_batches(1, 1)] == [m.tolist() for m in made.micro_batches(1, 1)]


def test_threads_may_share_it(monkeypatch):
    """Threads that ask one plan all at once get what one alone gets."""
    monkeypatch.setattr(_steps, "BLOCK", 2**8)
    given = {"lengths": np.arange(1, 8_001) % 97 + 1, "batch_size": 16, "max_tokens": 400, "epochs": 3}
    alone, shared = plan(**given), plan(**given)
    steps = np.random.default_rng(0).integers(0, alone.num_steps, 64).tolist()
    expected = [[m.tolist() for m in alone.micro_batches(step)] for step in steps]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda step: [m.tolist() for m in shared.micro_batches(step)], steps)) == expected


@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any),
    batch_size=st.integers(1, 5),
    budget=st.integers(1, 200),
    weighted=st.booleans(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_steps_to_a_number_of_loss_tokens(counts, batch_size, budget, weighted, drop_last, shuffle):
    """As adding up the steps of an endless plan one by one."""
    drop_last = drop_last and len(counts) >= batch_size and not weighted and all(counts)
    mixed = {"sources": [n % 2 for n in range(len(counts))], "weights": [0.3, 0.7]} if weighted and len(counts) > 1 else {}
    endless = plan(
        [9] * len(counts), batch_size=batch_size, max_tokens=9, epochs=None, loss_counts=counts, seed=budget, shuffle=shuffle,
        drop_last=drop_last, **mixed,
    )  # fmt: skip
    steps, learned = 0, 0
    while learned < budget:
        learned += sum(counts[sample] for sample in endless.samples(steps))
        steps += 1
    assert endless.steps_to(budget) == steps
    assert endless.reshape(world_size=min(2, batch_size)).steps_to(budget) == steps
    ended = endless.until(epochs=None, max_steps=steps)
    assert ended.num_steps == ended.steps_to(10 * budget + 99) == steps
    assert ended.order_fingerprint == endless.order_fingerprint


def test_steps_to_what_is_never_reached():
    """A data set without loss tokens is refused, for no number of steps would do."""
    with pytest.raises(PackingError, match="no step reaches"):
        plan([1, 2], batch_size=1, max_tokens=2, epochs=None, loss_counts=[0, 0]).steps_to(1)
    tail = plan([1, 1, 1], batch_size=2, max_tokens=2, epochs=None, loss_counts=[0, 0, 1], shuffle=False, drop_last=True)
    with pytest.raises(PackingError, match="no step reaches"):
        tail.steps_to(1)
    with pytest.raises(PackingError, match="made without loss_counts"):
        plan([1], batch_size=1, max_tokens=1, epochs=None).steps_to(1)
    with pytest.raises(PackingError, match="at least 1"):
        plan([1], batch_size=1, max_tokens=1, epochs=None, loss_counts=[1]).steps_to(0)
