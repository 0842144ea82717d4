"""Parts of a causal language model, bare or wrapped: decoder, head, embeddings.

Wrappers are PEFT's, and those that divide a model over ranks. Parts are looked at and never called: a forward goes through the
outermost module, whose hooks gather weights and sum gradients. The head is looked up anew at each use, so that a replaced
module or weight is seen.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

WITHOUT_DECODER = "_without_decoder"
"""Attribute of a causal model whose own forward calls its decoder with other rows than it is given."""

UNROUNDED = "_unrounded"
"""Attribute of a model whose weights lie rounded in their place: makes a context in which the unrounded ones do."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DeepSpeed's engine and similar wrappers.
    A model without a wrapper is returned itself.
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def causal_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside wrappers and a PeftModel.
    PEFT's LoRA layers sit in that very model; an unwrapped model is returned itself.
    """
    model = unwrap(model)
    inner = _ask(model, "get_base_model") if hasattr(model, "peft_config") else None
    return model if inner is None else inner


def headless(causal: nn.Module) -> bool:
    """Return whether an unwrapped model has no head, as AutoModel loads it."""
    return getattr(causal, "base_model", None) is causal and head(causal) is None


def decoder(model: nn.Module) -> nn.Module | None:
    """Return the module that computes hidden states, or None where the model has no such part.

    A model without a head is that module itself.

    In a model of several modalities that is the outermost: it makes masks and positions for the language model inside of it.
    """
    causal = causal_model(model)
    if WITHOUT_DECODER in vars(causal):
        return None
    if headless(causal):
        return causal
    found = _ask(causal, "get_decoder")
    if found is not None and found is head(causal):  # ModernBERT's head is called `decoder`
        found = getattr(causal, "base_model", None)
    if found is None or found is causal or not _is_multimodal(causal):
        return None if found is causal else found
    body: object = getattr(causal, "base_model", None)
    if isinstance(body, nn.Module) and body is not causal and found in set(body.modules()):
        return body
    if _ask(found, "get_output_embeddings") is None:
        return found
    # Llama 4's language model is a causal model of its own, with a decoder inside that it does not name.
    table = embeddings(causal)
    return next((child for child in found.children() if child is not table and table in set(child.modules())), None)


def language_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute on text: in a model of text alone, all of them."""
    causal = causal_model(model)
    if not _is_multimodal(causal):
        return set(causal.modules())
    score: object = getattr(causal, "score", None)
    parts = (_ask(causal, "get_decoder"), head(causal), embeddings(causal), score)
    return {module for part in parts if isinstance(part, nn.Module) for module in part.modules()}


def layers_of_media(model: nn.Module) -> set[nn.Module]:
    """Return the modules of the decoder's layers that attend to images alone (Mllama).

    They do not run on a row without images.
    """
    numbers, body = getattr(text_config(model), "cross_attention_layers", None), _ask(causal_model(model), "get_decoder")
    layers: Any = getattr(body, "layers", ())
    return {module for number in numbers or () for module in layers[number].modules()}


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language part; None for other than transformers' models."""
    config: Any = getattr(causal_model(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_multimodal(causal: nn.Module) -> bool:
    """Return whether a model has a language part beside others, such as a vision tower."""
    return text_config(causal) is not getattr(causal, "config", None)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's repeated blocks; empty where it has no lists of modules.

    Lists within a block (a mixture's experts) are parts of it.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                visit(child)

    body = decoder(model)
    if body is not None:
        visit(body)
    return found


def keep_blocks(model: nn.Module, number: int) -> bool:
    """Drop all but the first `number` repeated blocks, if all are alike; return if they are.

    Where they are not, or there are no more, nothing is dropped.
    """
    blocks = repeated_blocks(model)
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and list(each) == blocks]
    if len(blocks) <= number or len(lists) != 1 or any(_traits(block) != _traits(blocks[0]) for block in blocks[1:]):
        return False
    del lists[0][number:]
    return True


def _traits(block: nn.Module) -> list[Any]:
    """Return what blocks that compute alike have in common: all but weights and their place."""
    found: list[Any] = []
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and not re.search("idx|index|layer_id|layer_number", key)
        }
        tensors = [
            (key, t.shape, t.dtype) for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None
        ]
        found.append((name, type(module), plain, tensors))
    return found


def head(model: nn.Module) -> nn.Module | None:
    """Return the module that turns hidden states into logits; None where the model names none."""
    return _ask(causal_model(model), "get_output_embeddings")


def embeddings(model: nn.Module) -> nn.Module | None:
    """Return the module that turns token ids into vectors, or None where the model names none."""
    return _ask(causal_model(model), "get_input_embeddings")


def attention_of(causal: nn.Module) -> str | None:
    """Return the name of the model's attention implementation; None for other than transformers."""
    return getattr(getattr(causal, "config", None), "_attn_implementation", None)


def vocabulary(model: nn.Module) -> int | None:
    """Return V, the number of token ids that the model embeds; None without embeddings."""
    count = getattr(embeddings(model), "num_embeddings", None)
    return count if isinstance(count, int) else None


def trained_biases(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the base's biases that PEFT trains with an adapter, by name: its setting `bias`."""
    if all(getattr(config, "bias", "none") == "none" for config in getattr(unwrap(model), "peft_config", {}).values()):
        return {}
    named = {name: parameter for name, parameter in model.named_parameters() if name.endswith(".bias")}
    own = ("lora_B", "modules_to_save")
    return {name: p for name, p in named.items() if p.requires_grad and not any(part in name.split(".") for part in own)}


def virtual_tokens(model: nn.Module) -> int:
    """Count the virtual tokens that prefix or prompt tuning puts before each document.

    Switching the adapter off does not change the answer.
    """
    config: Any = getattr(unwrap(model), "active_peft_config", None)
    return int(config.num_virtual_tokens) if getattr(config, "is_prompt_learning", False) else 0


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    """Return the module that a method without arguments returns, or None."""
    find = getattr(model, method, None)
    found: object = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


def first_dropout(model: nn.Module) -> tuple[str, float] | None:
    """Return the name and probability of a dropout in training that is not 0; None without one.

    Attention layers hold theirs as a number (`attention_dropout`, DBRX's blocks `resid_pdrop`), as they call a function with
    it. Noise of a router (`router_jitter_noise`) counts as such.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p:
                return name, float(module.p)
            continue
        for key, value in vars(module).items():
            if any(word in key for word in ("dropout", "pdrop", "jitter")) and isinstance(value, float) and 0 < value <= 1:
                return f"{name}.{key}".lstrip("."), value
    return None


def set_training(model: nn.Module) -> None:
    """Set training mode, but leave batch norms that have statistics in evaluation mode.

    Their weights train all the same. With the statistics of a micro-batch a sample's loss would depend on what lies beside it,
    and on the ranks, each of which would move the saved ones its own way; and a frozen part would be exported with others
    (Granite Speech's tower).
    """
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            module.eval()


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode inside the block, and restore each module's afterwards."""
    before = {module: module.training for module in model.modules()}
    if training:
        set_training(model)
    else:
        model.eval()
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


@contextmanager
def override_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `layer(x)` run its hooks around `forward(x)` inside the block."""
    # The attribute hides the method of the layer's class; set past nn.Module's search for parameters, which takes longer.
    attributes = vars(layer)
    before = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def trainable(model: nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that need a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


@contextmanager
def gathering(model: nn.Module) -> Iterator[None]:
    """Gather weights that ZeRO-3 has partitioned around each module's forward.

    While a block runs. DeepSpeed's engine does so by itself, and an adapter measures before there is one.
    Other models are left alone.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            own = [parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "ds_id")]
            if own:
                gathered = sys.modules["deepspeed"].zero.GatheredParameters
                held: list[Any] = []

                def enter(_module: nn.Module, _args: Any, held: list[Any] = held, own: Any = own, make: Any = gathered) -> None:
                    held.append(make(own))
                    held[-1].__enter__()

                def leave(_module: nn.Module, _args: Any, _output: Any, held: list[Any] = held) -> None:
                    held.pop().__exit__(None, None, None)

                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
        yield


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP or ZeRO-3 keeps gathered after a forward without a backward.

    Whoever moves weights outside of a step calls this first: the next forward would compute with the former ones.
    """
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def not_finite(model: nn.Module) -> str:
    """Return the name of a weight that holds NaN or infinity; "" for none.

    Of a divided weight this rank's part is looked at.
    """
    for name, parameter in model.named_parameters():
        held = parameter.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        if held.is_floating_point() and not held.isfinite().all():
            return name
    return ""
