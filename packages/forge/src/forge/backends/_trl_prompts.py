"""Stored prompts and reward functions → what TRL's GRPOTrainer takes."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import forge_algos
from forge._errors import SettingsError

_COMPARED = 64
_COLUMNS = "forge_columns"
"""Column with the further fields of a row as JSON, for rows need not have the same fields."""


def prompts_of(items: Any, steps: Sequence[Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the prompts of each step in the order of the plan.

    Raises:
        SettingsError: TRL would ask a prompt in other tokens than forge.

    """
    order = [int(index) for step in steps for index in step]
    for index in sorted(set(order))[:_COMPARED]:
        stored = items.store[index]
        if _asked(tokenizer, stored.prompt) != stored.input_ids.tolist():
            raise SettingsError(
                f"{items.source(index)}: the tokens of its prompt are not those that TRL would ask the model with: choose "
                "backend=forge."
            )
    return [{"prompt": items.store[index].prompt, _COLUMNS: json.dumps(items.store[index].columns)} for index in order]


def _asked(tokenizer: Any, prompt: Any) -> list[int]:
    """Tokenize a prompt as TRL does."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]


def reward_functions(s: Any) -> list[Callable[..., Any]]:
    """Load the reward functions, each given what forge gives it."""
    return [_called(name, forge_algos.online.load_reward(name)) for name in s.objective.reward]


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def reward(prompts: Any, completions: Any, **more: Any) -> Any:
        rows = [json.loads(text) for text in more[_COLUMNS]]
        names = sorted({name for row in rows for name in row})
        given = {each: [row.get(each) for row in rows] for each in names}
        found = function(prompts=prompts, completions=completions, **given)
        return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found

    reward.__name__ = name
    return reward
