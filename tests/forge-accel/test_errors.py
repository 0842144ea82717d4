"""The exceptions of forge_accel."""

from __future__ import annotations

import pickle

import pytest

from forge_accel import AccelError, AttentionError, ForgeAccelError


@pytest.mark.parametrize("kind", [AccelError, AttentionError])
def test_errors_are_one_family_and_travel_between_processes(kind):
    """Caught as the package's root or as ValueError, exit status 2, the same after pickling."""
    error = kind("device='tpu' is unknown")
    assert isinstance(error, ForgeAccelError)
    assert isinstance(error, ValueError)
    assert error.exit_status == 2
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
