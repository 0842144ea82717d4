"""Log-probabilities of sampled completions under policy and reference, entropies and values.

The pass is the one that trains: the same packed rows, the same head, the same temperature. So the probability ratio of the
first update is 1 as exactly as the machine repeats itself, in bfloat16 too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._modules import mode
from forge_algos.adaptations._switched_off import switched_off
from forge_algos.batches._groups import PackedGroups, group_tensors, idle_groups
from forge_algos.heads._completions import Completions
from forge_algos.heads._value_head import values_at
from forge_algos.isolation._guard import guard_packed
from forge_algos.objectives._objective import Weights

Reference = nn.Module | Literal["adapter_off"] | Weights
"""Frozen model, or the trained one: with its adapter switched off, or under the weights that a function gives it."""


class Measured(NamedTuple):
    """Numbers of the tokens of some rows, one row after another: float32[m] each."""

    old_logps: NDArray[np.float32]
    ref_logps: NDArray[np.float32] | None
    values: NDArray[np.float32] | None
    entropy: NDArray[np.float32] | None
    collision: NDArray[np.float32] | None = None
    """log Σ p² over the vocabulary."""


def measure(
    model: nn.Module,
    rows: Sequence[PackedGroups],
    *,
    temperature: float,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    reference: Reference | None,
    with_values: bool,
    with_entropy: bool = False,
    with_collision: bool = False,
) -> Measured:
    """Run every row through the model and its reference, in evaluation mode, without gradients.

    Every rank brings equally many rows; for one without completions a made-up row is run and dropped. `with_collision` there
    are no entropies and values.
    """
    with mode(model, training=False), torch.no_grad(), guard_packed(model):
        found = _measured(model, rows, temperature, device, autocast, with_values=with_values, with_collision=with_collision)
        found = found if with_entropy else found._replace(entropy=None)
        if reference is None:
            return found
        if not isinstance(reference, nn.Module):
            with switched_off(model) if reference == "adapter_off" else reference(model):
                theirs = _measured(model, rows, temperature, device, autocast)
            return found._replace(ref_logps=theirs.old_logps)
    with mode(reference, training=False), torch.no_grad(), guard_packed(reference):
        return found._replace(ref_logps=_measured(reference, rows, temperature, device, autocast).old_logps)


def _measured(
    model: nn.Module,
    rows: Sequence[PackedGroups],
    temperature: float,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    with_values: bool = False,
    with_collision: bool = False,
) -> Measured:
    completions = Completions(model, device=device)
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for row in rows:
        mine = len(row.lengths) > 0
        given = row if mine else idle_groups()
        inputs = completions.inputs(given)
        places, targets, _ = group_tensors(given, device)
        inside = (lambda hidden, at=places: values_at(model, hidden, at)) if with_values else None
        with autocast():
            if with_collision:
                found, entropy = completions.head.logps_and_collision(inputs, places, targets, temperature=temperature)
                rest = []
            else:
                # Seldom used, but objectives compute the entropy: the same kernels give the same numbers.
                found, entropy, *rest = completions.head.logps_and_entropy(
                    inputs, places, targets, temperature=temperature, beside=inside
                )
        logps += [found] * mine
        entropies += [entropy] * mine
        values += rest * mine
    if with_collision:
        return Measured(_numpy(logps), None, None, None, _numpy(entropies))
    return Measured(_numpy(logps), None, _numpy(values) if with_values else None, _numpy(entropies))


def _numpy(tensors: list[torch.Tensor]) -> NDArray[np.float32]:
    return torch.cat([torch.zeros(0), *(t.detach().float().cpu() for t in tensors)]).numpy()
