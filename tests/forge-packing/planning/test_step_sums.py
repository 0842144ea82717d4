"""tokens and loss_tokens: a value a step, looked up where it is asked for."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, plan
from forge_packing.planning import _steps


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 3), st.slices(20))
def test_as_an_array(lengths, batch_size, epochs, asked):
    """Steps, slices, loops and arrays say the same, across the borders of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_steps, "BLOCK", 4)
        made = plan(lengths, batch_size=batch_size, max_tokens=9, epochs=epochs)
        expected = [int(made.lengths[made.samples(step)].sum()) for step in range(made.num_steps)]
        assert made.tokens.tolist() == list(made.tokens) == np.asarray(made.tokens).tolist() == expected
        assert [made.tokens[step] for step in range(len(made.tokens))] == expected
        assert np.asarray(made.tokens).dtype == np.int64
        assert np.asarray(made.tokens, dtype=np.float32).dtype == np.float32
        if asked.step is None or asked.step > 0:
            assert made.tokens[asked].tolist() == expected[asked]


def test_no_way_back():
    """A stride backwards is refused, and so is the end of what has none."""
    with pytest.raises(IndexError, match="not with a stride of -1"):
        plan([1, 2], batch_size=1, max_tokens=9).tokens[::-1]
    endless = plan([1, 2], batch_size=1, max_tokens=9, epochs=None, shuffle=False).tokens
    for asked in (slice(None), slice(3, None), slice(-2, 5), slice(0, -1)):
        with pytest.raises(PackingError, match="an endless plan has no last step"):
            endless[asked]
    assert endless[1:6:2].tolist() == [2, 2, 2]
    steps = iter(endless)
    assert [next(steps) for _ in range(5)] == [1, 2, 1, 2, 1]
