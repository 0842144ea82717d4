"""Settings of the trackers, which are sent the record of a run."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any, cast

import attrs

from forge.trackers._kubeflow import in_trainjob


def _text(_: object, field: attrs.Attribute[str | None], value: object) -> None:
    """Raise TypeError unless the value is None or a text that names something."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise TypeError(f"{field.name} must be a text that is not empty, not {value!r}")


def _no_password(_: object, field: attrs.Attribute[str | None], value: str | None) -> None:
    """Raise ValueError for an address with a password, which config.yaml would show."""
    try:
        address = urllib.parse.urlsplit(value or "")
    except ValueError as error:
        raise ValueError(f"{field.name} is no address: {error}") from None
    if address.password is not None or address.query:
        raise ValueError(
            f"{field.name} holds a password or a query, and config.yaml would show it: give the address alone, and the rest in "
            "the environment variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )


def _optional(*checks: Any) -> Any:
    return attrs.field(default=None, validator=[_text, *checks])


@attrs.frozen(kw_only=True)
class TrackerSettings:
    """Settings of the trackers, which are sent the lines of metrics.jsonl in the background."""

    trackers: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=lambda given: tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else given,
        validator=cast(
            "Any",
            attrs.validators.optional(
                attrs.validators.deep_iterable(attrs.validators.instance_of(str), attrs.validators.instance_of(tuple))
            ),
        ),
    )
    """Trackers that are sent the record: wandb, mlflow, tensorboard, trackio, kubeflow, or one of the entry-point group
    forge.trackers. By default those of which a setting is given, and kubeflow in a TrainJob that takes updates."""
    wandb_project: str | None = _optional()
    """Project at Weights & Biases; by default that of WANDB_PROJECT, or forge."""
    wandb_entity: str | None = _optional()
    """User or team at Weights & Biases that the project belongs to."""
    wandb_run_name: str | None = _optional()
    """Name of the run at Weights & Biases; by default that of the run directory."""
    mlflow_tracking_uri: str | None = _optional(_no_password)
    """Address of an MLflow server, or a directory; by default that of MLFLOW_TRACKING_URI, or a directory in the run."""
    mlflow_experiment_name: str | None = _optional()
    """Experiment at MLflow; by default that of MLFLOW_EXPERIMENT_NAME, or forge."""
    mlflow_run_name: str | None = _optional()
    """Name of the run at MLflow; by default that of the run directory."""
    tensorboard_log_dir: str | None = _optional()
    """Directory of the TensorBoard files, with a folder a run; by default one in the run directory."""

    def __attrs_post_init__(self) -> None:
        if self.trackers is None:
            return
        for name in self.given():
            tracker = name.partition("_")[0]
            if tracker not in self.trackers:
                raise ValueError(f"{name} has no effect without the tracker {tracker}: add it to trackers, or leave it out")

    def given(self) -> list[str]:
        """Return the names of the settings of single trackers that have a value."""
        names = [field.name for field in attrs.fields(TrackerSettings) if field.name != "trackers"]
        return [name for name in names if getattr(self, name) is not None]

    def chosen(self) -> tuple[str, ...]:
        """Return the trackers of this run: those named, or those with a setting and a TrainJob's."""
        if self.trackers is not None:
            return tuple(dict.fromkeys(self.trackers))
        return (*dict.fromkeys(name.partition("_")[0] for name in self.given()), *(["kubeflow"] if in_trainjob() else []))
