"""Model of a run → what rows of groups (pairs, completions of a prompt) have once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import forge_algos
import forge_packing
from forge.settings._backends import FORGE
from forge.tasks._media import has_media
from forge.tasks.items._items import in_own_lines

if TYPE_CHECKING:
    from forge.tasks._task import Run


class Sharing(NamedTuple):
    """What a row of groups has once."""

    prompt: bool
    """The prompt of a group's completions."""
    prefix: bool
    """What different groups begin with alike, such as a system prompt."""
    why: str
    """Why the prompt is shared, or is not."""

    def note(self, run: Run, one: str, groups: str) -> None:
        """Log that `one` computes a prompt, and `groups` begin alike.

        Nothing is logged where each sample is a line by itself.
        """
        if in_own_lines(run.settings):
            return
        across = f", what {groups} begin with alike once a micro-batch" if self.prefix else ""
        run.report.note(f"prompts: computed once {one}{across}: {self.why}")

    @property
    def of_rows(self) -> dict[str, Any]:
        """How rows of groups are made, as arguments of `forge_algos.online`'s functions."""
        if not self.prefix:
            return {"share_prompts": self.prompt}
        collate = partial(forge_packing.collate_groups, share_prompt=True, share_prefix=True)
        return {"share_prompts": self.prompt, "collate": collate, "least_prefix": forge_packing.LEAST_PREFIX}

    def beginnings(self, *prompts: Any) -> list[forge_algos.online.Beginnings]:
        """Return what prompts of each kind begin with alike; [] where rows have that repeated."""
        return [forge_algos.online.Beginnings(each, forge_packing.LEAST_PREFIX) for each in prompts if self.prefix]


def may_share(s: Any) -> bool:
    """Return whether by the settings the attention may know shared tokens."""
    return s.backend.backend == FORGE and not in_own_lines(s) and s.device.attention not in ("sdpa", "eager")


def sharing(run: Run, *others: Any) -> Sharing:
    """Return what attention and dropout allow, of the model and of others given its rows.

    Every rank calls this.
    """
    if has_media(*(items.store for items in (run.train, run.held_out) if items is not None)):
        return Sharing(prompt=False, prefix=False, why="its tokens may stand for other media")
    share, why = False, ""
    for model in (run.model, *others):
        share, why = forge_algos.shares_prompts(model, device=run.device, autocast=run.autocast)
        if not share:
            break
    # Completions have the dropout of one prompt; groups have each their own.
    return Sharing(share, share and forge_algos.first_dropout(run.model) is None, why)
