"""Gap between the log-probabilities of a sampling server and those of the trained model.

A server computes with other kernels, often in another precision, so a token was drawn with another probability than the one
that trains. Where the gap is small it is a figure; above a limit each advantage is weighed by the truncated ratio of the two
(TIS, truncated importance sampling); above another one the weights are not the same.
"""

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import RolloutError
from forge_algos.settings._online import OnlineSettings

Floats = NDArray[np.float32]


def gap_weights(
    settings: OnlineSettings, old_logps: Floats, sampler_logps: Floats, lengths: NDArray[np.int64]
) -> Floats | None:
    """Compute the weight float32[M] of each token's advantage; None where the gap is small.

    The gap is the mean of |old - sampler| over tokens that were measured, in nats. A weight is min(exp(old - sampler),
    `tis_cap`) of each token, or of the whole completion where the policy loss has one ratio a completion. Pairs have none.

    Args:
        settings: `tis_above`, `tis_cap` and `max_sampler_gap` are read.
        old_logps: float32[M], the trained model's; NaN where it measured none.
        sampler_logps: float32[M], the server's; NaN where it gave none.
        lengths: int64[B], tokens of each completion.

    Raises:
        RolloutError: the gap is above `max_sampler_gap`, or the server gave a token no number.
    """
    difference = (old_logps - sampler_logps).astype(np.float64)
    known = ~np.isnan(old_logps)
    if np.isnan(difference[known]).any():
        raise RolloutError("the sampler gave no log-probability for some of its tokens, so that nothing says what drew them")
    gap = float(np.abs(difference[known]).mean()) if known.any() else 0.0
    if gap > settings.max_sampler_gap:
        raise RolloutError(
            f"the sampler's log-probabilities are {gap:.4g} nats a token from the trained model's on average, and "
            f"max_sampler_gap={settings.max_sampler_gap:g}: it computes with other weights, at another temperature, or much "
            "less exactly; look at the model and the options that the server was started with"
        )
    # DPO holds for pairs from any policy: its loss has no expectation over the one that sampled.
    if gap <= settings.tis_above or settings.paired:
        return None
    log_weights = np.where(known, difference, 0.0)
    if settings.policy.ratio != "token":
        starts = np.cumsum(lengths) - lengths
        log_weights = np.repeat(np.add.reduceat(log_weights, starts), lengths) if len(lengths) else log_weights
    return np.exp(np.minimum(log_weights, np.log(settings.tis_cap))).astype(np.float32)
