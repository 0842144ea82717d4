"""Interface of environments: what answers the model's turns, and rewards them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_algos._errors import RewardError
from forge_algos._named import load_named
from forge_algos.online.rewards._rewards import MOST

ENVIRONMENT = "env"
"""Name of an environment's reward among those of a rollout."""

Observation = str | Sequence[Mapping[str, Any]]
"""Text of the next turn (the user's, in a chat), or messages such as a tool's results."""


class Environment(Protocol):
    """Answers one episode: made anew for each, then `reset` once, then `step` after each turn.

    Both may be `async def`. They are called in a thread, so an episode that waits holds no other.
    """

    def reset(self, *, prompt: Any, seed: int, **columns: Any) -> None:
        """Begin an episode.

        Args:
            prompt: text or messages, as the row has it; the model was asked this.
            seed: the same for all episodes of a prompt in a rollout, so that they can be compared.
            columns: further fields of the row.
        """
        ...

    def step(self, turn: Mapping[str, Any]) -> tuple[Observation | None, float, bool]:
        """Answer a turn of the model.

        Args:
            turn: the message: `role`, `content` (text), and `tool_calls` where it calls tools.

        Returns:
            tuple: what the model reads next (None where it is done), the turn's reward, whether the episode is over.
        """
        ...


def load_environment(name: str) -> type[Any]:
    """Import the class that "package.module:Class" names.

    Raises:
        RewardError: the name has another form, the module or class is not there, or it has no `reset` and `step`.
    """
    found, path = load_named(name, setting="env", wanted="Class")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        raise RewardError(f"env {name!r}: a class with reset and step is wanted, and {path} has no {' and no '.join(missing)}")
    return found


def checked_step(value: Any) -> tuple[Observation | None, float, bool]:
    """Check what `step` returned.

    Raises:
        TypeError: it is no (observation, reward, done).
    """
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"step returned {value!r}: (observation, reward, done) is wanted")
    observation, reward, done = value
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MOST:
        raise TypeError(f"step returned the reward {reward!r}: a number of at most {MOST:g} is wanted")
    if not done and not observation:
        raise TypeError("step returned no observation, and the episode is not done: return what the model is to read next")
    ready = isinstance(observation, str) or (
        isinstance(observation, Sequence) and all(isinstance(message, Mapping) for message in observation)
    )
    if not done and not ready:
        raise TypeError(f"step returned the observation {observation!r}: text or a list of messages is wanted")
    return (None if done else observation), number, bool(done)
