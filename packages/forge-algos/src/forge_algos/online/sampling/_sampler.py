"""Interface of samplers: prompts → completions.
`GenerateSampler` is one; an inference server can be another.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.settings._online import OnlineSettings
from forge_algos.settings._self_distill import SDFTSettings


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """Continuation of a prompt by a model."""

    ids: NDArray[np.int32]
    """int32[S], S from 1: the sampled tokens, with the one that ends the completion."""
    finished: bool
    """Whether the last token ends it; False where it was cut off at `max_new_tokens`."""
    learned: NDArray[np.bool_] | None = None
    """bool[S]: the tokens that the model drew; others are observations. None is all."""
    logps: NDArray[np.float32] | None = None
    """float32[S]: log-probabilities with which a server drew the tokens, in nats; NaN at
    observations. None where the trained model itself drew them."""
    reward: float | None = None
    """What an environment gave for the episode; NaN where it could not. None without one."""
    messages: tuple[dict[str, Any], ...] | None = None
    """Turns of the model and of its environment, for reward functions; None without one."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the model drew."""
        return len(self.ids) if self.learned is None else int(self.learned.sum())


class Sampler(Protocol):
    """Draws completions from the model as it is at the time of the call."""

    def sample(
        self,
        prompts: Sequence[NDArray[Any]],
        *,
        num_generations: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        numbers: Sequence[int] | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        media: Sequence[Callable[[], Any] | None] | None = None,
    ) -> list[Completion]:
        """Draw `num_generations` completions of each prompt, prompt after prompt.

        Args:
            prompts: int[S] each, S from 1.
            num_generations: completions of each prompt.
            max_new_tokens: tokens that a completion may have.
            temperature: divides the logits.
            top_p: from the likeliest tokens that hold this share; 1 is all.
            top_k: from this many likeliest tokens; 0 is all.
            seed: where all random numbers come from.
            numbers: the number of each prompt among those of all ranks; None counts from 0. A prompt is answered from `seed`
                and its number, whichever prompts stand beside it.
            min_p: from tokens that have at least this share of the likeliest one's probability; 0 is all.
            repetition_penalty: divides positive logits of tokens that prompt or completion have already, and multiplies
                others; 1 changes none.
            media: what makes the arguments of a forward of each prompt's images (a server is given others in their place), or
                None for one without. It is given where prompts have some: a sampler need not know it.
        """
        ...


def draw_options(settings: OnlineSettings | SDFTSettings) -> dict[str, Any]:
    """Return the arguments of `Sampler.sample` that settings say.
    `min_p` and `repetition_penalty` are among them where they are set: a sampler need not know them.
    """
    found = {name: getattr(settings, name) for name in ("num_generations", "temperature", "top_p", "top_k")}
    found |= {"min_p": settings.min_p} if settings.min_p else {}
    return found | ({"repetition_penalty": settings.repetition_penalty} if settings.repetition_penalty != 1 else {})


def greedy_options(settings: OnlineSettings) -> dict[str, Any]:
    """Return the arguments of `Sampler.sample` for one completion of the likeliest tokens."""
    named = {name: value for name, value in draw_options(settings).items() if name != "min_p"}
    return named | {"num_generations": 1, "top_p": 1.0, "top_k": 1}
