"""Callbacks of training_hub → callbacks of forge, called with what the run wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from forge._errors import SettingsError

_NEVER = {
    "on_step_begin": "a run says what a step was once it is made: on_step_end, on_log",
    "on_save": "states are saved in the background: events.jsonl of the run records exports",
}


@attrs.define(kw_only=True)
class TrainingHubContext:
    """State of the run that a callback of training_hub is called with."""

    step: int = 0
    epoch: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    is_main_process: bool = True
    output_dir: str = ""
    metrics: dict[str, Any] = attrs.field(factory=dict)
    """The line of metrics.jsonl."""
    control: None = None
    """Always None: a callback cannot change or stop a run."""


class TrainingHubCallback:
    """Base class of callbacks; subclasses override the hooks that they need."""

    run_on_all_ranks: bool = False

    def on_train_begin(self, context: TrainingHubContext) -> None:
        """Take the state of the first line that the run writes."""

    def on_epoch_begin(self, context: TrainingHubContext) -> None:
        """Take the state after the first step of an epoch."""

    def on_step_begin(self, context: TrainingHubContext) -> None:
        """Take nothing: a class that overrides this is refused."""

    def on_log(self, context: TrainingHubContext) -> None:
        """Take the state after each step."""

    def on_evaluate(self, context: TrainingHubContext) -> None:
        """Take the state after each measurement on held-out data."""

    def on_save(self, context: TrainingHubContext) -> None:
        """Take nothing: a class that overrides this is refused."""

    def on_step_end(self, context: TrainingHubContext) -> None:
        """Take the state after each step."""

    def on_epoch_end(self, context: TrainingHubContext) -> None:
        """Take the state after the last step of an epoch."""

    def on_train_end(self, context: TrainingHubContext) -> None:
        """Take the last state, once the run is finished."""


def adapted(callbacks: Any) -> list[object]:
    """Return callbacks for forge: its own as they are, those of training_hub adapted.

    Raises:
        SettingsError: a hook that is never called is overridden.

    """
    if isinstance(callbacks, TrainingHubCallback) or not isinstance(callbacks, Iterable):
        callbacks = [callbacks]
    return [_Adapted(each) if isinstance(each, TrainingHubCallback) else each for each in callbacks]


class _Adapted:
    """A callback of training_hub as one of forge."""

    def __init__(self, callback: TrainingHubCallback) -> None:
        kind = type(callback)
        for name, instead in _NEVER.items():
            if getattr(kind, name) is not getattr(TrainingHubCallback, name):
                raise SettingsError(f"callbacks: {kind.__name__}.{name} would never be called: {instead}.")
        if callback.run_on_all_ranks:
            raise SettingsError(
                f"callbacks: {kind.__name__}.run_on_all_ranks is not available: callbacks are called once, in the process that "
                "called the verb. Leave it out."
            )
        self._callback = callback
        self._last: TrainingHubContext | None = None

    def on_step(self, record: Mapping[str, Any]) -> None:
        """Call what belongs to a step."""
        context = self._context(record)
        if self._last is None or self._last.epoch != context.epoch:
            if self._last is not None:
                self._callback.on_epoch_end(self._last)
            else:
                self._begin(context)
            self._callback.on_epoch_begin(context)
        self._last = context
        self._callback.on_log(context)
        self._callback.on_step_end(context)

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Call what belongs to a measurement."""
        context = self._context(record)
        self._begin(context)
        self._callback.on_evaluate(context)

    def on_end(self, result: Any) -> None:
        """Call what belongs to the end."""
        last = self._last or TrainingHubContext(step=result.steps, loss=result.loss)
        last = attrs.evolve(last, output_dir=str(result.output_dir))
        if self._last is not None:
            self._callback.on_epoch_end(last)
        self._callback.on_train_end(last)

    _begun = False

    def _begin(self, context: TrainingHubContext) -> None:
        if not self._begun:
            self._begun = True
            self._callback.on_train_begin(context)

    def _context(self, record: Mapping[str, Any]) -> TrainingHubContext:
        before = self._last or TrainingHubContext()
        return TrainingHubContext(
            step=int(record.get("step", before.step)),
            epoch=int(record.get("epoch", before.epoch)),
            loss=record.get("loss", before.loss),
            learning_rate=record.get("lr", before.learning_rate),
            metrics=dict(record),
        )
