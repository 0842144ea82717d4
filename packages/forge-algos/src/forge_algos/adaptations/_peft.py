"""A causal language model, or a reward model → the same with low-rank adapters (arXiv 2106.09685), through PEFT."""

import warnings
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_algos._adapter_settings import AdapterSettings
from forge_algos._errors import AdapterError
from forge_algos._modules import head
from forge_algos.adaptations._adaptation import Adaptation

if TYPE_CHECKING:
    from peft import PeftModel


class PeftAdaptation(Adaptation):
    """PEFT's layers around or inside a frozen model."""

    writes = "adapter"


def attach_peft(model: nn.Module, settings: AdapterSettings, *, tokenizer_path: str | None = None) -> Adaptation:
    """`adapt` for everything that PEFT has."""
    del tokenizer_path
    return PeftAdaptation(_lora(model, settings))


def _lora(model: nn.Module, settings: AdapterSettings) -> "PeftModel":
    """Put an adapter beside each target and freeze everything else; the base's layers are changed in place.

    Adapters are float32 whatever the base's dtype, and drawn from torch's random state: seed it before for the same adapters.
    A fresh adapter adds exactly nothing. A reward model's `score` layer, which is new or nearly so, is trained whole beside the
    adapters, and saved with them.

    Args:
        model: a transformers causal language model, or one for sequence classification whose layer is called `score`.
        settings: `adapter="lora"` with rank, scale, dropout and targets; no targets means every linear layer but the head.

    Returns:
        peft.PeftModel: holds `model`; its `save_pretrained` writes the adapter alone.

    Raises:
        AdapterError: a target matches nothing, a target cannot carry an adapter, the model has one already, or the settings
            say adapter="none".
    """
    _check_targets(model, settings.target_modules)
    # peft takes four seconds to import: only those who attach an adapter wait for it.
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        # PEFT itself trains and saves the layer `score` of a classifier.
        task_type="CAUSAL_LM" if _score(model) is None else "SEQ_CLS",
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,  # pyrefly: ignore[bad-argument-type]  PEFT says int and only divides it
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.target_modules) if settings.target_modules else "all-linear",
    )
    target: Any = model
    try:
        with warnings.catch_warnings():
            # PEFT 0.21 asks transformers 5.23 for an old name; nothing that the caller could change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            return get_peft_model(target, config)
    except ValueError as error:
        raise AdapterError(
            f"PEFT cannot attach an adapter: {error}; linear layers here: {_list(linear_names(model))}"
        ) from error


def linear_names(model: nn.Module) -> list[str]:
    """Last name parts of the model's linear layers but the head, sorted: what `target_modules` can say."""
    # A model has the one or the other.
    skipped = {_score(model), head(model)}
    return sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear) and m not in skipped})


def _score(model: nn.Module) -> nn.Module | None:
    """The layer that gives a sequence its number, in a model that has no head over a vocabulary."""
    found: object = getattr(model, "score", None)
    return found if head(model) is None and isinstance(found, nn.Linear) else None


def _check_targets(model: nn.Module, targets: tuple[str, ...] | None) -> None:
    names = [name for name, _ in model.named_modules() if name]
    missing = [t for t in targets or () if not any(name == t or name.endswith(f".{t}") for name in names)]
    if not missing:
        return
    known = linear_names(model)
    nearest = [match for name in missing for match in get_close_matches(name, known, n=1)]
    hint = f" Did you mean {_list(nearest)}?" if nearest else ""
    raise AdapterError(
        f"target_modules: {_list(missing)} matches no module of {type(model).__name__}.{hint} Linear layers here: {_list(known)}"
    )


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"
