"""Scores of reward functions, and penalties → the reward of each completion, and its parts."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.online.environments._environment import ENVIRONMENT
from forge_algos.online.rewards._rewards import Reward, overlong, total
from forge_algos.settings._online import OnlineSettings

Parts = dict[str, tuple[float, NDArray[np.float32]]]
"""Name of a reward or penalty → its weight, and float32[B]; NaN where it could not score."""
_Scores = Mapping[str, NDArray[np.float32]]


@attrs.frozen
class RewardSum:
    """What completions are rewarded with, from their scores, their lengths and whether they ended."""

    settings: OnlineSettings
    rewards: Sequence[Reward]

    def __call__(self, scores: _Scores, lengths: NDArray[Any], finished: NDArray[Any]) -> NDArray[np.float32]:
        """Add up each completion's rewards and penalties: float32[B]."""
        found = total(scores, self._weights, within=self.settings.reward_clip_range).astype(np.float64)
        for weight, values in self._penalties(lengths, finished).values():
            found = found + weight * values
        return found.astype(np.float32)

    def parts(self, scores: _Scores, lengths: NDArray[Any], finished: NDArray[Any]) -> Parts:
        """Return what adds up to a completion's reward, but for those that weigh nothing."""
        each = {name: (self._weights[name], values) for name, values in scores.items()} | self._penalties(lengths, finished)
        return {name: (weight, values.astype(np.float32)) for name, (weight, values) in each.items() if weight}

    @property
    def _weights(self) -> dict[str, float]:
        return {ENVIRONMENT: 1.0} | {one.name: one.weight for one in self.rewards}

    def _penalties(self, lengths: NDArray[Any], finished: NDArray[Any]) -> dict[str, tuple[float, NDArray[Any]]]:
        own = self.settings
        late = overlong(lengths, own.max_new_tokens, own.overlong_buffer)
        return {"missing_eos": (-own.missing_eos_penalty, (~finished).astype(np.float64)), "overlong": (-1.0, late)}
