"""Recipe in the making: what of another library's file is read, and what is not yet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from forge._errors import SettingsError
from forge.settings._converted import converted

Fields = Mapping[str, "attrs.Attribute[Any]"]
"""Fields of a verb's settings, by name."""
BESIDE = "says how it runs there"
"""Reason of a key that changes nothing of what is trained."""
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
    ranks: int | None = None
    """Number of GPUs that the file says it is for; None where it leaves that open."""
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


def checked(found: Mapping[str, object], known: Fields, lost: list[str]) -> dict[str, object]:
    """Return the settings that the verb has, in its types; list values that are none of theirs."""
    settings: dict[str, object] = {}
    for name, field in known.items():
        if found.get(name) is not None:
            try:
                settings[name] = converted(field, found[name], "recipe")
            except SettingsError as error:
                lost.append(f"{name}: {found[name]!r}: {str(error).replace(' (recipe)', '')}")
    return settings


@attrs.define(kw_only=True)
class Keys:
    """Keys of a library with dotted names, and what they have become so far."""

    library: str
    values: Mapping[str, Any]
    found: dict[str, object] = attrs.field(factory=dict)
    comments: dict[str, str] = attrs.field(factory=dict)
    lost: list[str] = attrs.field(factory=list)
    seen: set[str] = attrs.field(factory=set)
    """Keys that were read."""

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that has one, as a number where it is one."""
        self.seen |= set(names)
        given = next((self.values[name] for name in names if self.values.get(name) not in (None, "")), default)
        return plain(given)

    def has(self, *names: str) -> bool:
        """Whether the file gives one of these keys a value."""
        return any(self.values.get(name) not in (None, "") for name in names)

    def take(self, setting: str, *names: str, default: Any = None) -> None:
        """Make a setting of the first of these keys, or of the library's default."""
        self.found[setting] = self.get(*names, default=default)
        if default is not None and not self.has(*names):
            self.comments[setting] = f"{self.library}'s default"

    def lose(self, name: str, why: str) -> None:
        """List a key that has a value and is not carried over."""
        self.seen.add(name)
        if plain(self.values.get(name)) not in (None, "", False, 0):
            self.lost.append(f"{name}: {self.values[name]!r}: {why}")

    def drop_open(self) -> None:
        """Take out settings whose value only a running script knows, or that is open: `{name}`."""
        for name, value in list(self.found.items()):
            texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
            if any("$" in text or re.fullmatch(r"\{\s*\w+\s*\}", text) for text in texts):
                self.found[name] = None
                self.lost.append(f"{name}: {value!r}: is known to the running script alone: give {name}")
        if self.found.get("eval_data_path") is None:
            self.found.pop("eval_every_steps", None)

    def result(
        self, verb: str, known: Fields, beside: re.Pattern[str]
    ) -> tuple[str, dict[str, object], list[str], dict[str, str]]:
        """Return what a converter returns, without defaults that are forge's; list the unread."""
        for name, value in self.values.items():
            if name not in self.seen and (beside.fullmatch(name) or value not in (None, "", False, [], {})):
                self.lost.append(f"{name}: {value!r}: {BESIDE if beside.fullmatch(name) else 'forge has nothing of the kind'}")
        settings = checked(self.found, known, self.lost)
        for name in list(settings):
            if self.comments.get(name, "").endswith("default") and settings[name] == known[name].default:
                del settings[name]
        return verb, settings, self.lost, {name: text for name, text in self.comments.items() if name in settings}
