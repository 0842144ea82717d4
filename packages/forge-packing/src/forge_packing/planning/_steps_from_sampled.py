"""A run of any length to the steps that are looked at: all, or the first, the last and some evenly between."""

import numpy as np

from forge_packing._errors import PackingError
from forge_packing.planning._steps import Steps


def sampled_blocks(steps: Steps, most_steps: int | None) -> list[int]:
    """Numbers of blocks, ascending, that hold at most about `most_steps` steps; None is all of them.

    An endless run is looked at from its beginning. Raises PackingError where it is to be looked at whole.
    """
    total = steps.order.num_steps
    if most_steps is not None and most_steps < 1:
        raise PackingError(f"most_steps must be at least 1, got {most_steps}")
    if total is None:
        if most_steps is None:
            raise PackingError("an endless plan cannot be looked at whole: say how many steps, as in check(most_steps=1000)")
        return list(range(-(-most_steps // steps.per_block)))
    blocks = -(-total // steps.per_block)
    most = blocks if most_steps is None else min(blocks, max(1, most_steps // steps.per_block))
    return sorted({round(at) for at in np.linspace(0, blocks - 1, most).tolist()})


def sampled_stretches(steps: Steps, most_steps: int, most_stretches: int) -> list[tuple[int, int]]:
    """(first, stop) of stretches of steps that hold at most `most_steps`, at least one, together; all where that is enough.

    An endless run is looked at from its beginning.
    """
    total = steps.order.num_steps
    if total is None or total <= most_steps:
        return [(0, most_steps if total is None else total)]
    count = min(most_stretches, most_steps)
    each = most_steps // count
    return [(first, first + each) for first in (at * (total - each) // max(count - 1, 1) for at in range(count))]
