"""Weight of a KL in the rewards that steers for a target, rollout after rollout."""

from collections.abc import Mapping

from forge_algos.settings._online import OnlineSettings

_MOST, _LEAST = 0.2, 0.1
"""How far the KL counts above or below its target, and the least factor of a rollout."""


class KLControl:
    """Coefficient that rises while the KL is above its target, and falls while it is below.

    After a rollout of n completions it is multiplied by 1 + clip(KL / target - 1, ±0.2) · n / horizon, as in arXiv 1909.08593,
    section 2.2, and at least by 0.1.
    """

    def __init__(self, settings: OnlineSettings) -> None:
        """Begin with `kl_weight`."""
        assert settings.kl_target is not None
        self._target, self._horizon = settings.kl_target, settings.kl_horizon
        self.weight = float(settings.kl_weight)

    def follow(self, kl: float, completions: int) -> None:
        """Take a rollout into account: its completions' mean KL, in nats a token, and number."""
        error = min(max(kl / self._target - 1, -_MOST), _MOST)
        self.weight *= max(1 + error * completions / self._horizon, _LEAST)

    def state(self) -> dict[str, float]:
        """Return what `resume` needs."""
        return {"kl_weight": self.weight}

    def resume(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        self.weight = state["kl_weight"]
