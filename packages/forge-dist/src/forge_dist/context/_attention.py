"""Attention of one rank's part of a packed row to the keys and values of all."""

from functools import wraps
from typing import Any

import torch
from torch.distributed import ProcessGroup

from forge_dist.context._cut import Cut
from forge_dist.context._gather import gather
from forge_dist.loading._attention import AttentionFunction

ARGUMENT = "context_cut"
"""Name of the argument by which the decoder hands its `Part` to its attention layers, also where they are run again."""


class Part:
    """A cut on the device, with the ranks that share the row."""

    def __init__(self, cut: Cut, group: ProcessGroup, device: torch.device) -> None:
        self.cut = cut
        self.group = group
        self.mine = cut.mine.to(device)
        self.order = cut.order.to(device)
        self.seen = tuple(places.to(device) for places in cut.seen)

    def whole(self, states: torch.Tensor) -> torch.Tensor:
        """Gather float[t, ...] of each rank's tokens to the row's float[T, ...]; collective."""
        found = gather(states.flatten(1), (self.order,), self.cut.longest, self.group)
        return found.view(len(self.order), *states.shape[1:])

    def keys_and_values(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values that this rank's queries see; collective.

        From [1, Hk, t, head] of each rank to [1, Hk, keys, head].
        """
        both = (key, value)
        rows = torch.cat([states[0].transpose(0, 1).flatten(1) for states in both], dim=1)
        found = gather(rows, self.seen, self.cut.longest, self.group)
        parts = found.split([states.shape[1] * states.shape[3] for states in both], dim=1)
        shaped = (
            part.view(len(found), states.shape[1], states.shape[3]).transpose(0, 1)[None].to(states.dtype)
            for part, states in zip(parts, both, strict=True)
        )
        keys, values = shaped
        return keys, values


def over_ranks(function: AttentionFunction) -> AttentionFunction:
    """Return an attention that gathers keys and values of all ranks where the row is cut."""

    @wraps(function)
    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        part: Part | None = kwargs.pop(ARGUMENT, None)
        if part is not None:
            key, value = part.keys_and_values(key, value)
        return function(module, query, key, value, *args, **kwargs)

    return attend
