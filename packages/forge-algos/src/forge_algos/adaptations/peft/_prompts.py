"""Virtual tokens through PEFT: prefix tuning, prompt tuning, adaption prompts.

Beside PEFT's configurations there is what makes them run where PEFT calls parts of the model past their own hooks, in which a
model that is divided over ranks gathers its weights, and in bfloat16.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._counted import counted
from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings
from forge_algos.adaptations.base._adaptation import Adaptation, Context
from forge_algos.adaptations.peft._attach import PeftAdaptation, peft_config, task_type_of
from forge_algos.adaptations.peft._cache_named import name_cache_for_peft
from forge_algos.settings._adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_ADAPTED = ("llama", "mistral", "gpt2")
"""Architectures for which PEFT 0.21 has adaption prompts."""


def attach_prefix(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Attach prefix tuning (arXiv 2101.00190): learned keys and values before each document.
    They are there in every layer.

    Initial weights are those that PEFT draws at the same torch seed, in float32. Collective where the model is divided over
    ranks.

    Raises:
        AdapterError: PEFT has no prefix tuning for the model, or ZeRO-3 divides it.
    """
    del context
    adapted = with_virtual_tokens(model, settings, peft_config(settings, task_type_of(model)))
    return PeftAdaptation(adapted, described_tokens(settings))


def attach_prompt(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Attach prompt tuning (arXiv 2104.08691): learned embeddings before each document.

    Initial weights are those that PEFT draws at the same torch seed, or the embeddings of `prompt_init_text`, in float32.
    Collective where the model is divided over ranks.

    Raises:
        AdapterError: the model is a reward model, ZeRO-3 divides it, or the text cannot be made into tokens.
    """
    if settings.prompt_init_text is None:
        # PEFT's own default would draw numbers of a size that no embedding has.
        config = peft_config(settings, "CAUSAL_LM", prompt_tuning_init="SAMPLE_VOCAB")
        return PeftAdaptation(with_virtual_tokens(model, settings, config), described_tokens(settings))
    causal: Any = model
    path = context.tokenizer_path or getattr(causal.config, "_name_or_path", "")
    if not path:
        raise AdapterError(
            "prompt_init_text: no tokenizer makes tokens of it, because the model was not loaded from a path: give "
            "tokenizer_path"
        )
    config = peft_config(
        settings,
        "CAUSAL_LM",
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=settings.prompt_init_text,
        tokenizer_name_or_path=path,
    )
    return PeftAdaptation(with_virtual_tokens(model, settings, config), described_tokens(settings))


def attach_adapter_prompt(model: nn.Module, settings: AdapterSettings, context: Context) -> Adaptation:
    """Attach adaption prompts (arXiv 2303.16199): gated virtual tokens beside the attention.
    They are there in the upper layers.

    Initial weights are those that PEFT draws at the same torch seed, in float32. Collective where the model is divided over
    ranks.

    Raises:
        AdapterError: PEFT has no adaption prompts for the model.
    """
    del context
    config = peft_config(settings, task_type_of(model), adapter_layers=_layers(model, settings))
    return PeftAdaptation(with_virtual_tokens(model, settings, config), described_tokens(settings))


def with_virtual_tokens(model: nn.Module, settings: AdapterSettings, config: "PeftConfig") -> "PeftModel":
    """Return PEFT's wrapper of the virtual tokens that `config` describes, in float32.
    Collective on a divided model.

    Raises:
        AdapterError: PEFT has none such for the model, or ZeRO-3 divides it.
    """
    if settings.adapter == "adapter_prompt":
        _layers(model, settings)
        adapted = _attached(model, settings, config)
        # PEFT calls the model's `forward` directly, past its hooks.
        adapted.base_model.forward = model.__call__
        _in_float32(adapted)
        return adapted
    _refuse_zero3(model, settings)
    if settings.adapter == "prompt" and task_type_of(model) == "SEQ_CLS":
        raise AdapterError(
            "adapter=prompt: a reward model would find the last tokens of a padded batch by their ids, and is given "
            "embeddings: whoever loads it would get other rewards in a batch than alone; take adapter=prefix or lora"
        )
    adapted = _attached(model, settings, config)
    # PEFT's name for the base's embedding layer, or for its stand-in while PEFT attached; prefix tuning does without.
    if getattr(adapted, "word_embeddings", None) is not None:
        adapted.word_embeddings = embeddings(model)
    name_cache_for_peft(adapted)
    return adapted


def _attached(model: nn.Module, settings: AdapterSettings, config: "PeftConfig") -> Any:
    """Return PEFT's wrapper around the model, or raise AdapterError with its refusal."""
    from peft import get_peft_model

    base: Any = model
    try:
        with warnings.catch_warnings(), _callable_embeddings(model):
            # PEFT 0.21 uses a deprecated alias of transformers 5.23, which the caller cannot change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            return get_peft_model(base, config)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise AdapterError(f"adapter={settings.adapter}: PEFT cannot attach it to {type(model).__name__}: {error}") from error


def described_tokens(settings: AdapterSettings) -> str:
    """Return the log's line about the adapter."""
    return f"{settings.adapter} of {counted(settings.num_virtual_tokens, 'virtual tokens')}"


def _refuse_zero3(model: nn.Module, settings: AdapterSettings) -> None:
    """Raise AdapterError for a model that ZeRO-3 divides."""
    if any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
        raise AdapterError(
            f"adapter={settings.adapter}: PEFT reads its virtual tokens where ZeRO-3 has not gathered them; take "
            "strategy=fsdp2 or zero2, or adapter=lora"
        )


def _layers(model: Any, settings: AdapterSettings) -> int:
    """Return the number of uppermost layers with adaption prompts, or raise AdapterError."""
    kind = model.config.model_type
    if kind not in _ADAPTED:
        raise AdapterError(
            f"adapter=adapter_prompt: PEFT has adaption prompts for {', '.join(_ADAPTED)} and not for {kind}; take "
            "adapter=prefix or lora"
        )
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    size = getattr(model.config, "head_dim", None) or width // heads
    if heads * size != width:
        raise AdapterError(
            "adapter=adapter_prompt: PEFT makes adaption prompts only where hidden_size is num_attention_heads times "
            f"head_dim, and here {width} is not {heads} times {size}; take adapter=prefix or lora"
        )
    if task_type_of(model) == "SEQ_CLS":
        raise AdapterError(
            "adapter=adapter_prompt: PEFT would neither train nor save the layer `score` with adaption prompts; take "
            "adapter=prefix or lora"
        )
    layers = int(model.config.num_hidden_layers)
    wanted = settings.adapter_layers
    if wanted is not None and wanted > layers:
        raise AdapterError(f"adapter_layers={wanted}: the model has {layers} layers")
    return layers if wanted is None else wanted


def _in_float32(adapted: nn.Module) -> None:
    """Turn adaption prompts into float32.

    They are made in the base's dtype, in which small steps of a gate that begins at zero are lost.
    """
    for module in list(adapted.modules()):
        prompt = getattr(module, "adaption_prompt", None)
        if not isinstance(prompt, nn.Parameter) or prompt.dtype == torch.float32:
            continue
        module.forward = _autocast_to(prompt.dtype, prompt.device.type, module.forward)
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().float()))


def _autocast_to(dtype: torch.dtype, device_type: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs)

    return cast


@contextmanager
def _callable_embeddings(model: nn.Module) -> Iterator[None]:
    """Let PEFT call the embedding layer by itself inside the block, also with a divided weight."""
    layer = embeddings(model)
    if layer is None or not isinstance(getattr(layer, "weight", None), DTensor):
        yield
        return
    path, _, name = next(name for name, module in model.named_modules() if module is layer).rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, name, _Lookup(layer))
    try:
        yield
    finally:
        setattr(parent, name, layer)


class _Lookup(nn.Module):
    """Stand-in for an embedding layer with a divided weight, which looks tokens up by itself.

    The layer's own call would make the layer the first part of the model that is called, which what gathers weights takes for
    the whole model.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = layer.weight
        self.num_embeddings = layer.num_embeddings
        # In a tuple, so that the layer's weight is registered once.
        self._layer = (layer,)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look tokens up: int64[S] → float[S, D]; collective."""
        (layer,) = self._layer
        divided: Any = layer.weight
        # Weights in the host's memory are gathered on the device of the ranks' collectives.
        whole = divided.detach().to(divided.device_mesh.device_type).full_tensor()
        layer.weight = nn.Parameter(whole, requires_grad=False)
        try:
            return layer.forward(ids.to(whole.device)).to(ids.device)
        finally:
            layer.weight = divided
