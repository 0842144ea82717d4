"""Answer of a dry run: text for a person, with figures for a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class DryRun(str):
    """Answer of a dry run: the text for a person, with the memory plan's figures as attributes.

    As text it is what `--dry-run` prints, and can be used as any string. The figures are those of one device, in bytes; each is
    None where no memory plan was made (by another backend, for a finished run, on a rank that is not the first) or where it
    could not be computed.

    >>> found = DryRun("...", {"fits": False, "available": 70, "phases": [{"name": "step", "planned": 80}], "changes": []})
    >>> found.fits, found.phase, found.peak_bytes, found.available_bytes
    (False, 'step', 80, 70)

    """

    __slots__ = ("memory",)
    memory: Mapping[str, Any] | None
    """The memory plan as memory.json has it: `machine`, `limit`, `tokens`, `phases` with their parts, `notes`, `refused`."""

    def __new__(cls, text: str = "", memory: Mapping[str, Any] | None = None) -> Self:
        """Make it.

        Args:
            text: what the run would do.
            memory: what memory.json would hold; None where no plan was made.
        """
        made = super().__new__(cls, text)
        made.memory = memory
        return made

    @property
    def fits(self) -> bool | None:
        """Whether every phase of the run fits the devices' memory; None where that is not known."""
        return (self.memory or {}).get("fits")

    @property
    def phase(self) -> str | None:
        """Name of the phase that takes most: rollout, step, evaluation, saving or export."""
        return (self._most or {}).get("name")

    @property
    def peak_bytes(self) -> int | None:
        """Bytes that a device holds at the worst moment of the run."""
        return (self._most or {}).get("planned")

    @property
    def available_bytes(self) -> int | None:
        """Bytes of a device that a plan may fill; None where its memory is not known."""
        return (self.memory or {}).get("available")

    @property
    def suggestions(self) -> tuple[Mapping[str, Any], ...]:
        """Settings with which a run that does not fit takes less, the cheapest first.

        Each has `settings` (name → value, as the verb takes them), `planned` (bytes of the phase that then takes most), `fits`
        and `cost`, in words.
        """
        return tuple((self.memory or {}).get("changes", ()))

    @property
    def _most(self) -> Mapping[str, Any] | None:
        return max((self.memory or {}).get("phases", ()), key=lambda phase: phase["planned"], default=None)
