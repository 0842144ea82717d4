"""Rewards and log-probabilities of a whole rollout → advantages of its tokens, and returns where a value head learns them.

All that couples completions happens here, once for the whole rollout and before anything is cut: groups' baselines, deviations,
whitening. So an update does not depend on its cut.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forge_algos.losses import gae, group_advantages, kl
from forge_algos.settings._online import GRPOSettings, OnlineSettings, PPOSettings

Floats = NDArray[np.float32]
_WHITE = 1e-8
"""Added to the deviation that advantages are divided by, as in TRL's and OpenAI's code."""


def advantages_of(
    settings: OnlineSettings,
    *,
    rewards: Floats,
    groups: NDArray[np.int64],
    lengths: NDArray[np.int64],
    trained: NDArray[np.bool_],
    old_logps: Floats,
    ref_logps: Floats | None,
    values: Floats | None,
) -> tuple[Floats, Floats | None]:
    """(advantages float32[M], returns float32[M] or None), 0 for completions that are not trained on.

    GRPO: the reward less its group's mean, over a deviation. RLOO: the reward less the penalty Σ k1 · kl_weight, less the others'
    mean. PPO: each token's reward is its penalty -k1 · kl_weight, and the last one's the reward too; GAE; whitened over all
    trained tokens if asked.

    Args:
        settings: of the method.
        rewards: float32[B]; NaN where unscored.
        groups: int[B].
        lengths: int[B].
        trained: bool[B].
        old_logps: float32[M]; NaN for completions that were not measured.
        ref_logps: float32[M], as these; None without a KL.
        values: float32[M], for PPO.
    """
    penalty = np.zeros_like(old_logps)
    if ref_logps is not None:
        k1 = kl(torch.from_numpy(old_logps), torch.from_numpy(ref_logps), estimator="k1").per_sample
        assert k1 is not None
        penalty = (settings.kl_weight * k1).numpy()
    of_token = np.repeat(trained, lengths)
    if isinstance(settings, PPOSettings):
        assert values is not None
        return _of_tokens(settings, rewards, penalty, values, lengths, trained, of_token)
    if isinstance(settings, GRPOSettings):
        found = group_advantages(torch.from_numpy(rewards), torch.from_numpy(groups), scale=settings.scale)
    else:
        whole = np.add.reduceat(penalty.astype(np.float64), lengths.cumsum() - lengths) if len(lengths) else np.zeros(0)
        found = group_advantages(
            torch.from_numpy((rewards - whole).astype(np.float32)),
            torch.from_numpy(groups),
            baseline="leave_one_out",
            scale="none",
        )
    return np.where(of_token, np.repeat(found.numpy(), lengths), 0).astype(np.float32), None


def _of_tokens(
    settings: PPOSettings,
    rewards: Floats,
    penalty: Floats,
    values: Floats,
    lengths: NDArray[np.int64],
    trained: NDArray[np.bool_],
    of_token: NDArray[np.bool_],
) -> tuple[Floats, Floats]:
    cut: Sequence[int] = lengths[trained].tolist()
    each = -penalty[of_token]
    each[np.cumsum(cut, dtype=np.int64) - 1] += rewards[trained]
    found = gae(torch.from_numpy(each), torch.from_numpy(values[of_token]), cut, gamma=settings.gamma, lam=settings.lam)
    mine = found.advantages.numpy()
    if settings.whiten and len(mine) > 1:
        wide = mine.astype(np.float64)
        mine = ((wide - wide.mean()) / (wide.std(ddof=1) + _WHITE)).astype(np.float32)
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    advantages[of_token], returns[of_token] = mine, found.returns.numpy()
    return advantages, returns
