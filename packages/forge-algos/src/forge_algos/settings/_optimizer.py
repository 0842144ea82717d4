"""Settings of the optimizer and its schedule. Reading them loads no torch.

A docstring under a field becomes its line in `--help` and in the reference page.
"""

import math
from typing import Literal

import attrs

from forge_algos.settings._adapter_table import Adapter, default_learning_rate
from forge_algos.settings._validators import either, number, one_of

Optimizer = Literal["adamw", "adafactor", "muon", "schedule_free", "adamw_8bit", "apollo", "apollo_mini"]
Schedule = Literal[
    "cosine",
    "linear",
    "constant",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "inverse_sqrt",
    "polynomial",
    "warmup_stable_decay",
]
OnNaN = Literal["stop", "skip"]

SCHEDULES_WITHOUT_LENGTH = ("constant", "inverse_sqrt")
"""Values of lr_scheduler under which no step's rate depends on the number of steps in the run."""

# Constants, because the type checker takes a literal of more than four for any string.
_OPTIMIZER: Optimizer = "adamw"
_SCHEDULE: Schedule = "cosine"

ADAFACTOR_SCALE = 50.0
"""Factor on Adafactor's rate, which it multiplies by a matrix's root mean square,
about 1/50 in a language model."""

_LARGEST = 1e6
"""Highest rate, ratio, decay and scale: products of them, divided by 1 - beta1, stay within float32."""
_SMALLEST_EPS = 1e-30
"""Lowest eps: one that float32, or a GPU that flushes subnormal numbers, takes for 0 divides by 0."""

_APOLLO = ("apollo", "apollo_mini")
_ADAMS = ("adamw", "muon", "schedule_free", "adamw_8bit", *_APOLLO)
_factor = number(kind=float, above=True, high=_LARGEST)
_READ_BY_OPTIMIZER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("beta1", "beta2", "eps"), _ADAMS),
    "momentum": ("muon",),
    **dict.fromkeys(("apollo_rank", "apollo_update_interval", "apollo_scale"), _APOLLO),
}
_READ_BY_SCHEDULE: dict[str, tuple[str, ...]] = {
    "min_lr_ratio": ("cosine_with_min_lr", "polynomial", "warmup_stable_decay"),
    "decay_steps": ("warmup_stable_decay",),
    "power": ("polynomial",),
    "num_cycles": ("cosine_with_restarts",),
}


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """The optimizer, its schedule, and gradient clipping.

    >>> OptimizerSettings().resolve("lora").learning_rate
    0.0002
    >>> OptimizerSettings(optimizer="adafactor", momentum=0.8)
    Traceback (most recent call last):
        ...
    ValueError: momentum=0.8 has no effect with optimizer='adafactor'; leave it out, or set optimizer=muon
    """

    optimizer: Optimizer = attrs.field(default=_OPTIMIZER, validator=one_of(Optimizer))
    """AdamW (arXiv 1711.05101); Adafactor (1804.04235), which keeps hardly any state;
    Muon on the layers' matrices with AdamW on the rest; schedule-free AdamW (2405.15682), which needs no schedule; AdamW with
    its state in 8 bits (2110.02861); or APOLLO and APOLLO-Mini (2412.05270), with hardly any state, on the layers' matrices
    with AdamW on the rest, where no adapter trains."""
    learning_rate: float | None = attrs.field(default=None, validator=attrs.validators.optional(_factor))
    """Highest learning rate of the schedule. By default 2e-5;
    with an adapter 2e-4 for the LoRA family, 1e-4 for osft, oft, qoft, hra, loha and miss, 1e-3 for lokr and randlora, 3e-3 for
    ia3, 4e-3 for vera, 1e-2 for fourierft, prefix and adapter_prompt, 3e-2 for prompt, 0.1 for c3a; 50 times that with
    optimizer=adafactor, which multiplies it by the size of each matrix."""
    loraplus_lr_ratio: float = attrs.field(default=1.0, validator=_factor)
    """Rate of LoRA's B matrices as a multiple of learning_rate, which A has (LoRA+, arXiv 2402.12354);
    above 1, about 16 in the paper, with a learning_rate somewhat lower."""
    weight_decay: float = attrs.field(default=0.0, validator=number(kind=float, high=_LARGEST))
    """Decoupled weight decay, on matrices only: norms and biases never decay."""
    beta1: float = attrs.field(default=0.9, validator=number(kind=float, below=1.0))
    """Decay of AdamW's running mean of the gradients;
    the interpolation of schedule_free's averaging."""
    beta2: float = attrs.field(default=0.95, validator=number(kind=float, below=1.0))
    """Decay of AdamW's running mean of the squared gradients."""
    eps: float = attrs.field(default=1e-8, validator=number(kind=float, low=_SMALLEST_EPS, high=_LARGEST))
    """Added to the denominator of AdamW's step."""
    momentum: float = attrs.field(default=0.95, validator=number(kind=float, below=1.0))
    """Decay of Muon's running sum of the gradients."""
    apollo_rank: int | None = attrs.field(default=None, validator=attrs.validators.optional(number(kind=int, low=1)))
    """Rank of APOLLO's random projections, at most a matrix's smaller side;
    by default a quarter of that and at most 256 with optimizer=apollo, and 1 with apollo_mini."""
    apollo_update_interval: int = attrs.field(default=200, validator=number(kind=int, low=1))
    """Steps after which APOLLO draws another projection."""
    apollo_scale: float | None = attrs.field(default=None, validator=attrs.validators.optional(_factor))
    """APOLLO's steps are multiplied by its square root;
    by default the smaller side of a matrix divided by the rank, which makes them about as large as AdamW's."""
    max_grad_norm: float = attrs.field(default=1.0, validator=number(kind=float))
    """Gradients are scaled down to at most this global norm before each step;
    0 turns clipping off."""
    warmup_steps: int = attrs.field(default=0, validator=number(kind=int))
    """Steps over which the learning rate rises linearly; the last of them has the highest value."""
    warmup_ratio: float = attrs.field(default=0.0, validator=number(kind=float, below=1.0))
    """Share of the run's steps that are warmup_steps, rounded up, in the place of a number."""
    lr_scheduler: Schedule = attrs.field(default=_SCHEDULE, validator=one_of(Schedule))
    """Schedule of the learning rate after the warm-up:
    down to 0 as a cosine or a line, constant, or another of transformers' schedules."""
    min_lr_ratio: float = attrs.field(default=0.0, validator=number(kind=float, below=1.0))
    """Final rate of lr_scheduler=cosine_with_min_lr, polynomial or warmup_stable_decay,
    as a share of the highest rate."""
    decay_steps: int | None = attrs.field(default=None, validator=attrs.validators.optional(number(kind=int, low=1)))
    """Number of last steps over which lr_scheduler=warmup_stable_decay decays; required there."""
    power: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Exponent of lr_scheduler=polynomial: 1 is a line."""
    num_cycles: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of times that lr_scheduler=cosine_with_restarts decays."""
    on_nan: OnNaN = attrs.field(default="stop", validator=one_of(OnNaN))
    """What happens when a loss or gradient is NaN or infinite:
    the run stops before the weights move, or the step's move is skipped."""

    def __attrs_post_init__(self) -> None:
        for setting, readers in (("optimizer", _READ_BY_OPTIMIZER), ("lr_scheduler", _READ_BY_SCHEDULE)):
            chosen = getattr(self, setting)
            for name, choices in readers.items():
                value = getattr(self, name)
                if chosen not in choices and value != getattr(attrs.fields(type(self)), name).default:
                    raise ValueError(
                        f"{name}={value!r} has no effect with {setting}={chosen!r}; leave it out, or set "
                        f"{setting}={either(choices)}"
                    )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio:g} are two lengths of one warm-up: "
                "leave one of them out"
            )
        if self.optimizer == "schedule_free" and self.lr_scheduler != "constant":
            raise ValueError(
                f"lr_scheduler={self.lr_scheduler!r} with optimizer='schedule_free', whose averaging stands in for a schedule: "
                "set lr_scheduler='constant' (a warm-up is welcome)"
            )
        if self.optimizer == "schedule_free" and not self.beta1:
            raise ValueError("beta1=0 with optimizer='schedule_free', which divides by it: set it above 0")
        if self.lr_scheduler == "cosine_with_min_lr" and not self.min_lr_ratio:
            raise ValueError(
                "lr_scheduler='cosine_with_min_lr' needs min_lr_ratio above 0; down to 0 it is lr_scheduler='cosine'"
            )
        if self.lr_scheduler == "warmup_stable_decay" and self.decay_steps is None:
            raise ValueError(
                "lr_scheduler='warmup_stable_decay' needs decay_steps: over how many of the last steps it comes down"
            )

    @property
    def low_rank(self) -> bool:
        """Whether the optimizer keeps a low-rank state, and so needs whole matrices."""
        return self.optimizer in _APOLLO

    @property
    def needs_length(self) -> bool:
        """Whether the learning rates follow from the number of steps of the run."""
        return self.warmup_ratio > 0 or self.lr_scheduler not in SCHEDULES_WITHOUT_LENGTH

    def warmup(self, num_steps: int | None) -> int:
        """Return the steps of the warm-up in a run of so many steps.

        Raises:
            ValueError: a share of a run without end.

        >>> OptimizerSettings(warmup_ratio=0.03).warmup(110)
        4
        """
        if not self.warmup_ratio:
            return self.warmup_steps
        if num_steps is None:
            raise ValueError(
                f"warmup_ratio={self.warmup_ratio:g} is a share of the run's steps, and it has no end: give warmup_steps"
            )
        return math.ceil(self.warmup_ratio * num_steps)

    def resolve(self, adapter: Adapter = "none") -> "OptimizerSettings":
        """Return the settings with a learning rate: the adapter's and optimizer's default if unset."""
        if self.learning_rate is not None:
            return self
        scale = ADAFACTOR_SCALE if self.optimizer == "adafactor" else 1.0
        return attrs.evolve(self, learning_rate=default_learning_rate(adapter) * scale)
