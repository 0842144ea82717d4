"""A shell script that trains with verl or OpenRLHF → its settings, as one mapping."""

from __future__ import annotations

import re
from typing import Any

import yaml

from forge._errors import RecipeError
from forge.settings.convert._script import Command, commands

VERL, OPENRLHF = "verl_command", "openrlhf_command"
"""Keys under which the mapping has the module that is called; by them the library is known."""
_MODULE = re.compile(r"(?:.*/)?((?:verl|recipe|openrlhf)(?:[./]\w+)+?)(?:\.py)?")
_VERL = {
    **dict.fromkeys(("verl.trainer.main_ppo", "verl.trainer.main_ppo_v0", "recipe.dapo.main_dapo"), "ppo"),
    **dict.fromkeys(("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"), "sft"),
    "verl.trainer.fsdp_sft_trainer": "fsdp_sft",
}
"""Module of verl → what it trains."""
_OPENRLHF = {f"openrlhf.cli.train_{name}": name for name in ("sft", "dpo", "kto", "rm", "ppo_ray")}
_OTHERWISE = {
    "main_generation": "it answers prompts: `forge generate`",
    "main_eval": "it scores answers: `forge eval`",
    **dict.fromkeys(
        ("fully_async", "one_step_off"), "it trains on what an older policy sampled; here each rollout is of the latest"
    ),
    "train_kd": "a teacher's distribution is learned by `forge distill`",
    "train_prm": "a reward of single steps is trained there: `forge reward` trains one of whole answers",
    "train_iterative": "it alternates sampling and training: `forge generate`, and `forge dpo` on what was chosen",
    "batch_inference": "it answers prompts: `forge generate`",
    "serve_rm": "it serves a reward model, which `forge grpo` reads itself: reward_model_path",
    "interactive_chat": "`forge chat` talks to a model",
    "lora_combiner": "`forge export RUN --merge` merges an adapter",
}
"""Part of the name of another module → what there is instead."""


def command_values(text: str, name: str) -> dict[str, Any] | None:
    """Read the settings of a script's training command; None where it calls neither library.

    Raises:
        RecipeError: it calls one and trains nothing that forge trains, or trains several times.
    """
    called = [(module, at, command) for command in commands(text, name) for module, at in [_module(command)] if module]
    if not called:
        return None
    known = [each for each in called if each[0] in _VERL or each[0] in _OPENRLHF]
    if not known:
        module = called[0][0]
        why = next((told for part, told in _OTHERWISE.items() if part in module), "forge has no such training")
        raise RecipeError(f"{name}: calls {module}, of which no recipe is made: {why}.")
    values = [_values(module, command.words[at:]) for module, at, command in known]
    if any(each != values[0] for each in values):
        raise RecipeError(f"{name}: trains {len(known)} times: a recipe is of one run; keep one command in the file.")
    return values[0]


def _module(command: Command) -> tuple[str, int]:
    """Return the module that a command runs, "" for none of these, and where arguments begin."""
    for at, word in enumerate(command.words):
        if (found := _MODULE.fullmatch(word)) and (
            at == 0 or command.words[at - 1] in ("-m", "--module") or word.endswith(".py")
        ):
            return found[1].replace("/", "."), at + 1
    return "", 0


def _values(module: str, words: list[str]) -> dict[str, Any]:
    return {VERL: _VERL[module], **_overrides(words)} if module in _VERL else {OPENRLHF: _OPENRLHF[module], **_flags(words)}


def _overrides(words: list[str]) -> dict[str, Any]:
    """Read Hydra's overrides: `key=value` and `+key=value`; what has no name is passed over."""
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith("--"):
            found[key.lstrip("-").replace("-", "_")] = value
        elif equals and re.fullmatch(r"[+~]{0,2}[\w.@/-]+", key):
            found[key.lstrip("+~")] = _value(value)
    return found


def _value(text: str) -> Any:
    """Read a value as Hydra does: a list, a mapping, a text in quotes; anything else as it is."""
    if text.lower() in ("null", "none", "''", '""'):
        return None
    if text[:1] in "[{'\"":
        try:
            return yaml.safe_load(re.sub(r"(?<=[\w'\"]):(?=[^\s/])", ": ", text) if text.startswith("{") else text)
        except (yaml.YAMLError, ValueError):
            return text
    return text


def _flags(words: list[str]) -> dict[str, Any]:
    """Read flags and what follows each: nothing is true, several words are a list."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if re.match(r"--[A-Za-z]|--$", word):
            if name:
                found[name] = values[0] if len(values) == 1 else values or True
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        else:
            values.append(word)
    return found


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Read verl's YAML, section in section, as overrides.

    >>> nested({"data": {"train_files": "a.parquet"}, "algorithm": {"kl_ctrl": {"kl_coef": 0.1}}})
    {'data.train_files': 'a.parquet', 'algorithm.kl_ctrl.kl_coef': 0.1}
    """
    found: dict[str, Any] = {}
    whole = ("apply_chat_template_kwargs", "reward_kwargs")
    for key, value in values.items():
        if isinstance(value, dict) and key not in whole:
            found |= {f"{key}.{name}": each for name, each in nested(value).items()}
        else:
            found[key] = value
    return found
