"""A model → the same with virtual tokens through PEFT: prefix tuning (arXiv 2101.00190), prompt tuning (2104.08691), adaption prompts
(LLaMA-Adapter, 2303.16199).

What is here beside PEFT's configurations makes them run where PEFT calls parts of the model past their own hooks, in which a model that is
divided over ranks gathers its weights, and in bfloat16.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings
from forge_algos.settings._adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import PeftModel

_ADAPTED = ("llama", "mistral", "gpt2")
"""Architectures that PEFT 0.21 has adaption prompts for."""


def attach_prompts(
    model: nn.Module, settings: AdapterSettings, *, task_type: str, tokenizer_path: str | None = None
) -> "PeftModel":
    """`adapt` for adapter=prefix, prompt and adapter_prompt: initial weights are those that PEFT draws at the same torch seed, in float32.

    Collective where the model is divided over ranks.

    Args:
        model: a transformers causal language model, or one for sequence classification whose layer is called `score`.
        settings: `adapter` and its options.
        task_type: PEFT's word for the model: CAUSAL_LM or SEQ_CLS.
        tokenizer_path: whose tokens `prompt_init_text` is made of; by default the model's own path.

    Raises:
        AdapterError: PEFT has none of this kind for the model, or the text cannot be made into tokens.
    """
    if settings.adapter != "adapter_prompt" and any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
        raise AdapterError(
            f"adapter={settings.adapter}: PEFT reads its virtual tokens where ZeRO-3 has not gathered them; take strategy=fsdp2 or zero2, or "
            "adapter=lora"
        )
    config = _config(model, settings, task_type, tokenizer_path)
    # peft takes four seconds to import: only those who attach an adapter wait for it.
    from peft import get_peft_model

    base: Any = model
    try:
        with warnings.catch_warnings(), _callable_embeddings(model):
            # PEFT 0.21 asks transformers 5.23 for an old name; nothing that the caller could change.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            adapted: Any = get_peft_model(base, config)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise AdapterError(f"adapter={settings.adapter}: PEFT cannot attach it to {type(model).__name__}: {error}") from error
    if settings.adapter == "adapter_prompt":
        # PEFT goes to the model's `forward` past its hooks.
        adapted.base_model.forward = model.__call__
        _in_float32(adapted)
    else:
        # Under another name it is the base's embedding layer, or what stood in for it.
        adapted.word_embeddings = embeddings(model)
    return adapted


def _config(model: nn.Module, settings: AdapterSettings, task_type: str, tokenizer_path: str | None) -> Any:
    from peft import AdaptionPromptConfig, PrefixTuningConfig, PromptTuningConfig

    tokens = settings.num_virtual_tokens
    base: Any = model
    if settings.adapter == "adapter_prompt":
        return AdaptionPromptConfig(task_type=task_type, adapter_len=tokens, adapter_layers=_layers(base, settings, task_type))
    if settings.adapter == "prefix":
        return PrefixTuningConfig(task_type=task_type, num_virtual_tokens=tokens, prefix_projection=settings.prefix_projection)
    if task_type == "SEQ_CLS":
        raise AdapterError(
            "adapter=prompt: a reward model would find the last tokens of a padded batch by their ids, and is given embeddings: whoever loads "
            "it would get other rewards in a batch than alone; take adapter=prefix or lora"
        )
    if settings.prompt_init_text is None:
        # PEFT's own default would draw numbers of a size that no embedding has.
        return PromptTuningConfig(task_type=task_type, num_virtual_tokens=tokens, prompt_tuning_init="SAMPLE_VOCAB")
    path = tokenizer_path or getattr(base.config, "_name_or_path", "")
    if not path:
        raise AdapterError(
            "prompt_init_text: no tokenizer makes tokens of it, because the model was not loaded from a path: give tokenizer_path"
        )
    return PromptTuningConfig(
        task_type=task_type,
        num_virtual_tokens=tokens,
        prompt_tuning_init="TEXT",
        prompt_tuning_init_text=settings.prompt_init_text,
        tokenizer_name_or_path=path,
    )


def _layers(model: Any, settings: AdapterSettings, task_type: str) -> int:
    kind = model.config.model_type
    if kind not in _ADAPTED:
        raise AdapterError(
            f"adapter=adapter_prompt: PEFT has adaption prompts for {', '.join(_ADAPTED)} and not for {kind}; take adapter=prefix or lora"
        )
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    size = getattr(model.config, "head_dim", None) or width // heads
    if heads * size != width:
        raise AdapterError(
            f"adapter=adapter_prompt: PEFT makes adaption prompts only where hidden_size is num_attention_heads times head_dim, and here "
            f"{width} is not {heads} times {size}; take adapter=prefix or lora"
        )
    if task_type == "SEQ_CLS":
        raise AdapterError(
            "adapter=adapter_prompt: PEFT would neither train nor save the layer `score` with adaption prompts; take adapter=prefix or lora"
        )
    layers = int(model.config.num_hidden_layers)
    wanted = settings.adapter_layers
    if wanted is not None and wanted > layers:
        raise AdapterError(f"adapter_layers={wanted}: the model has {layers} layers")
    return layers if wanted is None else wanted


def _in_float32(adapted: nn.Module) -> None:
    """Adaption prompts are made in the base's dtype, in which small steps of a gate that begins at zero are lost."""
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
    """Inside the block PEFT may call the embedding layer by itself, also where its weight is divided over ranks."""
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
    """In the place of an embedding layer with a divided weight: looks tokens up by themselves, where the layer's own call would make the
    layer the first of the model's parts that is called, which those that gather weights take for the whole model.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = layer.weight
        self.num_embeddings = layer.num_embeddings
        # In a tuple, so that the layer's weight is there once.
        self._layer = (layer,)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64[S] → float[S, D]; collective."""
        (layer,) = self._layer
        divided: Any = layer.weight
        # Weights that wait in the host's memory are put together where the ranks' collectives are.
        whole = divided.detach().to(divided.device_mesh.device_type).full_tensor()
        layer.weight = nn.Parameter(whole, requires_grad=False)
        try:
            return layer.forward(ids.to(whole.device)).to(ids.device)
        finally:
            layer.weight = divided


@contextmanager
def prompts_off(model: "PeftModel") -> Iterator[None]:
    """PEFT's `disable_adapter` of a model with virtual tokens; the base answers through its own hooks, which PEFT would go past."""
    with model.disable_adapter():
        before, model.forward = model.forward, model.base_model.__call__
        try:
            yield
        finally:
            model.forward = before
