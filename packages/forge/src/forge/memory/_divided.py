"""One rank's parts of a phase → those of a rank that shares them, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import forge_accel
from forge.memory._memory_plan import Phase
from forge.memory._planned import SHARDED, Planned

_DIVIDED = {
    "fsdp2": ("weights", "unrounded", "gradients", "optimizer"),
    "hsdp": ("weights", "unrounded", "gradients", "optimizer"),
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
    beside: int = 0
    """Bytes of the weights that a row without media passes over, which ZeRO-3 gathers with the whole model."""


def shares(planned: Planned) -> dict[str, int]:
    """Return which parts of one rank's memory its strategy divides, and by how many ranks."""
    if planned.ranks == 1 or planned.strategy not in _DIVIDED:
        return {}
    ranks = planned.settings.strategy.shard_size or planned.ranks if planned.strategy == "hsdp" else planned.ranks
    # An adapter is whole on each rank.
    whole = {"gradients", "optimizer"} if planned.strategy in SHARDED and planned.frozen else ()
    return {part: ranks for part in _DIVIDED[planned.strategy] if part not in whole}


def divided(planned: Planned, name: str, parts: Mapping[str, int], groups: Groups, *, on_host: bool) -> Phase:
    """Divide one rank's parts by the ranks that share them, and add what they exchange."""
    found, ranks = dict(parts), planned.ranks
    if "activations" in found:
        found["activations"] = -(-found["activations"] // planned.settings.strategy.cp_size)
    if ranks > 1 and planned.strategy in _DIVIDED:
        for part, shared in shares(planned).items():
            found[part] = -(-found.get(part, 0) // shared)
        if planned.strategy in SHARDED and not planned.frozen and name == "step":
            found["collectives"] = _exchanged(planned, groups, parts, on_host=on_host)
        elif "weights" in _DIVIDED[planned.strategy] and name != "saving":
            # The weights of the layer that computes and of the next, gathered, and the gradients of one before they are summed.
            found["collectives"] = 3 * parts.get("weights", 0) // max(1, groups.layers)
            trained = name == "step" and bool(planned.settings.parts.beside)
            found["collectives"] += groups.beside * (2 if trained else 1)
    elif ranks > 1 and on_host and name == "step":
        # Gradients lie in DDP's buckets. On a host a bucket is sent from a copy and received into another.
        found["collectives"] = 2 * min(_BUCKET, parts.get("gradients", 0))
    return Phase(name=name, planned=sum(found.values()), parts=found)


def _exchanged(planned: Planned, groups: Groups, parts: Mapping[str, int], *, on_host: bool) -> int:
    """Return the bytes of weights and gradients that a rank holds for a while, by `fully_shard`.

    While a block computes its gradients: its weights, those of the next on their way, its gradients, and the float32 sum of the
    block before. Weights outside of the blocks and their gradients are there all the time.
    """
    size = 2 if forge_accel.bfloat16 in (planned.gathers, planned.weights) else 4
    summed = 4 * groups.block
    outside = 2 * size * groups.root
    if not on_host:
        return 3 * size * groups.block + summed + outside
    # The worst moment is that before its gradients, as Gloo receives the next weights into a copy of its own, and sends a copy
    # of this rank's where they are cast (measured: tests/whole/test_memory_divided.py).
    ranks = shares(planned)["gradients"]
    moved = 3 * size * groups.block + (size * groups.block // ranks if planned.gathers is not None else 0)
    if parts.get("gradients", 0) >= summed:
        return moved + summed + outside
    # No block has gradients yet, and what is known is the end of the forward pass: the last block's weights are on their way.
    # They are there once the head is done; the sum of its gradients is once the block's activations have gone.
    head, activations = parts.get("head", 0), parts.get("activations", 0) // max(1, groups.layers)
    later = max(0, summed + summed // ranks - activations)
    return max(2 * size * groups.block, moved + later - head) + outside


def keeps_casts(strategy: str) -> bool:
    """Tell whether casts of weights are made once a step: whole float32 weights on each rank."""
    return strategy in ("single", "ddp")
