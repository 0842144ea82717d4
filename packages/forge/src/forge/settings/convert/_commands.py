"""A shell script that trains with ms-swift, verl or OpenRLHF → its settings, as one mapping."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from forge._errors import RecipeError
from forge.settings.convert.shell._shell import Command, commands

SWIFT, VERL, OPENRLHF = "swift_command", "verl_command", "openrlhf_command"
"""Keys under which the mapping has what is called."""
CALLED = {SWIFT: "ms-swift", VERL: "verl", OPENRLHF: "OpenRLHF"}
"""Such a key → the library that is called."""
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
_SWIFT = ("sft", "pt", "rlhf")
_OTHER_SWIFT = {
    "infer": "`forge generate` and `forge chat` answer prompts",
    "app": "`forge chat` answers prompts",
    "web-ui": "`forge sft --help` lists what may be set",
    "deploy": "`forge serve` answers requests",
    "rollout": "forge grpo has a server of its own: sampler=vllm",
    "export": "`forge export` merges, quantises and writes other formats",
    "merge-lora": "`forge export RUN --merge` merges an adapter",
    "eval": "`forge eval` scores a model",
    "sample": "`forge generate` answers prompts",
}
"""Command of swift that trains nothing → what there is here."""
_SWIFT_FILE = re.compile(r"(?:.*/)?swift/cli/(\w+)\.py|swift\.cli\.(\w+)")
_OF_TORCHRUN = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")
_OF_ROWS = ("dataset", "val_dataset", "split_dataset_ratio", "columns", "max_length")
"""Flags of `swift export --to_cached_dataset` that say which rows are trained on."""
_LONGEST = 100


class _Swift(NamedTuple):
    """A call of swift."""

    name: str
    """`sft`, `rlhf`, ...; `megatron` for any of Megatron-SWIFT's."""
    flags: dict[str, Any]
    environment: dict[str, str]
    """Variables that it is called with, and what torchrun is told."""
    stray: list[str]
    """Flags that the shell gives to no command."""


def command_values(text: str, name: str) -> dict[str, Any] | None:
    """Read the settings of a script's training command; None where it calls no such library.

    Of ms-swift the environment stands under `ENV`, as in its YAML files.

    Raises:
        RecipeError: it calls one and trains nothing that forge trains, or trains several times, or cannot be read; or it is a
            script by its name and calls none.

    """
    found = commands(text, name)
    called = [(module, at, command) for command in found for module, at in [_module(command)] if module]
    swift = [] if called else _swift(found)
    if called:
        return _of_module(called, name)
    if swift:
        return _of_swift(swift, name)
    if name.endswith((".sh", ".bash")):
        raise RecipeError(
            f"{name}: calls no training of ms-swift, verl or OpenRLHF (`while` loops, and branches whose condition only a "
            "running shell knows, are passed over)."
        )
    return None


def _module(command: Command) -> tuple[str, int]:
    """Return the module of verl or OpenRLHF that is run, "" for none, and where arguments begin."""
    for at, word in enumerate(command.words):
        if (found := _MODULE.fullmatch(word)) and (
            at == 0 or command.words[at - 1] in ("-m", "--module") or word.endswith(".py")
        ):
            return found[1].replace("/", "."), at + 1
    return "", 0


def _of_module(called: Sequence[tuple[str, int, Command]], name: str) -> dict[str, Any]:
    """Return the settings of the one training among the modules that are called."""
    known = [each for each in called if each[0] in _VERL or each[0] in _OPENRLHF]
    if not known:
        module = called[0][0]
        why = next((told for part, told in _OTHERWISE.items() if part in module), "forge has no such training")
        raise RecipeError(f"{name}: calls {module}, of which no recipe is made: {why}.")
    values = [
        {VERL: _VERL[module], **_overrides(command.words[at:])}
        if module in _VERL
        else {OPENRLHF: _OPENRLHF[module], **_flags(command.words[at:])}
        for module, at, command in known
    ]
    if any(each != values[0] for each in values):
        raise _several(name, [module for module, _, _ in known])
    return values[0]


def _several(name: str, trained: Sequence[str]) -> RecipeError:
    names = ", ".join(dict.fromkeys(trained))
    return RecipeError(
        f"{name}: trains {len(trained)} times ({names}): a recipe is of one run; keep one command in the file, and of a loop "
        "one value."
    )


def _overrides(words: Sequence[str]) -> dict[str, Any]:
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


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Read flags and what follows each (nothing: true; several words: a list); the last holds."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if re.match(r"--[A-Za-z]|--$", word):
            if name:
                found[name] = values[0] if len(values) == 1 else values or True
            else:
                found |= dict.fromkeys(values, True)  # a file with flags, or a variable whose flags are not known
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        else:
            values.append(word)
    return found


def _swift(found: Sequence[Command]) -> list[_Swift]:
    """Find the calls of swift, and flags on lines of their own behind each."""
    called: list[_Swift] = []
    for command in found:
        if command.words[0].startswith("--") and called:
            called[-1].stray.append(" ".join(command.words)[:_LONGEST])  # behind a comment, which ends a command
            continue
        name, at = _swift_command(command.words)
        if name:
            environment = {**command.environment, **_torchrun(command.words[:at])}
            called.append(_Swift(name, _flags(command.words[at:]), environment, []))
    return called


def _swift_command(words: Sequence[str]) -> tuple[str, int]:
    """Return the command of swift that is called, "" for none, and where its flags begin."""
    for at, word in enumerate(words):
        if (found := _SWIFT_FILE.fullmatch(word)) and (name := (found[1] or found[2]).replace("_", "-")) != "main":
            return name if name in (*_SWIFT, *_OTHER_SWIFT) else "megatron" if "megatron" in word else "", at + 1
        if "swift/cli/_megatron" in word or word.rpartition("/")[2] == "megatron":
            return "megatron", at + 1
        if word.rpartition("/")[2] == "swift" and at + 1 < len(words):
            name = words[at + 1].replace("_", "-")
            if name in (*_SWIFT, *_OTHER_SWIFT):
                return name, at + 2
    return "", 0


def _torchrun(words: Sequence[str]) -> dict[str, str]:
    """Read how many processes torchrun starts, under swift's names in the environment."""
    flags = _flags(words) if any(word.endswith(("torchrun", "torch.distributed.run")) for word in words) else {}
    return {name.upper(): str(flags[name]) for name in _OF_TORCHRUN if isinstance(flags.get(name), str)}


def _of_swift(found: Sequence[_Swift], name: str) -> dict[str, Any]:
    """Return the settings of the one training among the calls of swift."""
    trained = [each for each in found if each.name in _SWIFT]
    if not trained:
        first = found[0].name
        if any(each.name == "megatron" for each in found):
            raise RecipeError(
                f"{name}: calls megatron, whose flags are Megatron's; what is converted is swift's training by transformers. "
                "forge divides layers and experts with tp_size and ep_size."
            )
        raise RecipeError(
            f"{name}: calls swift {first}, which trains nothing, so that there is no recipe of it: {_OTHER_SWIFT[first]}."
        )
    command = trained[0]
    if any(each[:2] != command[:2] for each in trained):
        raise _several(name, [f"swift {each.name}" for each in trained])
    named = next((flag for flag in command.flags if flag.endswith((".yaml", ".yml", ".json"))), None)
    if named is not None:
        raise RecipeError(f"{name}: its flags stand in {named}: convert that file.")
    cached = next((each.flags for each in found if each.name == "export" and "to_cached_dataset" in each.flags), {})
    rows = {flag: cached[flag] for flag in _OF_ROWS if flag in cached}  # made by the same script
    stray = {"stray_flags": command.stray} if command.stray else {}
    return {SWIFT: command.name, "ENV": command.environment, **rows, **command.flags, **stray}


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
