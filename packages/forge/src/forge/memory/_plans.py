"""Run with several sizes of micro-batches or settings → a memory plan of each, cheaply."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import forge_algos
import forge_dist
from forge.memory._forecast import Derived, Rehearsed, plan_of
from forge.memory._memory_plan import MemoryPlan
from forge.memory._planned import Planned
from forge.memory._target import Target

PLANNING = "planning the memory of a step", "planned the memory of a step"
_TRIES = 4
_CLOSE = 0.95
"""Part of the room that is enough: what is left is not searched for."""


class Plans:
    """Memory plans of variants of one run.

    The first is rehearsed whole. Later ones are derived from few of the model's equal blocks, if that gives the very bytes of
    the first, and are rehearsed whole else.

    Args:
        target: devices that they are for.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._first: tuple[Planned, MemoryPlan] | None = None
        self._whole: Rehearsed | None = None
        """Model of the first, for other sizes of its micro-batches."""
        self._derived: Derived | None = None
        """The same with few of its blocks, where they suffice."""
        self._asked = False
        """Whether it was found out if they do."""

    def of(self, planned: Planned) -> MemoryPlan:
        """Plan a run, the first or one of other settings."""
        if self._first is None:
            self._whole = Rehearsed.of(planned, self._target)
            self._first = planned, plan_of(self._whole, self._target)
            return self._first[1]
        if self._few_suffice():
            # Of other settings the blocks may be unlike, or the work another one with each number of them.
            with suppress(forge_algos.RehearsalError):
                return plan_of(Derived.of(planned, self._target), self._target)
        return plan_of(Rehearsed.of(planned, self._target), self._target)

    def resized(self, planned: Planned) -> MemoryPlan:
        """Plan the first run with micro-batches of another size."""
        if self._whole is None:
            return self.of(planned)
        if self._few_suffice() and self._derived is not None:
            with suppress(forge_algos.RehearsalError):
                return plan_of(self._derived.with_plan(planned), self._target)
        return plan_of(self._whole.with_plan(planned), self._target)

    def _few_suffice(self) -> bool:
        """Return whether from few of its blocks follow the very bytes of the first."""
        if not self._asked and self._first is not None:
            self._asked = True
            planned, made = self._first
            with suppress(forge_algos.RehearsalError, forge_dist.ModelError):
                derived = Derived.of(planned, self._target)
                if plan_of(derived, self._target) == made:
                    self._derived = derived
        return self._derived is not None


class Search:
    """Search for the largest micro-batch with which a plan needs no more than there is room for.

    Memory grows nearly in proportion to tokens, so that a few tries come close.

    Args:
        with_tokens: plans the run with micro-batches of so many tokens.
        needed: bytes that a plan needs.
        room: bytes that there are.
        grain: sizes that are tried between the least and the most are multiples of it.
    """

    def __init__(
        self, with_tokens: Callable[[int], MemoryPlan], needed: Callable[[MemoryPlan], int], room: int, *, grain: int
    ) -> None:
        self._with_tokens, self._needed, self._room, self._grain = with_tokens, needed, room, grain
        self.found: dict[int, MemoryPlan] = {}
        """Tokens → the plan with them."""

    def fits(self, tokens: int) -> bool:
        """Plan with so many tokens, once, and return whether that fits."""
        if tokens not in self.found:
            self.found[tokens] = self._with_tokens(tokens)
        return self._needed(self.found[tokens]) <= self._room

    def grow(self, below: int, above: int | None, most: int) -> int:
        """Return the largest size found to fit, from one that does to one that does not.

        Args:
            below: tokens that fit.
            above: tokens that do not, if any are known.
            most: tokens that are not exceeded.
        """
        needed = {tokens: self._needed(plan) for tokens, plan in self.found.items()}
        for _ in range(_TRIES):
            at, by = sorted(needed)[-2:] if above is None else (below, above)
            grown = max(1, needed[by] - needed[at])
            tokens = at + int((by - at) * (self._room - needed[at]) / grown * 0.97) if by > at else most
            tokens = min(most, tokens // self._grain * self._grain)
            if tokens <= below or (above is not None and tokens >= above) or needed[below] > _CLOSE * self._room:
                break
            if self.fits(tokens):
                below = tokens
            else:
                above = tokens
            needed[tokens] = self._needed(self.found[tokens])
        return below
