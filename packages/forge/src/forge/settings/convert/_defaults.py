"""What a file leaves to its library and forge has otherwise → settings of the recipe.

Only what changes the numbers that are learned: how a run saves, logs or fits into memory stays forge's. The defaults are those
of TRL 1.16 with transformers 5.23 (tests/peers holds them to it), LLaMA-Factory 0.9.5, Axolotl 0.19.0 and ms-swift 4.6 (read
from their sources into tests/forge/settings/library_defaults.json).
"""

from __future__ import annotations

from forge.settings.convert._adapter import WITHOUT_DROPOUT
from forge.settings.convert._draft import LORA, ONLINE, Draft

TRAINER: dict[str, object] = {"num_epochs": 3, "lr_scheduler": "linear", "beta2": 0.999}
"""transformers' TrainingArguments, which TRL and LLaMA-Factory share."""
TRL: dict[str, dict[str, object]] = {
    "sft": {"learning_rate": 2e-5, "max_seq_len": 1024, "on_overflow": "truncate"},
    "dpo": {"learning_rate": 1e-6, "max_seq_len": 1024, "on_overflow": "truncate"},
    "kto": {"learning_rate": 1e-6, "max_seq_len": 1024, "on_overflow": "truncate", "shuffle": False},
    "orpo": {"learning_rate": 1e-6, "max_seq_len": 1024, "on_overflow": "truncate", "learn_prompt": True},
    "simpo": {
        "learning_rate": 1e-6,
        "max_seq_len": 1024,
        "on_overflow": "truncate",
        "beta": 0.1,
        "gamma": 0.5,
        "cpo_alpha": 1.0,
    },
    "reward": {"learning_rate": 1e-4, "max_seq_len": 1024},
    "grpo": {"learning_rate": 1e-6, "max_new_tokens": 512, "kl_estimator": "unbiased"},
    "rloo": {"learning_rate": 1e-6, "max_new_tokens": 512, "num_generations": 2},
    "distill": {"learning_rate": 1e-6, "max_new_tokens": 512},
}
"""Verb → defaults of TRL's configuration class beside `TRAINER`."""
TRL_LORA: dict[str, object] = {"lora_dropout": 0.05, "target_modules": ("q_proj", "v_proj")}
"""TRL's LoRA; its layers are those that PEFT chooses in Llama, Mistral, Qwen and Gemma."""
_LLAMA_FACTORY: dict[str, object] = {**TRAINER, "learning_rate": 5e-5, "max_seq_len": 2048, "on_overflow": "truncate"}
_LLAMA_FACTORY_BY_VERB: dict[str, dict[str, object]] = {
    "simpo": {"beta": 0.1, "gamma": 0.5},
    "ppo": {"max_new_tokens": 1024, "temperature": 0.95, "top_p": 0.7, "top_k": 50, "kl_weight": 0.2},
    "pretrain": {"cross_documents": True},
}
_APOLLO: dict[str, dict[str, object]] = {
    "TRL": {"apollo_rank": 128, "apollo_scale": 1.0},
    "Axolotl": {"apollo_rank": 128, "apollo_scale": 1.0},
    "LLaMA-Factory": {"apollo_rank": 16, "apollo_scale": 32.0},
    "ms-swift": {"apollo_rank": 128, "apollo_scale": 1.0},
}
"""Library → its APOLLO, where that optimizer is asked for; transformers' in two of them."""
_SWIFT: dict[str, object] = {"num_epochs": 3, "weight_decay": 0.1, "learning_rate": 1e-5}
_SWIFT_BY_VERB: dict[str, dict[str, object]] = {
    "simpo": {"cpo_alpha": 1.0},
    "grpo": {"kl_weight": 0.04, "temperature": 0.9},
    "rloo": {"kl_weight": 0.04, "temperature": 0.9},
    "ppo": {"temperature": 0.9},
    "distill": {"temperature": 0.9},
}
_AXOLOTL: dict[str, object] = {"beta2": 0.999, "max_seq_len": 512}


def add_defaults(draft: Draft, given: set[str]) -> None:
    """Write what the library would do by default, where forge would do something else.

    Args:
        draft: what the file gave.
        given: settings that the file has a key for, carried over or not.

    """
    for name, value in _wanted(draft).items():
        field = draft.known.get(name)
        if field is None or name in draft.found or name in given or _unread(draft, name) or field.default == value:
            continue
        draft.found[name] = value
        draft.comments[name] = f"{draft.library}'s default"
    if draft.comments.get("target_modules"):
        draft.comments["target_modules"] = "PEFT's default for Llama, Mistral, Qwen and Gemma; other models have other names"
    rank = draft.found.get("lora_r")
    if draft.library == "LLaMA-Factory" and isinstance(rank, int) and "lora_alpha" not in given:
        draft.found["lora_alpha"] = 2 * rank
        draft.comments["lora_alpha"] = "LLaMA-Factory's default: twice the rank"
    _tell(draft, given)


def _wanted(draft: Draft) -> dict[str, object]:
    """Return the library's defaults under the names that they have here."""
    adapter, verb = draft.found.get("adapter"), draft.verb
    if draft.library == "TRL":
        own = TRL.get("sft" if verb in ("osft", "pretrain") else verb, {})
        found = {**TRAINER, **own, **(TRL_LORA if adapter in LORA else {})}
        found |= {"double_quant": False} if adapter == "qlora" and draft.found.get("quant_type") != "int8" else {}
    elif draft.library == "LLaMA-Factory":
        found = {**_LLAMA_FACTORY, **_LLAMA_FACTORY_BY_VERB.get(verb, {}), **({"lora_r": 8} if adapter in LORA else {})}
    elif draft.library == "ms-swift":
        found = {**_SWIFT, **_SWIFT_BY_VERB.get(verb, {})}
        if adapter in LORA:
            dropout = {} if verb in (*WITHOUT_DROPOUT["ms-swift"], *ONLINE) else {"lora_dropout": 0.05}
            found |= {"lora_r": 8, "learning_rate": 1e-4, **dropout}
    else:
        found = {
            **_AXOLOTL,
            **({"learn_prompt": True} if verb == "orpo" else {}),
            **({"beta": 0.1, "cpo_alpha": 1.0} if verb == "simpo" else {}),
        }
    if draft.found.get("optimizer") in ("apollo", "apollo_mini"):
        found |= _APOLLO[draft.library]
    if verb == "pretrain" and "max_seq_len" in found:
        found["block_size"] = found["max_seq_len"]
    return found


def _unread(draft: Draft, name: str) -> bool:
    """Whether a setting would have no effect beside the others."""
    found = draft.found
    return (
        (name in ("lora_r", "lora_alpha", "target_modules") and "adapter_path" in found)
        or (name == "num_epochs" and "max_steps" in found)
        or (name == "beta2" and found.get("optimizer") == "adafactor")
        or (name == "lr_scheduler" and found.get("optimizer") == "schedule_free")
        or (name == "on_overflow" and "max_seq_len" not in found)
        or (name == "kl_estimator" and not found.get("kl_weight"))
        or (name == "max_new_tokens" and draft.verb == "distill" and not found.get("on_policy"))
    )


def _tell(draft: Draft, given: set[str]) -> None:
    """List defaults for which forge has no setting, or none of that value."""
    if draft.library == "LLaMA-Factory" and draft.verb == "ppo":
        draft.lost.append("ppo_target: 6.0 there by default: the weight of the KL starts at 0.2 and follows it; here it stays")
    if draft.library == "ms-swift" and draft.verb in ("grpo", "rloo") and draft.found.get("adapter") in LORA:
        draft.lost.append(
            "lora_dropout: 0.05 there by default; here the model that samples is the one that trains, without dropout"
        )
    if draft.library == "Axolotl" and draft.verb == "grpo" and "max_new_tokens" not in given:
        draft.lost.append("max_completion_length: left out, which is no limit there: give max_new_tokens, 256 by default")
