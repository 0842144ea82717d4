"""Scores of the next token → the token drawn, from one uniform number a row: what `generate` calls with each step's logits.

A completion's numbers are its own, so it does not depend on what else is in the batch, how the batch was cut, or which rank
draws it; and torch's random state is neither read nor moved.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

Warp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BELOW_ONE = 1 - 2.0**-22
"""The largest uniform number in float32 whose product with a total stays below that total."""


def uniforms(seed: int, completions: Sequence[tuple[int, int]], steps: int) -> torch.Tensor:
    """float32[B, steps] in [0, 1): for each (prompt's number, which of its completions) a stream of its own."""
    drawn = [np.random.default_rng([seed, prompt, which]).random(steps) for prompt, which in completions]
    return torch.from_numpy(np.stack(drawn)).float().clamp_(max=_BELOW_ONE)


class Draw:
    """A logits processor that leaves the drawn token alone possible, for greedy decoding to take."""

    def __init__(self, warps: Sequence[Warp], uniforms_BS: torch.Tensor, width: int) -> None:
        """`warps` change the scores first; `width` is the length of the padded prompts."""
        self._warps = warps
        self._uniforms_BS = uniforms_BS
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Ids int64[B, width + step] and scores float[B, V] → scores with 0 at the drawn token and -inf elsewhere."""
        for warp in self._warps:
            scores = warp(input_ids, scores)
        # `generate` may run a few steps beyond the end before it looks.
        step = min(input_ids.shape[1] - self._width, self._uniforms_BS.shape[1] - 1)
        token = inverse(scores, self._uniforms_BS[:, step])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def inverse(scores: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """int64[B]: in each row of scores[B, V] the token at which the summed probability exceeds the uniform number.

    A token of probability 0 is never drawn, also where sums in float32 are not quite monotonous.
    """
    probabilities = scores.float().softmax(-1)
    summed = probabilities.cumsum(-1)
    possible = (summed > (uniform_B * summed[:, -1])[:, None]) & (probabilities > 0)
    return torch.where(possible.any(-1), possible.int().argmax(-1), probabilities.argmax(-1))
