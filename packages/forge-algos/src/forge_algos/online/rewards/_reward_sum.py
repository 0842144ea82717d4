"""Scores of reward functions, and penalties → the reward of each completion, and its parts."""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.online.rewards._rewards import overlong, total
from forge_algos.settings._online import OnlineSettings

Parts = dict[str, tuple[float, NDArray[np.float32]]]
"""Name of a reward or penalty → its weight, and float32[B]; NaN where it could not score."""
_Scores = Mapping[str, NDArray[np.float32]]


@attrs.frozen
class RewardSum:
    """Reward of a completion: from its scores, its length and whether it ended."""

    settings: OnlineSettings
    weights: Mapping[str, float]
    """Name of each reward → its weight."""

    def __call__(self, scores: _Scores, lengths: NDArray[Any], finished: NDArray[Any]) -> NDArray[np.float32]:
        """Add up each completion's rewards and penalties: float32[B]."""
        found = total(scores, self.weights, within=self.settings.reward_clip_range).astype(np.float64)
        for weight, values in self._penalties(lengths, finished).values():
            found = found + weight * values
        return found.astype(np.float32)

    def parts(self, scores: _Scores, lengths: NDArray[Any], finished: NDArray[Any]) -> Parts:
        """Return what adds up to a completion's reward, but for those that weigh nothing."""
        each = {name: (self.weights[name], values) for name, values in scores.items()} | self._penalties(lengths, finished)
        return {name: (weight, values.astype(np.float32)) for name, (weight, values) in each.items() if weight}

    def _penalties(self, lengths: NDArray[Any], finished: NDArray[Any]) -> dict[str, tuple[float, NDArray[Any]]]:
        own = self.settings
        late = overlong(lengths, own.max_new_tokens, own.overlong_buffer)
        return {"missing_eos": (-own.missing_eos_penalty, (~finished).astype(np.float64)), "overlong": (-1.0, late)}
