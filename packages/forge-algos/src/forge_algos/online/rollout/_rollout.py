"""Rollout: sampled completions, their rewards, and all that the updates on them need."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos.online.rollout import _rollout_file

Floats = NDArray[np.float32]


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """B completions of G prompts, M learned tokens in all; those of a group one after another.

    It is the same on every rank. With a seed and an update's number it determines what that update trains on: a run that was
    stopped between two updates reads it back and resumes.
    """

    seed: int
    """Seed of the completions' random numbers and of the order of the updates."""
    prompt_rows: NDArray[np.int64]
    """int64[G]: the number of each prompt in the data."""
    prompt_ids: tuple[NDArray[np.int32], ...]
    """G of int32[S]."""
    prompt_texts: tuple[str, ...]
    """G texts."""
    groups: NDArray[np.int64]
    """int64[B]: prompt of each completion, from 0 to G - 1."""
    completion_ids: tuple[NDArray[np.int32], ...]
    """B of int32[S]: all M tokens one after another, but for those that `learned` leaves out."""
    completion_texts: tuple[str, ...]
    """B texts."""
    finished: NDArray[np.bool_]
    """bool[B]: False where the completion was cut off."""
    scores: Mapping[str, Floats]
    """Reward function → float32[B]; NaN where it could not score."""
    rewards: Floats
    """float32[B]: their weighted sum, less the penalty for having been cut off;
    NaN where nothing could score."""
    trained: NDArray[np.bool_]
    """bool[B]: whether updates train on it: not if it is unscored, masked,
    or in a group that is skipped."""
    masked: NDArray[np.bool_]
    """bool[B]: whether it has no term and counts in a mean over completions all the same:
    completions that were cut off, with `mask_truncated`."""
    old_logps: Floats
    """float32[M]: log-probabilities under the policy that sampled, at the temperature, in nats;
    NaN where none is needed."""
    ref_logps: Floats | None
    """float32[M]: the reference's; None without one."""
    values: Floats | None
    """float32[M]: the value head's before each token; None without one."""
    advantages: Floats
    """float32[M]; 0 where nothing is trained."""
    returns: Floats | None
    """float32[M]: the value head's targets; None without one."""
    resampled: int = 0
    """How many times groups were sampled anew, all groups together."""
    equal_rewards: int | None = None
    """Groups each of whose rewards is equal, where each is normalised by itself; None where
    they are those whose `rewards` are."""
    learned: tuple[NDArray[np.bool_], ...] | None = None
    """B of bool[S]: tokens that the model drew, between observations of an environment;
    None where it drew all."""
    sampler_logps: Floats | None = None
    """float32[M]: log-probabilities with which a server drew the tokens, in nats; None where
    the trained model drew them. Where they are far from `old_logps`, the advantages are weighed."""
    entropy: Floats | None = None
    """float32[M]: the policy's entropy before each token, at the temperature, in nats; None where
    nothing reads it."""
    least_entropy: float = 0.0
    """Entropy below which a token has no term but its KL's (`top_entropy_quantile`)."""
    greedy_rewards: Floats | None = None
    """float32[G]: reward of each prompt's greedy completion, NaN where it could not be scored; None
    where nothing reads it."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[B]: tokens of each completion, observations among them."""
        return np.array([len(ids) for ids in self.completion_ids], np.int64)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[B]: learned tokens of each completion."""
        return self.sizes if self.learned is None else np.array([mask.sum() for mask in self.learned], np.int64)

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64[B+1]: where each completion's learned tokens begin among the M, and M."""
        return np.append(0, self.lengths.cumsum())

    def figures(self) -> dict[str, float]:
        """Compute figures for reports: means over completions, and counts that explain them.
        Counted are completions that were cut off, could not be scored, or teach nothing. A mean over none of them is NaN.
        """
        groups, lengths = self.groups, self.lengths
        scored = ~np.isnan(self.rewards)
        found: dict[str, float] = {
            "prompts": len(self.prompt_rows),
            "completions": len(lengths),
            "tokens": int(lengths.sum()),
            "reward": _mean(self.rewards[scored]),
            "reward_std": float(self.rewards[scored].astype(np.float64).std()) if scored.any() else 0.0,
            "length": _mean(lengths),
            "cut_off": int((~self.finished).sum()),
            "unscored": int((~scored).sum()),
            "equal_rewards": equal_groups(self.rewards, groups, len(self.prompt_rows)).sum().item()
            if self.equal_rewards is None
            else self.equal_rewards,
            "resampled": self.resampled,
            "trained": int(self.trained.sum()),
        }
        found |= {f"reward/{name}": _mean(values[~np.isnan(values)]) for name, values in self.scores.items()}
        if self.sampler_logps is not None:
            gap = np.abs(self.old_logps - self.sampler_logps).astype(np.float64)
            gap = gap[~np.isnan(gap)]
            found |= {"sampler_gap": _mean(gap), "sampler_gap_max": float(gap.max(initial=0.0))}
        if self.entropy is not None:
            found["least_entropy"] = self.least_entropy
        if self.greedy_rewards is not None:
            found["greedy_reward"] = _mean(self.greedy_rewards[~np.isnan(self.greedy_rewards)])
        if self.learned is not None:
            found["observed"] = int(self.sizes.sum() - lengths.sum())
        if self.ref_logps is not None:
            difference = (self.old_logps - self.ref_logps).astype(np.float64)
            found["kl"] = _mean(difference[~np.isnan(difference)])
        return found

    @property
    def completion_kl(self) -> NDArray[np.float64]:
        """float64[B]: mean k1 from the reference, in nats a token; NaN where it was not measured."""
        if self.ref_logps is None:
            return np.full(len(self.groups), np.nan)
        each = np.split((self.old_logps - self.ref_logps).astype(np.float64), self.starts[1:-1])
        return np.array([values.mean() for values in each if len(values)], np.float64)

    @property
    def spread(self) -> float:
        """Largest difference of rewards between two completions of one prompt; 0 where none differ."""
        low, high = _bounds(self.rewards, self.groups, len(self.prompt_rows))
        return float(np.max(high - low, initial=0.0, where=low < high))

    def write(self, path: str | Path) -> None:
        """Write a JSONL file: a line about the whole, then a line a completion, with its text.

        Floats are exact to the bit. The file appears under its name when it is whole.
        """
        _rollout_file.write({field.name: getattr(self, field.name) for field in attrs.fields(Rollout)}, Path(path))

    @classmethod
    def read(cls, path: str | Path) -> "Rollout":
        """Read back what `write` wrote.

        Raises:
            RolloutError: the file is not there, is no rollout, or is not what `write` wrote.
        """
        fields: dict[str, Any] = _rollout_file.read(Path(path))
        return cls(**fields)


def equal_groups(rewards: Floats, groups: NDArray[np.int64], number: int, *compared: Floats) -> NDArray[np.bool_]:
    """Find groups of two or more scored completions whose rewards are all equal: bool[G].
    With `compared` each of these is equal by itself, where it is a number.
    """
    found = np.bincount(groups[~np.isnan(rewards)], minlength=number) > 1
    for values in compared or (rewards,):
        low, high = _bounds(values, groups, number)
        found &= ~(low < high)
    return found


def _bounds(values: Floats, groups: NDArray[np.int64], number: int) -> tuple[Floats, Floats]:
    """Return the lowest and the highest number of each group, float32[G] each.
    They are inf and -inf where a group has none.
    """
    scored = ~np.isnan(values)
    low, high = np.full(number, np.inf, np.float32), np.full(number, -np.inf, np.float32)
    np.minimum.at(low, groups[scored], values[scored])
    np.maximum.at(high, groups[scored], values[scored])
    return low, high


def _mean(values: NDArray[Any]) -> float:
    return float(values.astype(np.float64).mean()) if len(values) else math.nan
