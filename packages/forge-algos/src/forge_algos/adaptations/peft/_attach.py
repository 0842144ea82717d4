"""A model → the same with PEFT's layers in it or around it: PEFT's train, everything else is frozen."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings, head
from forge_algos.adaptations._adaptation import Adaptation
from forge_algos.adaptations._targets import kind_of, not_linear, resolve_targets, score
from forge_algos.adaptations.peft._dora import dora_attached
from forge_algos.adaptations.peft._ia3 import ia3_config
from forge_algos.adaptations.peft._prompts import attach_prompts
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import PROMPTS, AdapterSettings

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel


class PeftAdaptation(Adaptation):
    """PEFT's layers in a frozen model, or around it."""

    writes = "adapter"

    def __init__(self, model: "PeftModel", *said: str) -> None:
        super().__init__(model)
        self._said = said

    def describe(self) -> list[str]:
        """What PEFT put where, and how much of the model that is; weights in 4 bits count as what they stand for."""
        model: Any = self.model
        trained, total = model.get_nb_trainable_parameters()
        return [*self._said, f"trains {trained:,} of {total:,} parameters ({100 * trained / max(total, 1):.2f} %)"]


def attach_peft(model: nn.Module, settings: AdapterSettings, *, tokenizer_path: str | None = None) -> Adaptation:
    """`adapt` for everything that PEFT has.

    What is drawn is PEFT's own draw at the same random state, in float32 whatever the base's dtype. A reward model's `score`, which is
    new or nearly so, is trained whole beside it, and saved with it.

    Raises:
        AdapterError: a target matches nothing or cannot carry it, or PEFT has nothing of that kind for the model.
    """
    # PEFT itself trains and saves the layer `score` of a classifier.
    task_type = "CAUSAL_LM" if score(model) is None else "SEQ_CLS"
    if settings.adapter in (*PROMPTS, "adapter_prompt"):
        prompted = attach_prompts(model, settings, task_type=task_type, tokenizer_path=tokenizer_path)
        return PeftAdaptation(prompted, f"{settings.adapter} of {settings.num_virtual_tokens} virtual tokens")
    if settings.adapter == "ia3":
        config, targets = ia3_config(model, settings, task_type)
    else:
        targets = resolve_targets(model, settings.target_modules)
        config = _lora_config(model, settings, task_type, targets)
    _check_tops(model, targets)
    said = _described(model, settings, targets)
    if settings.target_modules is None and settings.adapter != "ia3":
        said += not_linear(model)
    with dora_attached(model, targets) if settings.adapter == "dora" else nullcontext():
        attached = _attached(model, config)
    return PeftAdaptation(attached, *said)


def _lora_config(model: nn.Module, settings: AdapterSettings, task_type: str, targets: Sequence[str]) -> "LoraConfig":
    # peft takes four seconds to import: only those who attach an adapter wait for it.
    from peft import LoraConfig

    return LoraConfig(
        task_type=task_type,
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,  # pyrefly: ignore[bad-argument-type]  PEFT says int and only divides it
        lora_dropout=settings.lora_dropout,
        target_modules=short_names(model, targets),
        use_dora=settings.adapter == "dora",
        use_rslora=settings.adapter == "rslora",
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )


def _attached(model: nn.Module, config: "PeftConfig") -> "PeftModel":
    from peft import get_peft_model

    target: Any = model
    made: Any
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks transformers 5.23 for an old name; nothing that the caller could change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            # Where both of GPT-2's kinds of linear layers are targets PEFT sees to each, and says so.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            made = get_peft_model(target, config)
    except ValueError as error:
        raise AdapterError(f"PEFT cannot attach the adapter to {type(model).__name__}: {error}") from error
    # PEFT keeps sets, which every process would write in another order.
    for name in ("target_modules", "feedforward_modules"):
        if isinstance(names := getattr(config, name, None), set):
            setattr(config, name, sorted(names))
    return made


def _check_tops(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse the targets on which an adapter would be lost: PEFT passes over `score`, and merging into a tied head moves the embeddings."""
    top, table = head(model), embeddings(model)
    tied = top is not None and table is not None and top.weight is table.weight
    for name in targets:
        module = model.get_submodule(name)
        if module is score(model):
            raise AdapterError(f"target_modules: {name} is trained whole beside the adapters already; leave it out")
        if module is top and tied:
            raise AdapterError(
                f"target_modules: {name} shares its weight with the embeddings, so that an adapter on it could not be merged; leave it out"
            )


def _described(model: nn.Module, settings: AdapterSettings, targets: Sequence[str]) -> list[str]:
    rank = "" if settings.adapter == "ia3" else f" of rank {settings.lora_r}"
    layers = f"{settings.adapter}{rank} on {len(targets)} linear layers"
    parts: dict[str, dict[str, None]] = {}
    for name in targets:
        parts.setdefault(kind_of(model, name) or "outside of the layers", {})[name.rpartition(".")[2]] = None
    named = "; ".join(f"{kind}: {', '.join(parts[kind])}" for kind in parts)
    whole = [] if score(model) is None else ["score is trained whole"]
    return [f"{layers} ({named})", *whole]
