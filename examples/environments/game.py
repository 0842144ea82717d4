"""A game of several turns: find a number from 1 to 7 in three guesses, told higher or lower after each."""

from collections.abc import Mapping
from typing import Any

NUMBERS = range(1, 8)


class Guess:
    """Environment of `forge grpo --env game:Guess`; the row's field `secret` is the number."""

    def reset(self, *, prompt: Any, seed: int, secret: int) -> None:  # noqa: ARG002 - what every environment is given
        """Begin a game."""
        self.secret, self.left = secret, 3

    def step(self, turn: Mapping[str, Any]) -> tuple[str | None, float, bool]:
        """Answer a guess: (what the model reads next, reward, whether the game is over)."""
        self.left -= 1
        word = turn["content"].strip()
        if not word.isdigit() or int(word) not in NUMBERS:
            return None, 0.0, True
        if int(word) == self.secret:
            return None, 1.0, True
        if not self.left:
            return None, 0.0, True
        return ("higher" if int(word) < self.secret else "lower"), 0.0, False
