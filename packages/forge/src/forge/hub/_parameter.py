"""One parameter of training_hub, and what becomes of its value here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge._errors import SettingsError

REQUIRED = inspect.Parameter.empty
Given = Mapping[str, Any]
"""Parameters of a call that are not None, by name."""
Taken = Mapping[str, object]
"""Settings of forge by name."""


@attrs.frozen
class Parameter:
    """One parameter of a function of training_hub."""

    name: str
    ours: str = ""
    """Settings that its value becomes, separated by commas, as the page shows them."""
    note: str = ""
    """Difference, as the page shows it."""
    default: object = attrs.field(default=None, kw_only=True)
    """Default in training_hub's signature."""
    take: Callable[[Any, Given], Taken] | None = attrs.field(default=None, kw_only=True)
    """Value and all parameters → settings; by default the value becomes the setting `ours`."""
    neutral: tuple[object, ...] = attrs.field(default=(), kw_only=True)
    """Values that ask for what is always so here."""
    refused: str = attrs.field(default="", kw_only=True)
    """What to write instead; any value that is not neutral is refused with it."""
    documented: bool = attrs.field(default=True, kw_only=True)
    """Whether it is in the signature; others come through its keyword arguments."""

    def settings(self, function: str, value: Any, given: Given) -> Taken:
        """Return the settings that a value becomes.

        Raises:
            SettingsError: the parameter, or this value of it, is not available.

        """
        if any(value is each or (type(value) is type(each) and value == each) for each in self.neutral):
            return {}
        if self.refused:
            raise SettingsError(f"{function}: {self.name}={value!r} is not available: {self.refused}.")
        if self.take is not None:
            return self.take(value, given)
        return {self.ours: value}


def same(names: str, note: str = "") -> tuple[Parameter, ...]:
    """Return parameters that are settings of the same name and meaning."""
    return tuple(Parameter(name, name, note) for name in names.split())


def required(names: str) -> tuple[Parameter, ...]:
    """Return required parameters that are settings of the same name and meaning."""
    return tuple(Parameter(name, name, default=REQUIRED) for name in names.split())


def refused(names: str, instead: str, *, neutral: tuple[object, ...] = ()) -> tuple[Parameter, ...]:
    """Return parameters that are not available, with what to write instead."""
    return tuple(Parameter(name, refused=instead, neutral=neutral) for name in names.split())


def hidden(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """Return parameters that come through keyword arguments."""
    return tuple(attrs.evolve(each, documented=False) for each in parameters)
