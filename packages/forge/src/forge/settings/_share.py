"""Number of steps, or a share of a run → steps from one time to the next."""

from __future__ import annotations

import math


def steps_between(every: float, num_steps: int | None) -> int:
    """Return a number of steps, or a share below 1 of `num_steps`, as steps; 0 for none.

    A share is rounded up, as in transformers.

    >>> steps_between(5, 30), steps_between(0.1, 30), steps_between(0.25, 30), steps_between(0, 30)
    (5, 3, 8, 0)
    """
    if isinstance(every, int) or num_steps is None:
        return int(every)
    # 0.1 of 30 steps is 3, though the product is a little more.
    return max(1, math.ceil(every * num_steps - 1e-9)) if every else 0
