"""Attaches the adaptation that settings name to a model."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._adaptation import Adaptation, Context, Directions, Importance, Moments, OneRank, Ranks
from forge_algos.adaptations.base._modalities import Parts
from forge_algos.adaptations.peft._quantization import check_quantized
from forge_algos.settings._adapter import AdapterSettings
from forge_algos.settings._adapter_table import ADAPTERS

_STORED = "forge_algos.adaptations.peft._stored:attach_stored"
"""Attaches what `adapter_path` holds, whichever of its kinds that is."""


def adapt(
    model: nn.Module,
    settings: AdapterSettings,
    *,
    cache: Path | None = None,
    ranks: Ranks | None = None,
    importance: Importance | None = None,
    moments: Moments | None = None,
    rows: str = "",
    directions: Directions | None = None,
    free: Mapping[str, int] | None = None,
    tokenizer_path: str | None = None,
    new_tokens: Sequence[int] = (),
    language: bool = True,
    beside: Sequence[str] = (),
) -> Adaptation:
    """Prepare `model` for training, by the row of `ADAPTERS` that `settings.adapter` names.

    With `settings.adapter_path` the adapter of that directory goes on, with its values.

    Layers are changed in place, and parameters that may not move need no gradient. New weights are drawn from torch's random
    state: seed it first for reproducible ones. Call it before an optimizer is made and before a strategy wraps the model.
    Collective where the model is divided over ranks.

    Args:
        model: a transformers causal language model, or one for sequence classification whose layer is called `score`.
        settings: which adaptation, and its options.
        cache: OSFT: directory in which singular vectors are looked up and kept; None keeps none.
        ranks: the processes that share the model; this one alone by default.
        importance: OSFT with osft_rank=adaptive: measures the importance of each target (`osft_importance`).
        moments: OSFT with osft_directions=inputs: measures what each target is given (`osft_moments`); called for some targets
            after the others, as many at once as 1 GiB holds.
        rows: what the model and the rows that `moments` measures on are known by, a digest say: directions in `cache` that were
            measured on the same are taken without measuring again. With "" all are measured.
        directions: LoRA with init_lora_weights=eva: measures the directions of each target's inputs (`eva_directions`).
        free: OSFT: free directions of each target when the run began, to resume it; by default as `settings` have them.
        tokenizer_path: adapter=prompt with prompt_init_text: path of its tokenizer; by default the model's own path.
        new_tokens: ids whose rows the model has not been trained with: LoRA and the like train these rows of the embedding and
            the head beside their matrices.
        language: whether the language part of a model of several modalities is trained.
        beside: full names of the modules beside it that are: an adapter's targets lie in them too. Without an adapter their
            weights train where they need gradients already.

    Raises:
        AdapterError: a target matches nothing or cannot carry the adapter, the model has an adapter already, or the adapter
            does not fit this kind of model.
    """
    if not isinstance(settings, AdapterSettings):
        raise AdapterError(f"AdapterSettings(adapter='lora', ...) are wanted, not {settings!r}")
    if hasattr(model, "peft_config"):
        raise AdapterError("the model carries a PEFT adapter already; merge it (merge_and_unload) or start from its base")
    check_quantized(model, settings)
    attach = ADAPTERS[settings.adapter].attach if settings.adapter_path is None else _STORED
    if isinstance(attach, str):
        module, _, name = attach.partition(":")
        attach = getattr(import_module(module), name)
    context = Context(
        cache=cache,
        ranks=ranks or OneRank(),
        importance=importance,
        moments=moments,
        rows=rows,
        directions=directions,
        free=free,
        tokenizer_path=tokenizer_path,
        new_tokens=tuple(new_tokens),
        parts=Parts(language, tuple(beside)),
    )
    return attach(model, settings, context)
