"""Weight of an entropy that is kept near a target, step after step."""

import math
from collections.abc import Mapping

from forge_algos.settings._grpo import GRPOSettings


class EntropyControl:
    """Coefficient that rises while the entropy is at most the target, and else falls.

    As in Skywork-OR1 (arXiv 2505.22312). It weighs a step's entropy only where that of the step before was at most the target:
    never in the first step.
    """

    def __init__(self, settings: GRPOSettings) -> None:
        """Begin with `entropy_coef`."""
        self._settings = settings
        self._coefficient = settings.entropy_coef
        self._last = math.inf

    @property
    def weight(self) -> float:
        """Weight of the entropy in the next step."""
        return self._coefficient if self._last <= self._settings.entropy_target else 0.0

    def follow(self, entropy: float) -> None:
        """Take a step's mean entropy into account."""
        s = self._settings
        if entropy <= s.entropy_target:
            self._coefficient = min(self._coefficient + s.entropy_coef_delta, s.entropy_coef_max)
        else:
            self._coefficient = max(self._coefficient - s.entropy_coef_delta, s.entropy_coef_min)
        self._last = entropy

    def state(self) -> dict[str, float]:
        """Return what `resume` needs, as JSON has it."""
        return {"entropy_coef": self._coefficient, **({} if math.isinf(self._last) else {"kept_entropy": self._last})}

    def resume(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        self._coefficient, self._last = state["entropy_coef"], state.get("kept_entropy", math.inf)
