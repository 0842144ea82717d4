"""Cases of a test → parameters of which CI or `hatch run quick` runs some, and something slower all others."""

import pytest


def ci_keeps(kept, cases):
    """Return the cases as parameters: those that are kept run in CI, the others in the lane `hatch run proofs` (marker `lane`).

    A kept case is named by its value, or by its tuple of values; a case may be a `pytest.param` with marks of its own.
    """
    return _keeps(kept, cases, pytest.mark.lane, "CI")


def quick_keeps(kept, cases):
    """Return the cases as parameters: those that are kept run in `hatch run quick` too, the others are marked `slow`.

    For cases that take the same lines of the package that is edited, and differ in what another test tells apart.
    """
    return _keeps(kept, cases, pytest.mark.slow, "a quick look")


def _keeps(kept, cases, mark, where):
    parameters, missing = [], list(kept)
    for case in cases:
        values, marks, name = (case.values, case.marks, case.id) if hasattr(case, "marks") else (None, (), None)
        if values is None:
            values = case if isinstance(case, tuple) else (case,)
        key = values[0] if len(values) == 1 else tuple(values)
        more = () if key in kept else (mark,)
        parameters.append(pytest.param(*values, marks=(*marks, *more), id=name))
        missing = [other for other in missing if other != key]
    assert not missing, f"kept in {where}, and no case: {missing}"
    return parameters
