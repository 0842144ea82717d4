"""check: a plan that breaks a law is refused, and the message says which."""

import numpy as np
import pytest

from forge_packing import PackingError, plan
from forge_packing.planning import _steps, _verify
from forge_packing.planning._verify import verify_division, verify_order

LENGTHS = [3, 5, 2, 7, 4, 1]


@pytest.fixture
def good():
    """Order 0 1 2 3 4 5 | 0 1 2 3 4 5, steps of 4 and 2, micro-batches of at most 9 tokens on 2 ranks."""
    made = plan(LENGTHS, batch_size=4, max_tokens=9, world_size=2, epochs=2, shuffle=False)
    made.check()
    return made


def changed(array, at, value):
    array = np.array(array)
    array[at] = value
    return array


def broken_order(good, **changes):
    verify_order(good._steps, good._steps.ordered(0)._replace(**changes))


def broken_division(good, steps=None, **changes):
    verify_division(steps or good._steps, good._steps.divided(0)._replace(**changes))


def test_the_good_one_passes(good):
    """The helpers of this file find nothing in a plan that is right."""
    broken_order(good)
    broken_division(good)


def test_another_sample_in_a_micro_batch(good):
    """A step's micro-batches hold the step's samples, not another's."""
    members = good._steps.divided(0).members
    with pytest.raises(PackingError, match="hold exactly its samples; step 0 has others"):
        broken_division(good, members=changed(members, 0, members[-1]))


def test_a_sample_twice(good):
    """A sample comes once an epoch."""
    with pytest.raises(PackingError, match="comes once an epoch; sample 0 comes again in epoch 0"):
        broken_order(good, samples=changed(good._steps.ordered(0).samples, 1, 0))


def test_over_budget(good):
    """No micro-batch is over max_tokens, and the step named is the one whose micro-batch is too long."""
    tight = plan([1] * 6, batch_size=4, max_tokens=6, world_size=2, epochs=2, shuffle=False)
    long = plan(LENGTHS, batch_size=4, max_tokens=9, world_size=2, epochs=2, shuffle=False)
    object.__setattr__(long._steps, "max_tokens", tight.max_tokens)
    with pytest.raises(PackingError, match=r"no micro-batch is over max_tokens=6; one of step 0 has [789] tokens"):
        broken_division(good, long._steps)
    made = plan([2, 2, 2, 9], batch_size=1, max_tokens=9, shuffle=False)
    made.micro_batches(0)
    object.__setattr__(made._steps, "max_tokens", 5)
    with pytest.raises(PackingError, match="one of step 3 has 9 tokens"):
        made.check()


def test_unequal_counts(good):
    """All ranks have the same number of micro-batches."""
    starts = good._steps.divided(0).micro_batch_starts
    with pytest.raises(PackingError, match="all ranks have the same number of micro-batches"):
        broken_division(good, micro_batch_starts=np.append(starts, starts[-1]))


def test_micro_batches_shifted_between_steps(good):
    """A micro-batch does not reach over into the next step."""
    block = good._steps.divided(0)
    boundary = int(block.pass_starts[1]) * 2
    with pytest.raises(PackingError, match="hold exactly its samples; they differ in number in step 0"):
        broken_division(good, micro_batch_starts=changed(block.micro_batch_starts, boundary, 5))


def test_order_within_a_micro_batch(good):
    """A micro-batch keeps the order of its step."""
    block = good._steps.divided(0)
    starts = block.micro_batch_starts
    first = next(m for m in range(starts.size - 1) if starts[m + 1] - starts[m] > 1)
    pair = slice(starts[first], starts[first] + 2)
    with pytest.raises(PackingError, match="keeps the order of its step; not so in step 0"):
        broken_division(good, members=changed(block.members, pair, block.members[pair][::-1]))


def test_a_short_step_inside_an_epoch(good):
    """Only an epoch's last step may be short."""
    with pytest.raises(PackingError, match="batch_size samples but the last of an epoch; step 0 has 3, not 4"):
        broken_order(good, step_starts=changed(good._steps.ordered(0).step_starts, 1, 3))


@pytest.mark.parametrize("value", [-1, 6])
def test_foreign_index(good, value):
    """Every index is one of the data's."""
    with pytest.raises(PackingError, match="every index is one of the data's; the order holds"):
        broken_order(good, samples=changed(good._steps.ordered(0).samples, 0, value))


def test_an_epoch_that_leaves_a_sample_out(monkeypatch):
    """An epoch of several blocks has every sample once: a sample of one block in another is found."""
    monkeypatch.setattr(_steps, "BLOCK", 2)
    made = plan([1] * 9, batch_size=1, max_tokens=3)
    made.check()
    drawn = type(made._steps.order).drawn
    monkeypatch.setattr(type(made._steps.order), "drawn", lambda order, start, stop: np.minimum(drawn(order, start, stop), 7))
    fresh = plan([1] * 9, batch_size=1, max_tokens=3)
    with pytest.raises(PackingError, match="an epoch holds every sample once; epoch 0 has 8 of 9"):
        fresh.check()


def test_a_share_that_is_not_kept(monkeypatch):
    """Sources that do not have their shares are named, with what they have."""
    made = plan([1] * 20, batch_size=20, max_tokens=3, sources=[0] * 10 + [1] * 10, weights=[1, 1])
    made.check()
    with pytest.raises(PackingError, match="keeps its share to within 2; source 0 has 20 of 20, not 1/2"):
        broken_order(made, samples=np.arange(20) % 10)


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        (broken_order, {"step_starts": np.array([0, 9, 4, 10, 12])}, "offsets rise"),
        (broken_order, {"step_starts": np.array([0, 4, 6, 10, 11])}, "offsets rise"),
        (broken_order, {"step_starts": np.array([], dtype=np.int64)}, "offsets rise"),
        (broken_division, {"micro_batch_starts": np.array([0, 3, 2, 12])}, "offsets rise"),
        (broken_division, {"pass_starts": np.array([0, 0, 1, 2, 3])}, "every step has a micro-batch"),
        (broken_division, {"pass_starts": np.array([0, 1, 2])}, "every step has a micro-batch"),
    ],
)
def test_arrays_that_do_not_fit_together(good, check, change, message):
    """Offsets that no plan can have are named, and do not crash the check."""
    with pytest.raises(PackingError, match=message):
        check(good, **change)


def test_check_looks_at_every_block(monkeypatch):
    """check() visits all blocks, check(most_steps) the first, the last and some between."""
    monkeypatch.setattr(_steps, "BLOCK", 4)
    made = plan([1] * 100, batch_size=1, max_tokens=3)
    seen = []
    monkeypatch.setattr(_verify, "verify_division", lambda _plan, block: seen.append(block.ordered.first))
    made.check()
    assert seen == list(range(0, 100, 4))
    seen.clear()
    made.check(most_steps=20)
    assert seen == [0, 24, 48, 72, 96]
    with pytest.raises(PackingError, match="most_steps must be at least 1, got 0"):
        made.check(most_steps=0)
