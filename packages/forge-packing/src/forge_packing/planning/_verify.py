"""Verification of a plan: the laws that `BatchPlan.check` states."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from forge_packing._errors import PackingError
from forge_packing.dividing._padded import padded_sizes
from forge_packing.planning._steps import Divided, Ordered, Steps


def verify(steps: Steps, most_steps: int | None) -> None:
    """Verify about `most_steps` steps, or all; PackingError names the first broken law."""
    for number in steps.sampled_blocks(most_steps):
        block = steps.divided(number)
        verify_order(steps, block.ordered)
        verify_division(steps, block)
    if most_steps is None and steps.order.shares is None:
        _verify_epochs(steps)


def verify_order(steps: Steps, block: Ordered) -> None:
    """Verify the sizes of a block's steps, and their samples: once an epoch, or by the shares."""
    order, n = steps.order, steps.lengths.size
    starts, samples = block.step_starts, block.samples
    if starts.size < 2 or starts[0] != 0 or starts[-1] != samples.size or (np.diff(starts) < 1).any():
        _broken("offsets rise from 0 to the number of samples", f"found {starts.size} offsets for {samples.size} samples")
    if samples.min() < 0 or samples.max() >= n:
        _broken("every index is one of the data's", f"the order holds {samples.min()} to {samples.max()} of {n}")
    # Worked out anew, not read from the order, which is what is verified.
    per_epoch = n // order.batch_size * order.batch_size if order.drop_last else n
    steps_per_epoch = -(-per_epoch // order.batch_size)
    step = block.first + np.arange(starts.size - 1)
    last = per_epoch - (steps_per_epoch - 1) * order.batch_size
    wanted = np.where((step + 1) % steps_per_epoch == 0, last, order.batch_size)
    wrong = np.flatnonzero(np.diff(starts) != wanted)
    if wrong.size:
        at = wrong[0]
        found = f"step {step[at]} has {starts[at + 1] - starts[at]}, not {wanted[at]}"
        _broken("every step has batch_size samples but the last of an epoch", found)
    if order.shares is None:
        epoch_of = np.repeat(step // steps_per_epoch, np.diff(starts))
        by_sample = np.lexsort((samples, epoch_of))
        twice = np.flatnonzero((np.diff(samples[by_sample]) == 0) & (np.diff(epoch_of[by_sample]) == 0))
        if twice.size:
            at = by_sample[twice[0]]
            _broken("a sample comes once an epoch", f"sample {samples[at]} comes again in epoch {epoch_of[at]}")
        return
    assert order.sources is not None
    drawn = np.bincount(order.sources[samples], minlength=order.shares.size)
    period = int(order.shares.sum())
    off = np.flatnonzero(np.abs(drawn * period - order.shares * samples.size) >= 2 * period)
    if off.size:
        share = f"{order.shares[off[0]]}/{period}"
        _broken(
            "every source keeps its share to within 2", f"source {off[0]} has {drawn[off[0]]} of {samples.size}, not {share}"
        )


def verify_division(steps: Steps, block: Divided) -> None:
    """Verify that each step is divided exactly, within max_tokens, into as many on all ranks."""
    ranks = steps.world_size
    step_starts, samples = block.ordered.step_starts, block.ordered.samples
    starts, passes, members = block.micro_batch_starts, block.pass_starts, block.members
    if starts.size < 2 or starts[0] != 0 or starts[-1] != members.size or (np.diff(starts) < 0).any():
        _broken("offsets rise from 0 to the number of samples", f"found {starts.size} offsets for {members.size} samples")
    if passes.size != step_starts.size or passes[0] != 0 or (np.diff(passes) < 1).any():
        _broken("every step has a micro-batch", f"found {passes.tolist()[:8]}")
    if passes[-1] * ranks != starts.size - 1:
        found = f"{starts.size - 1} for {passes[-1]} on each of {ranks}"
        _broken("all ranks have the same number of micro-batches", f"found {found}")
    wrong = np.flatnonzero(starts[passes * ranks] != step_starts)
    if wrong.size:
        step = block.ordered.first + wrong[0] - 1
        _broken("a step's micro-batches hold exactly its samples", f"they differ in number in step {step}")
    step_of = np.repeat(block.ordered.first + np.arange(step_starts.size - 1), np.diff(step_starts))
    wrong = np.flatnonzero(members[np.lexsort((members, step_of))] != np.arange(samples.size))
    if wrong.size:
        _broken("a step's micro-batches hold exactly its samples", f"step {step_of[wrong[0]]} has others")
    micro_batch_of = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    wrong = np.flatnonzero((np.diff(members) < 0) & (np.diff(micro_batch_of) == 0))
    if wrong.size:
        _broken("a micro-batch keeps the order of its step", f"not so in step {step_of[wrong[0]]}")
    if steps.prefixes is not None:
        tokens = steps.prefixes.pick(samples[members]).sizes(steps.room[samples[members]], micro_batch_of, starts.size - 1)
    elif steps.widths is None:
        tokens = np.diff(np.concatenate([[0], np.cumsum(steps.room[samples[members]])])[starts])
    else:
        tokens = padded_sizes(*steps.padded(samples[members]), starts)
    over = np.flatnonzero(tokens > steps.max_tokens)
    if over.size:
        step = block.ordered.first + np.searchsorted(passes * ranks, over[0], side="right") - 1
        _broken(f"no micro-batch is over max_tokens={steps.max_tokens}", f"one of step {step} has {tokens[over[0]]} tokens")


def _verify_epochs(steps: Steps) -> None:
    """Verify that an epoch holds every sample once, less those that drop_last leaves out."""
    order = steps.order
    assert order.num_steps is not None
    for epoch, stop in _epoch_ends(order.position(order.num_steps), order.per_epoch):
        seen = np.zeros(steps.lengths.size, dtype=bool)
        for start in range(epoch * order.per_epoch, stop, 2**16):
            seen[order.drawn(start, min(start + 2**16, stop))] = True
        found, wanted = int(np.count_nonzero(seen)), stop - epoch * order.per_epoch
        if found != wanted:
            _broken("an epoch holds every sample once", f"epoch {epoch} has {found} of {wanted}")


def _epoch_ends(total: int, per_epoch: int) -> Iterator[tuple[int, int]]:
    """Yield each epoch and the position where it ends, the last one where the run does."""
    for epoch in range(-(-total // per_epoch)):
        yield epoch, min((epoch + 1) * per_epoch, total)


def _broken(law: str, detail: str) -> NoReturn:
    raise PackingError(f"the plan breaks a law: {law}; {detail}. Make it again with plan()")
