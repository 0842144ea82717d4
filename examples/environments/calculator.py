"""A tool: three numbers are to be added, and a calculator adds those that it is given."""

import itertools
from collections.abc import Mapping
from typing import Any

NUMBERS = range(10)
SUMS = list(itertools.product(NUMBERS, repeat=3))


def asked(numbers: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the messages that ask for a sum."""
    return [{"role": "user", "content": " + ".join(map(str, numbers))}]


def call(numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return the assistant's message that has numbers added."""
    function = {"name": "add", "arguments": {"numbers": list(numbers)}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


class Calculator:
    """Environment of `forge grpo --env calculator:Calculator`; the row's field `numbers` is what is to be added."""

    def reset(self, *, prompt: Any, seed: int, numbers: list[int]) -> None:  # noqa: ARG002 - what every environment is given
        """Begin with numbers to add."""
        self.total = sum(numbers)

    def step(self, turn: Mapping[str, Any]) -> tuple[list[dict[str, str]] | None, float, bool]:
        """Answer a call, or judge an answer: (what the model reads next, reward, whether the episode is over)."""
        calls = turn.get("tool_calls") or []
        if not calls:
            return None, float(turn["content"].strip() == str(self.total)), True
        given = calls[0]["function"]["arguments"].get("numbers")
        if not isinstance(given, list) or not given or not all(isinstance(number, int) for number in given):
            return None, 0.0, True
        return [{"role": "tool", "content": str(sum(given))}], 0.0, False
