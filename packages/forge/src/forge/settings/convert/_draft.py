"""Recipe in the making: what of another library's file is read, and what is not yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

LORA = ("lora", "qlora", "dora", "rslora")
"""Adapters of LoRA's family, whose settings other libraries call lora_rank, lora_alpha, lora_dropout and lora_target."""
TUNERS = ("oft", "qoft", "vera", "fourierft", "miss")
"""Further adapters of other libraries: finetuning_type of LLaMA-Factory, tuner_type of ms-swift."""
ONLINE = ("grpo", "rloo", "ppo")
"""Verbs that sample completions and weigh a KL to the reference (`kl_weight`)."""

_NUMBER = re.compile(r"[-+]?(\d{1,300}\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


def plain(value: Any) -> Any:
    """Return the number or truth value that a text writes, and anything else as it is.

    >>> plain("8"), plain("1e-4"), plain("True"), plain("1.0.0"), plain(2)
    (8, 0.0001, True, '1.0.0', 2)
    """
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not _NUMBER.fullmatch(value):
        return value
    return float(value) if set(value) & set(".eE") else int(value)


@attrs.define(kw_only=True)
class Draft:
    """What a file has said so far."""

    library: str
    verb: str
    known: Mapping[str, attrs.Attribute[Any]]
    """Fields of the verb's settings, by name."""
    left: dict[str, Any]
    """Keys of the file that no part has read."""
    found: dict[str, object] = attrs.field(factory=dict)
    """Settings of the recipe."""
    comments: dict[str, str] = attrs.field(factory=dict)
    """Setting → why it stands in the recipe though the file does not give it."""
    lost: list[str] = attrs.field(factory=list)
    """`key: reason` of each key that was not carried over."""

    def lose(self, key: str, why: str) -> None:
        """Take a key out of the file and say why it is not carried over."""
        self.lost.append(f"{key}: {self.left.pop(key)!r}: {why}")

    def drop(self, *keys: str, when: tuple[object, ...] = (True, False)) -> None:
        """Take out keys whose value asks for what forge does anyway."""
        for key in keys:
            if key in self.left and any(self.left[key] is value or self.left[key] == value for value in when):
                del self.left[key]
