"""Claim: the order of a run takes the same memory for a billion samples as for a million: that of one block of steps.

Python's peak memory (tracemalloc) while steps are read from the middle of a shuffled epoch of a million, ten million, a
hundred million and a billion samples. The baseline is that of other trainers, `numpy.random.Generator.permutation` of the
whole data, at the two smaller sizes; it grows with them, so the ratio, its peak at ten million over ours at a billion,
understates. The line also has the time a sample takes.

    python benchmarks/packing_order.py
"""

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from _report import emit, machine, note

from forge_packing.ordering._order import Order

BATCH, STEPS = 128, 128


def order_of(samples: int) -> Order:
    """Make the order of one shuffled epoch."""
    return Order(num_samples=samples, batch_size=BATCH, seed=1, epochs=1, max_steps=None, shuffle=True, drop_last=False)


def read(order: Order) -> np.ndarray:
    """Read a block of steps from the middle."""
    middle = order.steps_per_epoch // 2
    return order.samples(middle, min(middle + STEPS, order.steps_per_epoch))


def peak_bytes(work: Callable[[], object]) -> int:
    """Measure the peak memory of Python and numpy during `work`, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def nanoseconds_a_sample(order: Order, repeats: int) -> float:
    """Measure the nanoseconds a sample, the median over the repeats."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        size = read(order).size
        taken.append((time.perf_counter() - start) / size * 1e9)
    return statistics.median(taken)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--toy", action="store_true", help="small sizes: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    sizes = [10**5, 10**6] if options.toy else [10**6, 10**7, 10**8, 10**9]
    repeats = 2 if options.toy else options.repeats
    ours, taken = {}, {}
    for size in sizes:
        order = order_of(size)
        read(order)
        ours[size] = peak_bytes(lambda order=order: read(order))
        taken[size] = nanoseconds_a_sample(order, repeats)
        note(f"{size:>13,} samples: {ours[size] / 1024:8.0f} KiB, {taken[size]:6.1f} ns a sample")
    theirs = {size: peak_bytes(lambda size=size: np.random.default_rng(1).permutation(size)) for size in sizes[:2]}
    for size, peak in theirs.items():
        note(f"{size:>13,} samples: {peak / 1024:8.0f} KiB, numpy's permutation")
    emit(
        "packing_order",
        f"peak memory of numpy's permutation of {sizes[1]:,} samples over that of the order of {sizes[-1]:,}",
        theirs[sizes[1]] / ours[sizes[-1]],
        50.0,
        toy=options.toy,
        at=at,
        peak_bytes={str(size): peak for size, peak in ours.items()},
        largest_over_smallest=round(ours[sizes[-1]] / ours[sizes[0]], 4),
        permutation_peak_bytes={str(size): peak for size, peak in theirs.items()},
        nanoseconds_a_sample={str(size): round(value, 1) for size, value in taken.items()},
        sizes={"batch_size": BATCH, "steps_read": STEPS, "repeats": repeats},
    )


if __name__ == "__main__":
    main()
