"""Memory plan: bytes of each phase of a run by what they are for, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from forge.memory._target import CONTEXT, Target

SHARE = 0.95
"""Part of a device's memory that a plan may fill: the rest is lost between allocations."""

MEASURED = "first steps"
"""Name of the phase that a run measures."""


@attrs.frozen(kw_only=True)
class Phase:
    """Worst moment of a part of a run, on the rank that holds most."""

    name: str
    """rollout, step, evaluation, saving, export, or first steps (those that were measured)."""
    planned: int
    parts: Mapping[str, int]
    """weights, unrounded, gradients, optimizer, activations, head, cache, kernels, collectives, copies, compiled → bytes.

    Together they are `planned`.
    """
    measured: int | None = None
    """What it took, once it was measured."""


@attrs.frozen(kw_only=True)
class Change:
    """Setting with which a run takes less."""

    settings: Mapping[str, object]
    """Name → value."""
    cost: str
    """What it costs, in words."""
    planned: int
    """Bytes of the phase that then takes most."""
    fits: bool
    """Whether the run then fits."""

    @property
    def named(self) -> str:
        """Names and values, as in a recipe."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())

    def __str__(self) -> str:
        return f"{self.named}: {size(self.planned)}, which {'fits' if self.fits else 'does not fit yet'}; {self.cost}"


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Memory of a run by phases, or the reason for which it was not computed."""

    target: Target
    ranks: int = 1
    tokens: int = 0
    """Tokens of the micro-batch that it was computed for, the plan's largest."""
    phases: tuple[Phase, ...] = ()
    changes: tuple[Change, ...] = ()
    """Settings to change where it does not fit, the cheapest first."""
    notes: tuple[str, ...] = ()
    """What was assumed."""
    refused: str | None = None
    """Why it was not computed."""
    trained: int = 0
    """Bytes of all that trains, over all ranks."""
    state: int = 0
    """Bytes of a full state, over all ranks."""

    @property
    def most(self) -> Phase | None:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.planned, default=None)

    @property
    def available(self) -> int | None:
        """Bytes of a device that a plan may fill; None where its memory is not known."""
        return None if self.target.limit is None else int(SHARE * self.target.limit)

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits; None where that is not known."""
        if self.most is None or self.available is None:
            return None
        return self.most.planned <= self.available

    def lines(self) -> list[str]:
        """Return the plan as lines for a person."""
        if self.refused is not None:
            return [f"memory: not computed: {self.refused}"]
        of = "" if self.target.limit is None else f" of {room(self.target)}"
        many = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        lines = [f"memory on {self.target.name}{many}, with the largest micro-batch of {self.tokens:,} tokens:"]
        for phase in self.phases:
            parts = ", ".join(f"{name} {size(number)}" for name, number in phase.parts.items() if number)
            lines.append(f"  {phase.name:<11}{size(phase.planned):>10}  ({parts})")
        lines += [f"  {note}" for note in self.notes]
        if self.fits:
            lines.append(f"it fits: {size(self.most.planned)}{of}")  # type: ignore[union-attr]  # it fits, so there is one
        elif self.fits is False:
            lines.append(f"it does NOT fit: {self.lack}.")
        return lines

    @property
    def lack(self) -> str:
        """The phase that takes most, and what a plan may fill; for a plan that does not fit."""
        assert self.most is not None
        assert self.target.limit is not None
        assert self.available is not None
        return (
            f"the {self.most.name} takes {size(self.most.planned)}, and a plan may fill {size(self.available)} "
            f"({SHARE:.0%} of {room(self.target)})"
        )

    def remedies(self) -> list[str]:
        """Return as lines what takes less, where it does not fit; none where it does."""
        if self.fits is not False:
            return []
        if not self.changes:
            return ["no setting was found with which it takes less"]
        return ["what takes less, the cheapest first:", *(f"  {change}" for change in self.changes)]

    def as_json(self) -> dict[str, Any]:
        """Return what memory.json holds."""
        return {
            "machine": self.target.name,
            "limit": self.target.limit,
            "available": self.available,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "fits": self.fits,
            "phases": [attrs.asdict(phase) for phase in self.phases],
            "changes": [attrs.asdict(change) for change in self.changes],
            "notes": list(self.notes),
            "refused": self.refused,
            "state": self.state,
        }


def room(target: Target) -> str:
    """Write what tensors may fill of a device; of one elsewhere with what it was said to have.

    >>> room(Target.parse("1GB"))
    "the 512.0 MiB that 1.00 GiB leave beside a chip's context"
    """
    assert target.limit is not None
    if not target.elsewhere:
        return size(target.limit)
    return f"the {size(target.limit)} that {size(target.limit + CONTEXT)} leave beside a chip's context"


def size(number: int) -> str:
    """Write bytes for a person.

    >>> size(3 * 2**30 // 2), size(5 * 2**20)
    ('1.50 GiB', '5.0 MiB')
    """
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
