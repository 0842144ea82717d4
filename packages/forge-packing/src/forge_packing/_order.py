"""(seed, epoch) to the order of the samples, and epochs and steps to the places where a run's steps begin."""

from itertools import count

import numpy as np

from forge_packing._checks import Int64Array


def epoch_order(num_samples: int, seed: int, epoch: int) -> Int64Array:
    """int64[N]: the samples' order in this epoch, a function of (N, seed, epoch) alone.

    Philox's raw numbers are sorted, instead of calling Generator.permutation: numpy promises that the raw stream stays
    as it is on every machine and in every release (NEP 19), and does not promise that of a Generator's methods.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def run_order(
    num_samples: int, *, batch_size: int, seed: int, epochs: int | None, max_steps: int | None, shuffle: bool, drop_last: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The whole run's samples one after another, where each step starts in them, and each step's epoch.

    Returns (order int64[P], starts int64[steps+1], epoch int64[steps]). A step does not cross an epoch's end: the last
    of an epoch may be short, or is left out with drop_last. epochs=None goes on until max_steps.
    """
    per_epoch = num_samples // batch_size * batch_size if drop_last else num_samples
    steps_left = max_steps
    orders: list[Int64Array] = []
    sizes: list[int] = []
    step_epochs: list[int] = []
    for epoch in range(epochs) if epochs is not None else count():
        take = per_epoch if steps_left is None else min(per_epoch, steps_left * batch_size)
        order = epoch_order(num_samples, seed, epoch) if shuffle else np.arange(num_samples, dtype=np.int64)
        orders.append(order[:take])
        steps = -(-take // batch_size)
        sizes += [batch_size] * (steps - 1) + [take - (steps - 1) * batch_size]
        step_epochs += [epoch] * steps
        if steps_left is not None:
            steps_left -= steps
            if steps_left == 0:
                break
    starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64, copy=False)
    return np.concatenate(orders), starts, np.array(step_epochs, dtype=np.int64)
