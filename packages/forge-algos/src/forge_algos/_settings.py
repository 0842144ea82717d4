"""The settings of this room, as two frozen classes; neither torch nor peft is loaded to read them.

A docstring under a field becomes its line in `--help` and in the reference page.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import attrs

Schedule = Literal["cosine", "linear", "constant"]
Adapter = Literal["none", "lora"]
OnNaN = Literal["stop", "skip"]

_LEARNING_RATE: dict[str, float] = {"none": 2e-5, "lora": 2e-4}


def _number(
    *, kind: type[int] | type[float], low: float = 0, above: bool = False, below: float = float("inf")
) -> Callable[..., None]:
    """A validator for a finite number in [low, below), or in (low, below) with `above`; a bool is no number here."""
    accepted = (int,) if kind is int else (int, float)

    def check(_instance: Any, field: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, accepted):
            wanted = "a whole number" if kind is int else "a number"
            raise TypeError(f"{field.name} must be {wanted}, got {value!r} ({type(value).__name__})")
        if not (low < value if above else low <= value) or not value < below:
            least = f"above {low:g}" if above else f"at least {low:g}"
            most = "finite" if below == float("inf") else f"below {below:g}"
            raise ValueError(f"{field.name} must be {least} and {most}, got {value!r}")

    return check


def _one_of(choices: Any) -> Callable[..., None]:
    """A validator for the values of a Literal."""
    return attrs.validators.in_(get_args(choices))


def _names(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_names(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field.name} must be a list of module names, got {value!r} ({type(value).__name__})")
    if not value or not all(value):
        raise ValueError(f"{field.name} must name at least one module and no empty name, got {value!r}")


@attrs.frozen(kw_only=True)
class AdapterSettings:
    """How much of the model moves: everything, or a low-rank adapter (arXiv 2106.09685).

    >>> AdapterSettings(adapter="lora", lora_r=8).lora_r
    8
    >>> AdapterSettings(lora_r=8)
    Traceback (most recent call last):
        ...
    ValueError: lora_r=8 has no effect with adapter='none'; leave it out, or set adapter='lora'
    """

    adapter: Adapter = attrs.field(default="none", validator=_one_of(Adapter))
    """What is trained: every weight ("none") or low-rank adapters beside the frozen linear layers ("lora")."""
    lora_r: int = attrs.field(default=16, validator=_number(kind=int, low=1))
    """Rank of the adapters."""
    lora_alpha: float = attrs.field(default=32.0, validator=_number(kind=float, above=True))
    """Scale of the adapters: what they add is multiplied by lora_alpha / lora_r."""
    lora_dropout: float = attrs.field(default=0.0, validator=_number(kind=float, below=1.0))
    """Share of the adapters' inputs set to zero while training, from 0 to below 1."""
    target_modules: tuple[str, ...] | None = attrs.field(
        default=None, converter=_names, validator=attrs.validators.optional(_check_names)
    )
    """Names, or last parts of names, of the linear layers that get an adapter. By default every one but the head."""

    def __attrs_post_init__(self) -> None:
        if self.adapter != "none":
            return
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name != "adapter" and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no effect with adapter='none'; leave it out, or set adapter='lora'"
                )


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101), its schedule, and gradient clipping.

    >>> OptimizerSettings().resolve("lora").learning_rate
    0.0002
    """

    learning_rate: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_number(kind=float, above=True))
    )
    """Highest learning rate of the schedule. By default 2e-5, or 2e-4 with adapter=lora."""
    weight_decay: float = attrs.field(default=0.0, validator=_number(kind=float))
    """Decoupled weight decay, on matrices only: norms and biases never decay."""
    beta1: float = attrs.field(default=0.9, validator=_number(kind=float, below=1.0))
    """Decay of AdamW's running mean of the gradients."""
    beta2: float = attrs.field(default=0.95, validator=_number(kind=float, below=1.0))
    """Decay of AdamW's running mean of the squared gradients."""
    eps: float = attrs.field(default=1e-8, validator=_number(kind=float, above=True))
    """Added to the denominator of AdamW's step."""
    max_grad_norm: float = attrs.field(default=1.0, validator=_number(kind=float))
    """Gradients are scaled down to at most this global norm before each step; 0 turns clipping off."""
    warmup_steps: int = attrs.field(default=0, validator=_number(kind=int))
    """Steps over which the learning rate rises linearly to its highest value, which the last of them has."""
    lr_scheduler: Schedule = attrs.field(default="cosine", validator=_one_of(Schedule))
    """How the learning rate goes on after the warm-up: down to 0 as a cosine or a line, or constant."""
    on_nan: OnNaN = attrs.field(default="stop", validator=_one_of(OnNaN))
    """What a loss or gradient that is NaN or infinite does: stop the run before the weights move, or skip that step's move."""

    def resolve(self, adapter: Adapter = "none") -> "OptimizerSettings":
        """The same settings with the learning rate that is used where none is given."""
        if self.learning_rate is not None:
            return self
        return attrs.evolve(self, learning_rate=_LEARNING_RATE[adapter])
