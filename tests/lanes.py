"""Cases of a test → parameters of which CI runs some, and the lane `hatch run proofs` all others."""

import pytest


def ci_keeps(kept, cases):
    """Return the cases as parameters: those that are kept run in CI, the others have the marker `lane`.

    A kept case is named by its value, or by its tuple of values; a case may be a `pytest.param` with marks of its own.
    """
    parameters, missing = [], list(kept)
    for case in cases:
        values, marks, name = (case.values, case.marks, case.id) if hasattr(case, "marks") else (None, (), None)
        if values is None:
            values = case if isinstance(case, tuple) else (case,)
        key = values[0] if len(values) == 1 else tuple(values)
        lane = () if key in kept else (pytest.mark.lane,)
        parameters.append(pytest.param(*values, marks=(*marks, *lane), id=name))
        missing = [other for other in missing if other != key]
    assert not missing, f"kept in CI, and no case: {missing}"
    return parameters
