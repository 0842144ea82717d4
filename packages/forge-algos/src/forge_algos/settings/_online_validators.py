"""Validators of settings of online methods: names of functions, weights, ranges, addresses."""

from typing import Any

import attrs

from forge_algos.settings._validators import number

# Any: the type checker does not follow a default of one type with a validator of another.
share: Any = attrs.validators.and_(number(kind=float), attrs.validators.le(1))
above_share: Any = attrs.validators.and_(number(kind=float, above=True), attrs.validators.le(1))
clip_or_none: Any = attrs.validators.optional(number(kind=float, above=True, below=1.0))
number_or_none: Any = attrs.validators.optional(number(kind=float, low=float("-inf")))
above_or_none: Any = attrs.validators.optional(number(kind=float, above=True))


def as_tuple(value: Any) -> Any:
    """Make a tuple of one value or of a list."""
    return (value,) if isinstance(value, str | int | float) else tuple(value) if isinstance(value, list) else value


def check_rewards(_instance: Any, field: Any, value: Any) -> None:
    """Refuse what is no list of names of functions."""
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field.name} must be a list of 'package.module:function' or 'file.py:function', got {value!r}")
    for name in value:
        module, colon, function = name.partition(":")
        if not module or not colon or not function:
            raise ValueError(
                f"{field.name} must name functions as 'package.module:function' or 'file.py:function', got {name!r}"
            )
    if len(set(value)) != len(value):
        raise ValueError(f"{field.name} names a function twice: {value!r}; give it a larger weight instead")


def check_weights(_instance: Any, field: Any, value: Any) -> None:
    """Refuse what is no list of numbers."""
    if not isinstance(value, tuple):
        raise TypeError(f"{field.name} must be a list of numbers, got {value!r}")
    for weight in value:
        number(kind=float, low=float("-inf"))(_instance, field, weight)


def check_range(_instance: Any, field: Any, value: Any) -> None:
    """Refuse what is not two numbers, the lesser first."""
    check_weights(_instance, field, value)
    if len(value) != 2 or not value[0] < value[1]:
        raise ValueError(f"{field.name} must be two numbers, the lesser first, got {list(value)}")


def check_class(_instance: Any, field: Any, value: Any) -> None:
    """Refuse what is no name of a class."""
    if not isinstance(value, str):
        raise TypeError(f"{field.name} must be 'package.module:Class', got {value!r}")
    module, colon, name = value.partition(":")
    if not module or not colon or not name:
        raise ValueError(f"{field.name} must name a class as 'package.module:Class', got {value!r}")


def check_url(_instance: Any, field: Any, value: Any) -> None:
    """Refuse what is no address."""
    if not isinstance(value, str):
        raise TypeError(f"{field.name} must be an address such as http://127.0.0.1:8000, got {value!r}")
    kind, colon, rest = value.partition("://")
    if kind not in ("http", "https") or not colon or not rest.strip("/"):
        raise ValueError(f"{field.name} must be an address such as http://127.0.0.1:8000, got {value!r}")
