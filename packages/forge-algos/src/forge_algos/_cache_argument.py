"""The name under which models of transformers take and return keys and values."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Its names: the second as of transformers 5.24, which takes the first with a warning until 5.40."""


@cache
def cache_argument() -> str:
    """Return the name that the installed transformers uses."""
    from transformers import GenerationMixin

    named = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in reversed(CACHE_ARGUMENTS) if name in named)


def has_cache(given: Mapping[str, Any]) -> bool:
    """Return whether there are keys and values among a forward's arguments, under either name."""
    return any(given.get(name) is not None for name in CACHE_ARGUMENTS)
