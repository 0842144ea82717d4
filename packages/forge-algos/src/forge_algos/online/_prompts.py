"""Prompts, and checks of a rollout's arguments and of what a sampler returned."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from forge_algos._errors import RewardError, RolloutError
from forge_algos.online._measure import Reference
from forge_algos.online.rewards._rewards import Reward
from forge_algos.online.sampling._sampler import Completion
from forge_algos.settings._online import OnlineSettings


class Prompt(Protocol):
    """A prompt and the further fields of its row; `forge_data.PromptStore` has such."""

    @property
    def input_ids(self) -> NDArray[Any]:
        """int[S], all that stands before the answer (a chat's generation prompt too)."""
        ...

    @property
    def prompt(self) -> Any:
        """The text, or the messages."""
        ...

    @property
    def columns(self) -> Mapping[str, Any]:
        """Further fields of its row, for the reward functions."""
        ...


def check_arguments(
    prompts: Sequence[Prompt],
    settings: OnlineSettings,
    rewards: Sequence[Reward],
    reference: Reference | None,
    seed: int,
    max_tokens: int,
    *,
    episodic: bool = False,
    pictured: bool = False,
) -> None:
    """Raise RolloutError or RewardError if the arguments do not go together, alike on all ranks."""
    if not rewards and not episodic:
        raise RewardError("nothing rewards the completions: give reward functions, a reward model, an environment, or several")
    if episodic and pictured:
        raise RolloutError("images or audio and episodes: what environments write is text; leave one of the two out")
    if not prompts:
        raise RolloutError("a rollout needs a prompt at least, and there is none")
    if seed < 0:
        raise RolloutError(f"seed: a whole number from 0 is wanted, not {seed}")
    if (settings.kl_weight > 0) != (reference is not None):
        raise RolloutError(
            f"kl_weight={settings.kl_weight} and reference={'none' if reference is None else 'one'}: a KL above 0 needs a "
            "reference, and without it none is read"
        )
    if taken := {"prompts", "completions"} & columns_of(prompts):
        raise RewardError(f"the rows have a field {min(taken)!r}, under which reward functions get something else; rename it")
    lengths = [len(prompt.input_ids) for prompt in prompts]
    if min(lengths) < 1:
        raise RolloutError(f"prompt {lengths.index(0)} is empty: nothing would predict its completion's first token")
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] + settings.max_new_tokens > max_tokens:
        raise RolloutError(
            f"prompt {longest} has {lengths[longest]} tokens, and with max_new_tokens={settings.max_new_tokens} it may become "
            f"longer than a micro-batch, max_tokens={max_tokens}; raise that, or drop long prompts (max_prompt_len)"
        )


def columns_of(prompts: Sequence[Prompt]) -> set[str]:
    """Collect the fields of all prompts, so that a function is called alike on every rank."""
    return {name for prompt in prompts for name in prompt.columns}


def check_completions(completions: Sequence[Completion], number: int, most: int) -> None:
    """Raise RolloutError where a sampler returned something else than was asked for."""
    if len(completions) != number:
        raise RolloutError(f"the sampler gave {len(completions)} completions where {number} were asked for")
    for completion in completions:
        if not 1 <= len(completion.ids) <= most:
            raise RolloutError(f"the sampler gave a completion of {len(completion.ids)} tokens; 1 to {most} were asked for")
