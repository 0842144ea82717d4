"""Measurements one after another → which was the best, and whether it is time to stop."""

from __future__ import annotations

import math

import attrs

from forge._errors import SettingsError
from forge._task import Measured

_LOW = ("loss", "kl")


@attrs.frozen(kw_only=True)
class Best:
    """The best measurement so far."""

    value: float | None = None
    step: int = 0
    waited: int = 0
    """Measurements since then."""

    def after(self, measured: Measured, step: int, metric: str | None) -> Best:
        """The same once a further measurement came; one that is no number is never the best.

        Raises:
            SettingsError: nothing of that name is measured.

        """
        name, value = figure_for_best(measured, metric)
        better = math.isfinite(value) and (
            self.value is None or (value < self.value if name.endswith(_LOW) else value > self.value)
        )
        return Best(value=value, step=step) if better else attrs.evolve(self, waited=self.waited + 1)


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
