"""PackingError: a ValueError that travels between processes."""

import pickle

import pytest

from forge_packing import PackingError, plan


def test_family():
    """Code that knows only ValueError catches it; a command that ends with it exits with status 2."""
    assert issubclass(PackingError, ValueError)
    assert PackingError.exit_status == 2


def test_pickles():
    """An error from a worker process arrives as it was raised."""
    with pytest.raises(PackingError) as caught:
        plan([9], batch_size=1, max_tokens=8)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is PackingError
    assert str(copy) == str(caught.value)
