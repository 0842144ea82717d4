"""Order: steps to positions to samples, at any distance, from a few numbers."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing.ordering._order import Order


def made(**changed):
    given = {
        "num_samples": 10,
        "batch_size": 4,
        "seed": 0,
        "epochs": 2,
        "max_steps": None,
        "shuffle": True,
        "drop_last": False,
    }
    return Order(**{**given, **changed})


@st.composite
def orders(draw):
    n = draw(st.integers(1, 40))
    batch_size = draw(st.integers(1, 12))
    sources, shares = None, None
    if draw(st.booleans()):
        shares = np.array(draw(st.lists(st.integers(1, 6), min_size=1, max_size=min(n, 4))))
        rest = draw(st.lists(st.integers(0, shares.size - 1), min_size=n - shares.size, max_size=n - shares.size))
        sources = np.array([*range(shares.size), *rest])
    return made(
        num_samples=n,
        batch_size=batch_size,
        seed=draw(st.integers(0, 2**32 - 1)),
        epochs=draw(st.integers(1, 5)),
        shuffle=draw(st.booleans()),
        drop_last=n >= batch_size and draw(st.booleans()),
        sources=sources,
        shares=shares,
    )


@settings(deadline=None, max_examples=300)
@given(orders(), st.data())
def test_any_stretch_is_a_part_of_the_whole(order, data):
    """Steps asked for together are those asked for one by one, wherever one begins."""
    whole = [order.samples(step, step + 1).tolist() for step in range(order.num_steps)]
    first = data.draw(st.integers(0, order.num_steps))
    stop = data.draw(st.integers(first, order.num_steps))
    samples, starts = order.samples(first, stop), order.starts(first, stop)
    assert [part.tolist() for part in np.split(samples, starts[1:-1])][: stop - first] == whole[first:stop]
    assert starts[0] == 0
    assert starts[-1] == samples.size


@settings(deadline=None, max_examples=300)
@given(orders(), st.data())
def test_a_position_is_one_integer(order, data):
    """position and step_at undo each other; every position lies in the step that step_at names."""
    step = data.draw(st.integers(0, order.num_steps))
    assert order.step_at(order.position(step)) == step
    position = data.draw(st.integers(0, order.position(order.num_steps) - 1))
    step = order.step_at(position)
    assert order.position(step) <= position < order.position(step + 1)


@settings(deadline=None, max_examples=300)
@given(orders())
def test_an_epoch_holds_every_sample(order):
    """Without shares: each epoch has each sample once, but for those that drop_last leaves out."""
    if order.shares is not None:
        return
    for epoch in range(order.epochs):
        samples = order.drawn(epoch * order.per_epoch, (epoch + 1) * order.per_epoch).tolist()
        assert len(set(samples)) == len(samples) == order.per_epoch
        assert order.per_epoch == (
            order.num_samples // order.batch_size * order.batch_size if order.drop_last else order.num_samples
        )


@settings(deadline=None, max_examples=300)
@given(orders())
def test_a_source_is_walked_through_before_it_begins_again(order):
    """With shares: each source's draws go through all of its samples, one walk after another, in an order of its own."""
    if order.shares is None:
        return
    drawn = order.drawn(0, 5 * order.num_samples)
    for source in range(order.shares.size):
        own = np.flatnonzero(order.sources == source)
        walks = drawn[order.sources[drawn] == source]
        for start in range(0, walks.size - own.size + 1, own.size):
            assert sorted(walks[start : start + own.size].tolist()) == own.tolist()
        if not order.shuffle:
            assert walks.tolist() == np.resize(own, walks.size).tolist()


def test_sources_have_orders_of_their_own():
    """Two sources of one size are not shuffled alike, nor is one in its next walk."""
    order = made(num_samples=80, sources=np.repeat([0, 1], 40), shares=np.array([1, 1]))
    drawn = order.drawn(0, 160)
    first, second = drawn[drawn < 40], drawn[drawn >= 40] - 40
    assert first[:40].tolist() != second[:40].tolist()
    assert first[:40].tolist() != first[40:].tolist()


def test_a_single_source_is_no_mixture():
    """One source with any weight is drawn as data without sources are."""
    one = made(num_samples=50, sources=np.zeros(50, dtype=np.int64), shares=np.array([1]))
    assert one.drawn(0, 150).tolist() == made(num_samples=50).drawn(0, 150).tolist()


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"), [(2, None, 6), (2, 5, 5), (2, 9, 6), (None, 9, 9), (None, None, None)]
)
def test_number_of_steps(epochs, max_steps, steps):
    """The run ends with whichever limit is reached first, or never."""
    assert made(epochs=epochs, max_steps=max_steps).num_steps == steps


def test_far_away():
    """A step ten billion epochs away is there at once."""
    order = made(epochs=None)
    assert order.position(3 * 10**10 + 1) == 10**11 + 4
    assert sorted(order.samples(3 * 10**10, 3 * 10**10 + 3).tolist()) == list(range(10))


def peak_bytes(n):
    order = made(num_samples=n, batch_size=128)
    order.samples(0, 8)
    tracemalloc.start()
    try:
        order.samples(n // 128 // 2, n // 128 // 2 + 8)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_data():
    """Steps out of the middle of a billion samples take no more memory than out of a million, and little of it."""
    small, large = peak_bytes(10**6), peak_bytes(10**9)
    assert large <= small * 1.05
    assert large < 200_000
