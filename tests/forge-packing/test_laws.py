"""check: a plan that breaks a law is refused, and the message says which."""

import attrs
import numpy as np
import pytest

from forge_packing import PackingError, plan

LENGTHS = [3, 5, 2, 7, 4, 1]


@pytest.fixture
def good():
    """order 0 1 2 3 4 5 | 0 1 2 3 4 5, steps of 4 and 2, micro-batches of at most 8 tokens on 2 ranks."""
    made = plan(LENGTHS, batch_size=4, max_tokens=9, world_size=2, epochs=2, shuffle=False)
    made.check()
    return made


def changed(array, at, value):
    array = np.array(array)
    array[at] = value
    return array


def test_another_sample_in_a_micro_batch(good):
    """A step's micro-batches hold the step's samples, not another's."""
    wrong = attrs.evolve(good, members=changed(good._members, 0, good._members[-1]))
    with pytest.raises(PackingError, match="hold exactly its samples; step 0 has others"):
        wrong.check()


def test_a_sample_twice(good):
    """A sample comes once an epoch."""
    wrong = attrs.evolve(good, order=changed(good._order, 1, 0))
    with pytest.raises(PackingError, match="comes once an epoch; sample 0 comes again in epoch 0"):
        wrong.check()


def test_over_budget(good):
    """No micro-batch is over max_tokens."""
    wrong = attrs.evolve(good, max_tokens=6)
    with pytest.raises(PackingError, match=r"no micro-batch is over max_tokens=6; one of step 0 has [789] tokens"):
        wrong.check()


def test_over_budget_names_the_step():
    """The step named is the one whose micro-batch is too long."""
    made = plan([2, 2, 2, 9], batch_size=1, max_tokens=9, world_size=1, shuffle=False)
    with pytest.raises(PackingError, match="one of step 3 has 9 tokens"):
        attrs.evolve(made, max_tokens=5).check()


def test_unequal_counts(good):
    """All ranks have the same number of micro-batches."""
    wrong = attrs.evolve(good, micro_batch_starts=np.append(good._micro_batch_starts, good._members.size))
    with pytest.raises(PackingError, match="all ranks have the same number of micro-batches"):
        wrong.check()


def test_micro_batches_shifted_between_steps(good):
    """A micro-batch does not reach over into the next step."""
    boundary = int(good._pass_starts[1]) * 2
    wrong = attrs.evolve(good, micro_batch_starts=changed(good._micro_batch_starts, boundary, 5))
    with pytest.raises(PackingError, match="hold exactly its samples; they differ in number in step 0"):
        wrong.check()


def test_order_within_a_micro_batch(good):
    """A micro-batch keeps the order of its step."""
    starts = good._micro_batch_starts
    first = next(m for m in range(starts.size - 1) if starts[m + 1] - starts[m] > 1)
    pair = good._members[starts[first] : starts[first] + 2][::-1]
    wrong = attrs.evolve(good, members=changed(good._members, slice(starts[first], starts[first] + 2), pair))
    with pytest.raises(PackingError, match="keeps the order of its step; not so in step 0"):
        wrong.check()


def test_a_short_step_inside_an_epoch(good):
    """Only an epoch's last step may be short."""
    wrong = attrs.evolve(good, step_starts=changed(good._step_starts, 1, 3))
    with pytest.raises(PackingError, match="batch_size samples but the last of an epoch; step 0 has 3"):
        wrong.check()


def test_an_epoch_cut_short(good):
    """An epoch holds every sample, unless max_steps cuts it or drop_last leaves the rest out."""
    six = plan(LENGTHS, batch_size=4, max_tokens=9, world_size=2, epochs=2, shuffle=False, drop_last=True)
    six.check()
    with pytest.raises(PackingError, match="an epoch holds every sample; epoch 0 has 4 of 6"):
        attrs.evolve(six, drop_last=False).check()
    cut = plan(LENGTHS, batch_size=4, max_tokens=9, epochs=None, max_steps=3, shuffle=False)
    cut.check()
    with pytest.raises(PackingError, match="an epoch holds every sample; epoch 1 has 4 of 6"):
        attrs.evolve(cut, max_steps=None, epochs=2).check()


def test_number_of_epochs(good):
    """The run has as many epochs as were asked for."""
    with pytest.raises(PackingError, match="as many epochs as asked for; found 2 of 3"):
        attrs.evolve(good, epochs=3).check()


def test_epochs_out_of_order(good):
    """Epochs count up from 0 without a gap."""
    with pytest.raises(PackingError, match="epochs follow each other"):
        attrs.evolve(good, step_epochs=[0, 0, 2, 2]).check()


@pytest.mark.parametrize("name", ["order", "members"])
@pytest.mark.parametrize("value", [-1, 6])
def test_foreign_index(good, name, value):
    """Every index is one of the data's."""
    wrong = attrs.evolve(good, **{name: changed(getattr(good, f"_{name}"), 0, value)})
    with pytest.raises(PackingError, match=f"every index is one of the data's; {name} holds"):
        wrong.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_starts": [0, 9, 4, 10, 12]}, "offsets rise"),
        ({"step_starts": [0, 4, 6, 10, 11]}, "offsets rise"),
        ({"step_starts": []}, "offsets rise"),
        ({"step_epochs": [0, 0, 1]}, "every step has offsets and an epoch"),
        ({"pass_starts": [0, 0, 1, 2, 3]}, "every step has a micro-batch"),
    ],
)
def test_arrays_that_do_not_fit_together(good, change, message):
    """Offsets that no plan can have are named, and do not crash the check."""
    with pytest.raises(PackingError, match=message):
        attrs.evolve(good, **change).check()
