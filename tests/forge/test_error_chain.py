"""Causes are followed once each, in circles too."""

import pytest

from forge._disk import error_number
from forge._error_chain import error_chain


def circle() -> OSError:
    """Return an error that is the cause of its own cause."""
    first, second = OSError(5, "one"), ValueError("other")
    first.__cause__, second.__cause__ = second, first
    return first


def test_a_circle_ends() -> None:
    """Each error of a circle is given once."""
    first = circle()
    assert list(error_chain(first)) == [first, first.__cause__]
    with pytest.raises(ValueError, match="other") as caught:
        raise first.__cause__ from first
    assert error_number(caught.value) == 5
    first.errno = None
    assert error_number(caught.value) is None


def test_what_was_being_handled() -> None:
    """An error that names no cause came from the one that was being handled, if it is asked for."""
    with pytest.raises(ValueError, match="b") as caught:
        try:
            raise OSError(5, "a")
        except OSError:
            raise ValueError("b")  # noqa: B904
    assert [type(error) for error in error_chain(caught.value)] == [ValueError, OSError]
    assert list(error_chain(caught.value, implicit=False)) == [caught.value]
