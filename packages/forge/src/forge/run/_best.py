"""Measurements one after another → which was the best, and whether it is time to stop; and the mark of the best model's export."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs

import forge_dist
from forge._errors import SettingsError
from forge._result import BEST
from forge.run._directories import discard
from forge.tasks._task import Measured

LOW = frozenset({"loss", "nll", "kl", "rejected_reward", "rejected_logp"})
"""Figures of which less is better; of all others that `metric_for_best` may name it is more."""


@attrs.frozen(kw_only=True)
class Best:
    """The best measurement so far."""

    metric: str | None = None
    """The figure that says so."""
    value: float | None = None
    step: int = 0
    waited: int = 0
    """Measurements since then."""

    def after(self, measured: Measured, step: int, metric: str | None) -> Best:
        """The same once a further measurement came; one that is no number is never the best, and another figure begins anew.

        Raises:
            SettingsError: nothing of that name is measured.

        """
        name, value = figure_for_best(measured, metric)
        before = self if name == self.metric else Best(metric=name)
        better = math.isfinite(value) and (
            before.value is None or (value < before.value if name in LOW else value > before.value)
        )
        return Best(metric=name, value=value, step=step) if better else attrs.evolve(before, waited=before.waited + 1)


def figure_for_best(measured: Measured, metric: str | None) -> tuple[str, float]:
    """Name and value of the figure that says what is best: by default the loss, or the reward where there is none.

    Raises:
        SettingsError: nothing of that name is measured.

    """
    name = metric or ("reward" if measured.loss is None else "loss")
    value = measured.value(name)
    if value is None:
        known = [*(["loss"] if measured.loss is not None else []), *measured.figures]
        raise SettingsError(f"metric_for_best={name!r} is not measured here; what is: {', '.join(known)}")
    return name, value


def mark_best(run: Path, best: Best) -> None:
    """Write down which measurement hf_format/best is the model of."""
    forge_dist.write_text_atomically(run / "hf_format" / "best.json", json.dumps(attrs.asdict(best)) + "\n")


def forget_other_best(run: Path, best: Best) -> bool:
    """Remove hf_format/best where a run that goes on from an earlier state knows another measurement as the best; say whether it did."""
    folder, mark = run / "hf_format" / BEST, run / "hf_format" / "best.json"
    if not folder.exists():
        return False
    try:
        step = json.loads(mark.read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        step = None
    if step == best.step:
        return False
    mark.unlink(missing_ok=True)
    discard(folder)
    return True
