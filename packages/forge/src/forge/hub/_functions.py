"""Functions of training_hub."""

from __future__ import annotations

from typing import Any, NoReturn

from forge._errors import SettingsError
from forge.hub._algorithms import function_of
from forge.hub._table import REFUSED

sft: Any = function_of("sft")
osft: Any = function_of("osft")
lora_sft: Any = function_of("lora_sft")
grpo: Any = function_of("grpo")
lora_grpo: Any = function_of("lora_grpo")
embedding_sft: Any = function_of("embedding_sft")


def gepa(*_args: object, **_kwargs: object) -> NoReturn:
    """Refuse prompt optimization, which trains no weights, with what to use.

    Raises:
        SettingsError: always.

    """
    raise SettingsError(REFUSED["gepa"])
