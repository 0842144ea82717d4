"""One rank's parts of a phase → those of a rank that shares them, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import forge_accel
from forge.memory._memory_plan import Phase
from forge.memory._planned import SHARDED, Planned

_DIVIDED = {
    "fsdp2": ("weights", "gradients", "optimizer"),
    "hsdp": ("weights", "gradients", "optimizer"),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
}


_BUCKET = 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel exchanges at a time."""


class Groups(NamedTuple):
    """Weights of a model that ranks which divide it gather together."""

    layers: int
    """Number of its layers."""
    block: int
    """Weights of its largest repeated block."""
    root: int
    """Weights outside of the blocks, which stay gathered from the forward pass to the end of the backward pass."""


def divided(planned: Planned, name: str, parts: Mapping[str, int], groups: Groups, *, on_host: bool) -> Phase:
    """Divide one rank's parts by the ranks that share them, and add what they exchange."""
    found, ranks = dict(parts), planned.ranks
    if "activations" in found:
        found["activations"] = -(-found["activations"] // planned.settings.strategy.cp_size)
    if ranks > 1 and planned.strategy in _DIVIDED:
        shared = planned.settings.strategy.shard_size or ranks if planned.strategy == "hsdp" else ranks
        whole = parts.get("weights", 0)
        parted = set(_DIVIDED[planned.strategy])
        if planned.strategy in SHARDED:
            # An adapter is whole on each rank.
            parted -= {"gradients", "optimizer"} if planned.frozen else set()
        for part in parted:
            found[part] = -(-found.get(part, 0) // shared)
        if planned.strategy in SHARDED and not planned.frozen and name == "step":
            found["collectives"] = _exchanged(planned, groups, on_host=on_host)
        elif "weights" in _DIVIDED[planned.strategy] and name != "saving":
            # The weights of the layer that computes and of the next, gathered, and the gradients of one before they are summed.
            found["collectives"] = 3 * whole // max(1, groups.layers)
    elif ranks > 1 and on_host and name == "step":
        # Gradients lie in DDP's buckets. On a host a bucket is sent from a copy and received into another.
        found["collectives"] = 2 * min(_BUCKET, parts.get("gradients", 0))
    return Phase(name=name, planned=sum(found.values()), parts=found)


def _exchanged(planned: Planned, groups: Groups, *, on_host: bool) -> int:
    """Return the bytes of weights and gradients that a rank holds for a while, by `fully_shard`.

    While a block computes its gradients: its weights, those of the next on their way, its gradients, and the float32 sum of the
    block before. On a host Gloo sums copies, and the worst moment is that sum: the next weights, the gradients, and four times
    float32's bytes of them (measured: tests/whole/test_memory_divided.py). Weights outside of the blocks and their gradients
    are there all the time.
    """
    size = 2 if forge_accel.bfloat16 in (planned.gathers, planned.weights) else 4
    return (2 * size + 16 if on_host else 3 * size + 4) * groups.block + 2 * size * groups.root


def keeps_casts(strategy: str) -> bool:
    """Tell whether casts of weights are made once a step: whole float32 weights on each rank."""
    return strategy in ("single", "ddp")
