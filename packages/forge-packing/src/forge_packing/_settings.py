"""Settings of a plan, as a command line or a recipe gives them. Needs attrs only."""

from collections.abc import Callable
from typing import Any, Literal

import attrs


def _integer(
    minimum: int, maximum: int | None = None, word: str | None = None
) -> Callable[[Any, "attrs.Attribute[Any]", Any], None]:
    """Return a validator of integers from minimum to maximum, or one word; a bool is none."""
    expected = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    expected += f" or {word!r}" if word else ""

    def check(_instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
        if isinstance(value, str) and value == word:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{attribute.name} must be {expected}, got {value!r} ({type(value).__name__})")
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"{attribute.name} must be {expected}, got {value}")

    return check


@attrs.frozen(kw_only=True)
class PlanSettings:
    """Settings of a plan: samples in a step, tokens in a micro-batch, length of the run, seed.

    >>> PlanSettings(max_steps=20).epochs is None
    True
    """

    effective_batch_size: int = attrs.field(default=32, validator=_integer(1, 2**31 - 1))
    """Samples in one optimizer step, over all ranks and micro-batches together."""

    max_tokens_per_gpu: int | None = attrs.field(default=None, validator=attrs.validators.optional(_integer(1, 2**31 - 1)))
    """Tokens in one micro-batch. By default the most that the memory plan finds to fit, at least the longest sample; a resumed
    run keeps its own."""

    num_epochs: int | Literal["inf"] | None = attrs.field(
        default=None, validator=attrs.validators.optional(_integer(1, word="inf"))
    )
    """Passes over the data. By default 1, or as many as max_steps or max_tokens take where one is given. With "inf" training
    goes on until it is stopped, and the next start goes on with it."""

    max_steps: int | None = attrs.field(default=None, validator=attrs.validators.optional(_integer(1)))
    """Optimizer steps after which training ends. Of num_epochs, max_steps and max_tokens, the one that is reached first."""

    max_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(_integer(1)))
    """Learned tokens (loss_tokens), over all ranks and steps together, with which training ends: the step that reaches them is
    the last."""

    seed: int = attrs.field(default=42, validator=_integer(0, 2**32 - 1))
    """Seed of everything random: the order of samples, the validation split, LoRA's start, dropout."""

    shuffle: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether each epoch takes the samples in a random order of its own. With false it takes them in the order of the files;
    of a mixture each source in its order, interleaved by the shares."""

    @property
    def epochs(self) -> int | None:
        """Argument `epochs` of `plan`: None where num_epochs is inf, or only another limit is given."""
        if self.num_epochs == "inf":
            return None
        if self.num_epochs is None and self.max_steps is None and self.max_tokens is None:
            return 1
        return self.num_epochs

    def last_step(self, steps_to: Callable[[int], int]) -> int | None:
        """Return argument `max_steps` of `plan`: the lower of max_steps and what max_tokens needs.

        Args:
            steps_to: number of learned tokens → steps that reach it, as `BatchPlan.steps_to` of a plan without end.

        """
        limits = [] if self.max_steps is None else [self.max_steps]
        limits += [] if self.max_tokens is None else [steps_to(self.max_tokens)]
        return min(limits, default=None)
