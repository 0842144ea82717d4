"""Settings of self-distillation fine-tuning; reading them loads no torch."""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import logits_divisor, number, one_of

SelfTeacher = Literal["ema", "initial", "current"]

PROMPT, DEMONSTRATION = "{prompt}", "{demonstration}"
TEMPLATE = (
    f"{PROMPT}\n\nThis is an example for a response to the question:\n{DEMONSTRATION}\n\n"
    "Now answer with a response of your own, including the thinking process:"
)
"""What the teacher is asked: the prompt, the demonstration, and to answer anew (after arXiv 2601.19897, in our own words)."""

_share: Any = attrs.validators.and_(number(kind=float), attrs.validators.le(1))
_above_share: Any = attrs.validators.and_(number(kind=float, above=True), attrs.validators.le(1))


def _check_template(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{field.name} must be a text, got {value!r}")
    for name in (PROMPT, DEMONSTRATION):
        if value.count(name) != 1:
            raise ValueError(f"{field.name} must hold {name} once, for what stands in its place, got {value!r}")


@attrs.frozen(kw_only=True)
class SDFTSettings:
    """Self-distillation (SDFT, arXiv 2601.19897): the model, shown the answer, teaches itself.

    >>> SDFTSettings(teacher="current", teacher_rate=0.1)
    Traceback (most recent call last):
        ...
    ValueError: teacher_rate=0.1 has no effect with teacher='current'; leave it out, or set teacher='ema'
    """

    demonstration_template: str = attrs.field(default=TEMPLATE, validator=_check_template)
    """What the teacher is asked in place of a row's last question:
    a text with {prompt}, the question, and {demonstration}, the row's answer."""
    teacher: SelfTeacher = attrs.field(default="ema", validator=one_of(SelfTeacher))
    """Weights of the teacher: the student's exponential moving average ("ema"),
    those that it began with ("initial"), or its own at each step ("current")."""
    teacher_rate: float = attrs.field(default=0.02, validator=_above_share)
    """Share of the student's weights that the moving average takes on after each step."""
    beta: float = attrs.field(default=1.0, validator=_share)
    """β of the generalised Jensen-Shannon divergence at each sampled token:
    1 is KL(student ‖ teacher), the paper's; 0 is KL(teacher ‖ student)."""
    num_generations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of completions of each prompt that the student samples and learns from."""
    max_new_tokens: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Most tokens that a completion may have; one without an end by then is cut off,
    and learned from all the same."""
    temperature: float = attrs.field(default=1.0, validator=logits_divisor)
    """Divisor of the logits, where completions are sampled and where both are compared; at least 1e-6."""
    top_p: float = attrs.field(default=1.0, validator=_above_share)
    """Share of the probability whose likeliest tokens are sampled from; 1 is all."""
    top_k: int = attrs.field(default=0, validator=number(kind=int))
    """Number of likeliest tokens that are sampled from; 0 is all."""
    min_p: float = attrs.field(default=0.0, validator=_share)
    """Share of the likeliest token's probability below which no token is sampled; 0 is all."""
    repetition_penalty: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divisor, while sampling, of the positive logits of tokens that prompt or completion have
    already, and factor of their negative ones; above 1 they come less often (arXiv 1909.05858)."""
    skip_tokens: int = attrs.field(default=0, validator=number(kind=int))
    """Number of first tokens of each completion that nothing is learned from:
    there a teacher may speak of the example that the student was not shown."""

    def __attrs_post_init__(self) -> None:
        default = attrs.fields(SDFTSettings).teacher_rate.default
        if self.teacher != "ema" and self.teacher_rate != default:
            raise ValueError(
                f"teacher_rate={self.teacher_rate} has no effect with teacher={self.teacher!r}; leave it out, or set "
                "teacher='ema'"
            )
        if self.skip_tokens >= self.max_new_tokens:
            raise ValueError(
                f"skip_tokens={self.skip_tokens} leaves nothing to learn of completions of max_new_tokens={self.max_new_tokens}"
            )
