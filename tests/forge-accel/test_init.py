"""The public API: its names, and imports in an instant."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import forge_accel


def test_the_public_names_are_sorted_and_there():
    """`__all__` is sorted (capitals first), complete, and every name leads somewhere."""
    assert forge_accel.__all__ == sorted(forge_accel.__all__)
    assert set(forge_accel.__all__) == set(forge_accel._MODULE_OF)
    for name in forge_accel.__all__:
        assert getattr(forge_accel, name) is not None
    assert set(forge_accel.__all__) <= set(dir(forge_accel))
    with pytest.raises(AttributeError, match="no attribute 'gpu'"):
        forge_accel.gpu  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
    "use", ["", "; forge_accel.DeviceSettings()", "; forge_accel.AccelError('x'); forge_accel.Choice(1, 'one')"]
)
def test_settings_are_read_without_torch(use):
    """Importing the package, its settings and its errors loads no torch."""
    code = f"import sys, forge_accel{use}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", [found.name for found in pkgutil.walk_packages(forge_accel.__path__, "forge_accel.")])
def test_the_examples_in_the_docstrings_run(module):
    """A docstring's example is true."""
    assert doctest.testmod(importlib.import_module(module)).failed == 0
