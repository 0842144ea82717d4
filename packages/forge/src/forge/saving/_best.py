"""Evaluations one after another → the best one, and the file that names the best export."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs

import forge_dist
from forge._errors import SettingsError
from forge._result import BEST
from forge.saving._directories import remove_at_once
from forge.saving._exports import MARK
from forge.saving._hashes import FOLDER
from forge.tasks._task import Evaluation

LOW = frozenset({"loss", "nll", "kl", "kl_base", "rejected_reward", "rejected_logp"})
"""Figures of which less is better; of all others that `metric_for_best` may name more is."""


@attrs.frozen(kw_only=True)
class Best:
    """Best evaluation so far."""

    metric: str | None = None
    """Figure that is compared."""
    value: float | None = None
    step: int = 0
    waited: int = 0
    """Evaluations since the best one."""

    def after(self, evaluation: Evaluation, step: int, metric: str | None) -> Best:
        """Return the best after a further evaluation.

        A figure that is not finite is never the best, and another metric than before begins anew.

        Raises:
            SettingsError: nothing of that name is measured.

        """
        name, value = figure_for_best(evaluation, metric)
        before = self if name == self.metric else Best(metric=name)
        better = math.isfinite(value) and (
            before.value is None or (value < before.value if name in LOW else value > before.value)
        )
        return Best(metric=name, value=value, step=step) if better else attrs.evolve(before, waited=before.waited + 1)


def figure_for_best(evaluation: Evaluation, metric: str | None) -> tuple[str, float]:
    """Return name and value of the figure to compare: by default the loss, or else the reward.

    Raises:
        SettingsError: nothing of that name is measured.

    """
    name = metric or ("reward" if evaluation.loss is None else "loss")
    value = evaluation.value(name)
    if value is None:
        known = [*(["loss"] if evaluation.loss is not None else []), *evaluation.figures]
        raise SettingsError(f"metric_for_best={name!r} is not measured here; what is: {', '.join(known)}")
    return name, value


def write_best(run: Path, best: Best) -> None:
    """Write hf_format/best.json: which evaluation hf_format/best is the model of."""
    forge_dist.write_text_atomically(run / FOLDER / MARK, json.dumps(attrs.asdict(best)) + "\n")


def remove_outdated_best(run: Path, best: Best) -> bool:
    """Remove hf_format/best where it is not of the best step; return whether it was removed.

    A run that is resumed from an earlier state knows another step as its best.
    """
    folder, mark = run / FOLDER / BEST, run / FOLDER / MARK
    try:
        step = json.loads(mark.read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        step = None
    if step == best.step and folder.exists():
        return False
    mark.unlink(missing_ok=True)
    if folder.exists():
        remove_at_once(folder)
        return True
    return False
