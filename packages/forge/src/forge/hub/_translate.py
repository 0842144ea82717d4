"""Call of a function of training_hub → a training verb of forge and its settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

import forge
from forge._errors import SettingsError
from forge.hub._callbacks import adapted
from forge.hub._parameter import REQUIRED
from forge.hub._table import FUNCTIONS, REFUSED, SWITCHES
from forge.hub._values import lora_adapter, lora_batch
from forge.settings._backends import FORGE, backend_class
from forge.settings._elsewhere import unknown
from forge.settings._settings import flat_fields

OWN_LOOP = frozenset({"unsloth", "art", "verl", "sentence-transformers"})
"""Backends of training_hub that are forge's own loop here."""
VERBS_OF = {"lora_sft": "sft", "lora_grpo": "grpo", "embedding_sft": "embed"}
"""Function of training_hub → training verb, where it has another name."""
_TOOLS = "forge.hub._tool_calls"
_STATES = frozenset({"accelerate_full_state_at_epoch", "enable_jit_checkpoint", "on_demand_checkpointing"})
"""Parameters that ask for states from which a stopped run goes on."""


class Call(NamedTuple):
    """A training verb with its settings."""

    verb: str
    settings: dict[str, Any]
    callbacks: list[object]


def signature(function: str) -> inspect.Signature:
    """Return the signature of a function as training_hub documents it, without annotations."""
    names = [each for each in FUNCTIONS[function] if each.documented]
    keyword = {"callbacks", "enable_jit_checkpoint", "checkpoint_storage", "eval_data_path", "per_device_eval_batch_size"}
    if function == "embedding_sft":
        keyword = {each.name for each in names if each.default is not REQUIRED}
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY if each.name in keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=each.default,
        )
        for each in names
    ]
    return inspect.Signature([*parameters, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


def translate(function: str, /, **given: Any) -> Call:
    """Return what a call of training_hub is in forge: the verb, its settings, the callbacks.

    Args:
        function: `sft`, `osft`, `lora_sft`, `grpo`, `lora_grpo` or `embedding_sft`.
        given: its parameters by name, and settings of forge.

    Raises:
        SettingsError: a parameter is missing, unknown, has a value that is not available, or has no effect.

    >>> call = translate(
    ...     "osft",
    ...     model_path="m",
    ...     data_path="d",
    ...     ckpt_output_dir="o",
    ...     unfreeze_rank_ratio=0.25,
    ...     effective_batch_size=16,
    ...     max_tokens_per_gpu=2048,
    ...     max_seq_len=1024,
    ...     learning_rate=5e-6,
    ...     unmask_messages=True,
    ... )
    >>> call.verb, call.settings["train_on"], call.settings["num_epochs"]
    ('osft', 'all', 1)
    """
    if function not in FUNCTIONS:
        raise SettingsError(REFUSED.get(function, f"there is no function {function!r}; known are {', '.join(FUNCTIONS)}."))
    table = {each.name: each for each in FUNCTIONS[function]}
    missing = [name for name, each in table.items() if each.default is REQUIRED and given.get(name) is None]
    if missing:
        raise SettingsError(f"{function}: {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} required.")
    # None is "left out" there, for every parameter.
    given = {name: value for name, value in given.items() if value is not None}
    for name, each in table.items():
        # A default of what is not available here asks for nothing; written out it is refused, unless it is always so.
        if each.default is not REQUIRED and each.default is not None and not each.refused:
            given.setdefault(name, each.default)
    for name in SWITCHES & given.keys():
        if not isinstance(given[name], bool):
            raise SettingsError(f"{function}: {name} must be True or False, not {given[name]!r}.")
    verb = _verb(function, given)
    settings: dict[str, Any] = {}
    unknown_names: dict[str, str] = {}
    known = {field.name for _, field in flat_fields(getattr(forge, verb).task.settings)}
    callbacks = adapted(given.get("callbacks", ()))
    for name, value in given.items():
        if name in ("callbacks", "backend"):
            continue
        own = _of_backend(given.get("backend"), name)
        if own is not None:
            _add(settings, {own: value}, name)
        elif name in table:
            _add(settings, table[name].settings(function, value, given), name)
        elif name in known:
            _add(settings, {name: value}, name)
        else:
            unknown_names[name] = ""
    if unknown_names:
        raise SettingsError(unknown(unknown_names, known | table.keys(), what=f"{function}: unknown parameter"))
    backend = given.get("backend", FORGE)
    refused = _refused(function, given)
    for name, value in _defaults(function, given).items():
        # What nobody asked for is not asked of a backend that has nothing of the kind.
        if (
            name in known
            and name not in refused
            and not (name == "num_epochs" and settings.keys() & {"max_steps", "max_tokens"})
        ):
            settings.setdefault(name, value)
    if backend not in OWN_LOOP:
        settings["backend"] = backend
    return Call(verb, settings, callbacks)


def _refused(function: str, given: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what a call's backend has nothing of; refuse a call that asks for its states."""
    backend = given.get("backend", FORGE)
    refused = backend_class(backend).refused if isinstance(backend, str) and backend not in OWN_LOOP else {}
    why = refused.get("accelerate_full_state_at_epoch")
    for name in sorted(_STATES & given.keys()):
        # In forge's own loop each is always so.
        if given[name] is True and why is not None:
            raise SettingsError(
                f"{function}: {name}=True has no effect with backend={backend}: {why}. Leave it out, or choose backend=forge."
            )
    return refused


def _verb(function: str, given: Mapping[str, Any]) -> str:
    """Return the training verb of a call."""
    if given.get("is_pretraining") and function in ("sft", "osft"):
        return "pretrain"
    return VERBS_OF.get(function, function)


def _defaults(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what training_hub sets where a call leaves it open, in forge's settings."""
    if function == "sft":
        return {"num_epochs": 1, "checkpoint_at_epoch": True}
    if function == "osft":
        return {"num_epochs": 1, "adapter": "osft"}
    if function == "lora_sft":
        return {
            "adapter": lora_adapter(given),
            "effective_batch_size": lora_batch(given),
            "lora_alpha": 32,
            "num_epochs": 3,
            "learning_rate": 2e-4,
            "max_seq_len": 2048,
            "lr_scheduler": "linear",
            "warmup_steps": 10,
            "weight_decay": 0.01,
            **_trainer_betas(given),
            "max_grad_norm": 0.3,
            "full_state_every_steps": 500,
            "keep_last_n": 3,
            **({"eval_every_steps": 500} if "eval_data_path" in given else {}),
        }
    if function == "embedding_sft":
        pairs = {"lr_scheduler": "linear", "weight_decay": 0.0, **_trainer_betas(given)}
        pairs |= {} if "warmup_steps" in given else {"warmup_ratio": 0.1}
        return pairs | ({"exclude_same_text": True} if given["loss_type"] == "mnrl" else {})
    found: dict[str, Any] = {"lr_scheduler": "constant"}
    if not given["use_dr_grpo"]:
        found["kl_weight"] = 0.01
    if function == "lora_grpo":
        found["adapter"] = "lora"
    if "reward_fn" not in given and not given.get("reward") and not given.get("reward_model_path"):
        found |= {"reward": (f"{_TOOLS}:tool_call",), "preprocess": f"{_TOOLS}:call_prompts"}
    return found


def _trainer_betas(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the betas of transformers' Trainer, which trains there, for AdamW."""
    return {} if "optimizer" in given else {"beta1": 0.9, "beta2": 0.999}


def _add(settings: dict[str, Any], new: Mapping[str, object], name: str) -> None:
    """Add settings; two values of one contradict each other, unless they rename columns."""
    for setting, value in new.items():
        before = settings.get(setting)
        if isinstance(value, dict) and isinstance(before, dict):
            twice = next((key for key in value if before.get(key, value[key]) != value[key]), None)
            if twice is not None:
                raise SettingsError(
                    f"{name} asks for {setting} of {twice!r} to be {value[twice]!r}, and another parameter for "
                    f"{before[twice]!r}: give one."
                )
            settings[setting] = {**before, **value}
        elif setting in settings and before != value:
            raise SettingsError(f"{name} asks for {setting}={value!r}, and another parameter for {before!r}: give one.")
        else:
            settings[setting] = value


def _of_backend(backend: Any, name: str) -> str | None:
    """Return the setting that a backend has of its own for a parameter; None where it has none."""
    if not isinstance(backend, str) or backend == FORGE or backend in OWN_LOOP:
        return None
    own = backend_class(backend).Settings
    fields = set() if own is None else {field.name for field in attrs.fields(own)}
    return next((each for each in (name, _THEIRS.get(name, name)) if each in fields), None)


_THEIRS = {"use_liger": "use_liger_kernels"}
"""Parameter of training_hub → what mini-trainer calls it."""
