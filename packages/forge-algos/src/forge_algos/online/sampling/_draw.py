"""Drawing of the next token from one uniform number a row: a logits processor.

A completion's numbers are its own, so it does not depend on what else is in the batch, how the batch was cut, or which rank
draws it; and torch's random state is neither read nor moved.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from forge_algos._errors import RolloutError

Warp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BELOW_ONE = 1 - 2.0**-22
"""Largest uniform number in float32 whose product with a total stays below that total."""


def uniforms(seed: int, completions: Sequence[tuple[int, int]], steps: int) -> torch.Tensor:
    """DrawToken uniform numbers float32[B, steps] in [0, 1), from a stream for each completion.
    A completion is (its prompt's number, which of the prompt's completions it is).
    """
    drawn = [np.random.default_rng([seed, prompt, which]).random(steps) for prompt, which in completions]
    return torch.from_numpy(np.stack(drawn)).float().clamp_(max=_BELOW_ONE)


def attempt_seed(seed: int, attempt: int) -> int:
    """Return the seed with which completions are sampled for the `attempt`-th time, from 0."""
    return seed if not attempt else int(np.random.SeedSequence([seed, attempt]).generate_state(1, np.uint64)[0])


class RepetitionPenalty:
    """Logits processor that makes tokens less likely that a row has already (arXiv 1909.05858).

    Those of the prompt too, as `generate` has it. Its own processor counts padding as well, so that a row would be drawn
    otherwise beside a longer one.
    """

    def __init__(self, penalty: float, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Take the penalty, and the prompts with their mask int64[B, width], padded on the left."""
        self._penalty, self._ids, self._mask = penalty, ids, mask
        self._seen_BV: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Divide positive scores float[B, V] of tokens that were there, and multiply others.
        `input_ids` are int64[B, width + step].
        """
        rows, vocab = scores.shape
        new = input_ids[:, self._ids.shape[1] :]
        if self._seen_BV is None:
            # One more column, for padding and ids that have no score.
            self._seen_BV = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=scores.device)
            new = torch.cat([self._ids.where(self._mask > 0, vocab), new], 1)
        else:
            new = new[:, -1:]
        self._seen_BV.scatter_(1, new.clamp(max=vocab), value=True)
        scaled = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen_BV[:, :vocab], scaled, scores)


class DrawToken:
    """Logits processor that leaves only the drawn token possible, for greedy decoding to take."""

    def __init__(self, warps: Sequence[Warp], uniforms_BS: torch.Tensor, width: int, *, checks: bool = True) -> None:
        """Take processors that change the scores first, uniform numbers, and the prompts' width.
        Without `checks` scores are not looked at, for a model without data.
        """
        self._warps, self._checks = warps, checks
        self._uniforms_BS = uniforms_BS
        self._width = width
        self._called = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Set scores float[B, V] to 0 at the drawn token and -inf elsewhere.
        `input_ids` are int64[B, width + step].

        Raises:
            RolloutError: a score is NaN, of which a draw would make id 0.
        """
        self._called = True
        for warp in self._warps:
            scores = warp(input_ids, scores)
        # The largest is no number where one is none, or all are impossible, and infinite where one is.
        if self._checks and not scores.amax(-1).isfinite().all():
            raise RolloutError(
                "the model's logits are not numbers while it samples: look at its weights, lower the learning rate, or train "
                "in float32"
            )
        # `generate` may run a few steps beyond the end before it checks.
        step = min(input_ids.shape[1] - self._width, self._uniforms_BS.shape[1] - 1)
        token = inverse_cdf(scores, self._uniforms_BS[:, step])
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    def check_called(self, model: nn.Module, *, greedy: bool) -> None:
        """Raise RolloutError where `generate` never asked for a token (Janus), unless `greedy`."""
        if not self._called and not greedy:
            raise RolloutError(
                f"{type(model).__name__}: its `generate` passes over logits_processor in this version of transformers, and "
                "would give the likeliest token where one is to be drawn: take another model"
            )


def inverse_cdf(scores: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Find in each row of scores[B, V] the token where the summed probability exceeds a number.

    Returns int64[B]. A token of less than 2^-40 is never drawn.
    """
    # Whole numbers: on a GPU sums of floats come out otherwise each time, and the same seed would draw other tokens.
    summed = (scores.float().softmax(-1) * 2.0**40).long().cumsum(-1)
    below = (uniform_B * summed[:, -1]).long()
    return (summed > below[:, None]).int().argmax(-1)
