"""Held-out rows of a run → KL divergence of its model from the one that it began as."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
from forge._counted import counted, figure
from forge._errors import SettingsError
from forge.tasks._reference_model import why_not_off
from forge.tasks._task import Evaluation, Run, StepSource


class BaseDivergence:
    """The figure `kl_base` of each measurement; nothing where the settings do not ask for it.

    The base is the trained model with its adapter switched off, where that is the initial model, or else a frozen copy of it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._base: Any = None
        if run.settings.evaluation.kl_base:
            off = why_not_off(run.settings) is None
            self._base = "adapter_off" if off else run.load_frozen(None)

    def added(self, found: Evaluation, source: StepSource, model: Any) -> Evaluation:
        """Return a measurement of a model with `kl_base` among its figures; every rank calls this."""
        if self._base is None:
            return found
        run, base = self._run, self._base
        if model is not run.model and isinstance(base, str):
            with forge_algos.adaptations.switched_off(run.model):
                measured = self._measured(source, model, run.model)
        else:
            measured = self._measured(source, model, base)
        return attrs.evolve(found, figures={**found.figures, "kl_base": measured})

    def _measured(self, source: StepSource, model: Any, base: Any) -> float:
        run = self._run
        return forge_algos.evaluate(
            model,
            source.held_out_rows(),
            objective=forge_algos.BaseKL(base=base),
            device=run.device,
            autocast=run.autocast,
            parallel=run.strategy,
        ).loss


def ended_by(s: Any, *, waited: int, measured: Evaluation | None) -> tuple[str, str] | None:
    """Return which setting ends a run after a measurement, and why; None where none does.

    Args:
        s: the settings.
        waited: measurements since the best one.
        measured: the measurement after the last step, if there was one.

    """
    patience, limit = s.evaluation.early_stopping_patience, s.evaluation.stop_at_kl
    if patience and waited >= patience:
        return "early_stopping_patience", f"{counted(patience, 'measurements')} brought nothing better"
    moved = None if measured is None else measured.figures.get("kl_base")
    if limit is not None and moved is not None and not moved < limit:
        return (
            "stop_at_kl",
            f"the model has moved {figure(moved)} nats a token from its base (kl_base), and stop_at_kl={limit:g}",
        )
    return None


def check_base_kl(s: Any, model_task: Any) -> None:
    """Raise SettingsError where a model predicts no tokens, so that nothing diverges."""
    if s.evaluation.kl_base and model_task != "causal":
        raise SettingsError(
            "kl_base is the divergence between predictions of the next token, and a reward model makes none, nor does a "
            "classifier or an embedding model: leave it out."
        )
