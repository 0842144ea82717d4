"""Settings of sequence classification: the labels, and whether a row has one or several."""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import one_of

ProblemType = Literal["auto", "single_label_classification", "multi_label_classification"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _labels(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field.name} must be a list of names, got {value!r}")
    if len(value) < 2 or not all(name.strip() for name in value) or len(set(value)) < len(value):
        raise ValueError(f"{field.name} must be two different names at least, none of them empty, got {value!r}")


@attrs.frozen(kw_only=True)
class ClassifySettings:
    """Labels that a sequence classifier tells apart.

    >>> ClassifySettings(labels=["spam"])
    Traceback (most recent call last):
        ...
    ValueError: labels must be two different names at least, none of them empty, got ('spam',)
    """

    labels: tuple[str, ...] | None = attrs.field(
        default=None, converter=_as_tuple, validator=attrs.validators.optional(_labels)
    )
    """Names of the labels, in the order of the model's outputs. By default those of the model, where it is a classifier
    already, else those in the training rows, sorted."""
    problem_type: ProblemType = attrs.field(default="auto", validator=one_of(ProblemType))
    """Whether a row is one of the labels (cross entropy) or may have several or none (binary cross entropy of each), as
    transformers calls it. By default the rows say it: `label` is one, `labels` are several."""
