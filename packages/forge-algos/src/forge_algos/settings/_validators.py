"""Validators of settings, and the choices in their messages; no torch is loaded."""

import math
from collections.abc import Callable, Collection
from typing import Any, get_args

import attrs

LARGEST = 1e18
"""Most that a number may be which is no bound, time or share of its own: its square, and its product with any loss, are within
float32, in which losses are computed. Beyond, infinity times 0 is a loss that is not a number, and no setting's name."""


def number(
    *, kind: type[int] | type[float], low: float = 0, above: bool = False, below: float = math.inf, high: float = math.inf
) -> Callable[..., None]:
    """Return a validator for a finite number in [low, below), or in (low, below) with `above`.

    With `high` the number may be that, and no more; one that is no whole number is at most `LARGEST`, below 0 at least minus
    that. A bool is not taken for a number.
    """
    accepted = (int,) if kind is int else (int, float)

    def check(_instance: Any, field: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, accepted):
            wanted = "a whole number" if kind is int else "a number"
            raise TypeError(f"{field.name} must be {wanted}, got {value!r} ({type(value).__name__})")
        # Minus infinity is itself outside of an interval that begins there.
        if not (low < value if above or low == -math.inf else low <= value) or not value < below or value > high:
            least = [] if low == -math.inf else [f"above {low:g}" if above else f"at least {low:g}"]
            most = f"at most {high:g}" if high < below else "finite" if below == math.inf else f"below {below:g}"
            raise ValueError(f"{field.name} must be {' and '.join([*least, most])}, got {value!r}")
        if kind is float and abs(value) > LARGEST:
            side = f"at most {LARGEST:g}" if value > 0 else f"at least {-LARGEST:g}"
            raise ValueError(f"{field.name} must be {side}, beyond which float32 has no room for a loss, got {value!r}")

    return check


logits_divisor = number(kind=float, low=1e-6)
"""Validator of a temperature: logits of any model stay within float32, and below it the likeliest token is all anyway."""


def one_of(choices: Any) -> Callable[..., None]:
    """Return a validator for the values of a Literal."""
    return attrs.validators.in_(get_args(choices))


def check_settings(kind: type, value: Any) -> None:
    """Refuse settings of an objective that are none, such as a dict of them."""
    if not isinstance(value, kind):
        raise TypeError(
            f"settings must be {kind.__name__}, got {value!r} ({type(value).__name__}): write "
            f"settings={kind.__name__}(name=value, ...)"
        )


def settings_of(kind: type) -> Callable[..., None]:
    """Return a validator for an objective's settings."""
    return lambda _instance, _field, value: check_settings(kind, value)


def key_of(table: Collection[str]) -> Callable[..., None]:
    """Return a validator for the names in a table, rows that are added later among them."""

    def check(_instance: Any, field: Any, value: Any) -> None:
        if value not in tuple(table):
            raise ValueError(f"'{field.name}' must be in {tuple(table)!r} (got {value!r})")

    return check


def either(choices: Collection[str]) -> str:
    """Join names for a message: a, b or c."""
    *most, last = choices
    return f"{', '.join(most)} or {last}" if most else last
