"""Settings → the adaptation that they name, on a model."""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos.adaptations._adaptation import Adaptation, Importance, OneRank, Ranks
from forge_algos.adaptations.peft._quantization import check_quantized
from forge_algos.settings._adapter import AdapterSettings


def adapt(
    model: nn.Module,
    settings: AdapterSettings,
    *,
    cache: Path | None = None,
    ranks: Ranks | None = None,
    importance: Importance | None = None,
    free: Mapping[str, int] | None = None,
    tokenizer_path: str | None = None,
) -> Adaptation:
    """Ready `model` for training as `settings` say; its layers are changed in place, and what may not move needs no gradient.

    New weights are drawn from torch's random state: seed it before for the same ones. Call it before an optimizer is made, and before
    a strategy wraps the model; collective where the model is divided over ranks.

    Args:
        model: a transformers causal language model, or one for sequence classification whose layer is called `score`.
        settings: which adaptation, and its options.
        cache: OSFT: directory of singular vectors that were computed before, and where new ones are kept; None keeps none.
        ranks: those that share the model; this process alone by default.
        importance: OSFT with osft_rank=adaptive: what gives each target its importance (`osft_importance`).
        free: OSFT: each target's free directions as the run had them when it began, where one goes on; by default as `settings` say.
        tokenizer_path: adapter=prompt with a text to begin as: whose tokens those are; by default the model's own path.

    Raises:
        AdapterError: a target matches nothing or cannot carry it, the model has an adapter already, or is of a kind that it does not fit.
    """
    if hasattr(model, "peft_config"):
        raise AdapterError("the model carries a PEFT adapter already; merge it (merge_and_unload) or start from its base")
    check_quantized(model, settings.adapter)
    if settings.adapter == "none":
        return Adaptation(model)
    if settings.adapter == "osft":
        from forge_algos.adaptations.osft._attach import attach_osft

        return attach_osft(model, settings, cache=cache, ranks=ranks or OneRank(), importance=importance, free=free)
    from forge_algos.adaptations.peft._attach import attach_peft

    return attach_peft(model, settings, tokenizer_path=tokenizer_path)
