"""Merge an adapter into the weights of its base model, proved by the logits of both.

A base that was quantized during training is dequantized first: the adapter was trained beside those rounded weights.
"""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_dist._errors import ExportError, ModelError
from forge_dist._third_party_logs import quiet_imports, quiet_transformers
from forge_dist.adapters._adapter import read_adapter
from forge_dist.adapters._base_model import adapter_base
from forge_dist.adapters._load_trained import load_trained
from forge_dist.loading._load import load_model
from forge_dist.loading._model_path import Task
from forge_dist.loading._quantization import four_bit_layers, quantization_from, quantization_of
from forge_dist.loading._unwrap import base_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

MERGED = 1e-5
"""Largest difference of two logits, relative to the largest logit, float32: merging changes the order of the sums."""

_HOW = "use the adapter beside its base (`PeftModel.from_pretrained`), or export it as it is"


@attrs.frozen(kw_only=True, eq=False)
class Merged:
    """Merged model, and how close its logits are to those of base and adapter apart."""

    model: "PreTrainedModel"
    """The merged model: float32, on the CPU, in eval mode."""

    difference: float
    """Largest |difference| of two logits over the samples, relative to the largest |logit|; at most 1e-5."""

    tokens: int
    """Number of tokens in the samples."""

    apart: int = 0
    """Number of adapted layers that no token reaches, a vision tower's for instance: each is compared by itself."""


def merge_adapter(
    directory: str | os.PathLike[str],
    samples: Sequence[Sequence[int]],
    *,
    task: Task = "causal",
    doing: Callable[[str], None] | None = None,
) -> Merged:
    """Merge the adapter of `directory` into its base model, and compare the logits.

    Low-rank adapters (LoRA, DoRA and similar) and IA³ can be merged; PEFT does it, in float32 on the CPU. Where the base was
    quantized while the adapter was trained, it is merged into the dequantized weights: so the merged model is the one that was
    trained.

    Args:
        directory: what `export_model` wrote of a PeftModel, or PEFT itself.
        samples: rows of token ids [S], each compared by itself.
        task: task that the base is loaded for; "reward" for the adapter of a reward model, `directory_task` knows it.
        doing: is told what is done once the adapter is loaded, in words.

    Raises:
        ModelError: no adapter, no base or another one; an adapter that changes no weights (virtual tokens); one on a tied
            embedding or head, where a merge would untie them or change both, or on a weight that several layers share.
        ExportError: the merged model does not compute what the adapter beside its base does.
    """
    quiet_imports()
    path = Path(os.path.abspath(directory))
    _check_kind(path)
    # A vision tower too: an adapter on its layers is added in float32, and rounded once.
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "task": task, "other_dtype": torch.float32}
    model: Any = load_trained(str(path), **how, as_trained=True)
    _refuse_tied_targets(model, path)
    _refuse_shared_targets(model, path)
    for layer in four_bit_layers(model).values():
        layer.compute_dtype = torch.float32  # the comparison is of weights, not of a run's 16 bits
    if doing is not None:
        doing("merging the adapter into its base, and comparing the logits")
    reached: set[str] = set()
    with _noting_calls(base_of(model), reached):
        before = logits_of(model, samples)
    apart = {name: layer for name, layer in _adapted(base_of(model)).items() if name not in reached}
    outputs = [_output(layer, layer.base_layer) for layer in apart.values()]
    from_codes = quantization_of(base_of(model)) is not None
    if from_codes:
        del model  # PEFT would round what it merged to codes again
        model = _on_dequantized(path, task)
    try:
        with quiet_transformers():
            merged = model.merge_and_unload(safe_merge=True).eval()
    except (NotImplementedError, RuntimeError) as error:  # a form of adapter that no weight can hold
        raise ModelError(f"{path} cannot be merged: {str(error).rstrip('.')}; {_HOW}") from error
    if from_codes:
        _restore_conv1d(merged)
    difference = relative_difference(before, logits_of(merged, samples))
    if not difference <= MERGED:
        raise ExportError(
            f"{path}: merged into its base it computes other logits than beside it: they differ by {difference:.3g} of the "
            f"largest (allowed {MERGED:g}); {_HOW}"
        )
    for name, output in zip(apart, outputs, strict=True):
        layer = merged.get_submodule(name)
        if not (found := relative_difference([output], [_output(layer, layer)])) <= MERGED:
            raise ExportError(
                f"{path}: merged into its base, {name} computes something else than beside it: on random inputs it differs by "
                f"{found:.3g} of the largest (allowed {MERGED:g}); {_HOW}"
            )
    return Merged(model=merged, difference=difference, tokens=sum(map(len, samples)), apart=len(apart))


def _adapted(base: torch.nn.Module) -> dict[str, Any]:
    """Return the linear layers and convolutions that an adapter lies beside, by name."""
    kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    return {name: module for name, module in base.named_modules() if isinstance(getattr(module, "base_layer", None), kinds)}


@contextmanager
def _noting_calls(base: torch.nn.Module, reached: set[str]) -> Iterator[None]:
    """Add the names of adapted layers that are called to `reached`."""
    hooks = [layer.register_forward_hook(lambda *_, name=name: reached.add(name)) for name, layer in _adapted(base).items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output(layer: torch.nn.Module, like: Any) -> torch.Tensor:
    """Compute a layer's output of a fixed random input: float32[3, ...]."""
    linear = isinstance(like, torch.nn.Linear)
    shape = (like.in_features,) if linear else (like.in_channels, *like.kernel_size)
    with torch.no_grad():
        return layer(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))).float()


def _on_dequantized(path: Path, task: Task) -> "PeftModel":
    """Load the adapter on its dequantized base, in float32."""
    stored = adapter_base(path)
    quantization = quantization_from(stored.quantization)
    with quiet_transformers():
        base: Any = load_model(
            stored.path,
            dtype=torch.float32,
            device="cpu",
            attention=None,
            task=task,
            quantization=quantization,
            other_dtype=torch.float32,
        ).dequantize(dtype=torch.float32)
        return read_adapter(base, path).eval()


def _restore_conv1d(model: "PreTrainedModel") -> None:
    """Put GPT-2's Conv1D back, in place of the linear layers that quantization made of it."""
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    for name, layer in made.named_modules():
        held: Any = model.get_submodule(name)
        if isinstance(layer, Conv1D) and isinstance(held, torch.nn.Linear):
            layer.weight, layer.bias = torch.nn.Parameter(held.weight.detach().T.contiguous()), held.bias
            model.set_submodule(name, layer.eval())


def _check_kind(path: Path) -> None:
    try:
        from peft import PeftConfig
    except ImportError:
        raise ModelError(f"{path}: merging an adapter needs peft: `pip install 'forge-dist[peft]'`") from None
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"{path} is no adapter that can be merged: {error}") from error
    if config.is_prompt_learning or config.is_adaption_prompt:
        kind = str(getattr(config.peft_type, "value", config.peft_type)).lower().replace("_", " ")
        raise ModelError(
            f"{path} cannot be merged: an adapter of the kind {kind!r} adds tokens to the input or the attention and changes "
            f"no weight; {_HOW}"
        )


def _refuse_tied_targets(model: "PeftModel", path: Path) -> None:
    base = base_of(model)
    if not base.config.get_text_config().tie_word_embeddings:
        return
    ends = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    if len({id(weight) for module in ends.values() for weight in _trained(module)}) == 1:
        return  # rows of tokens, or copies, that PEFT keeps tied
    for name, module in ends.items():
        if module is not None and not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            raise ModelError(
                f"{path} cannot be merged: it adapts the {name}, which shares its weight with the {_other(name)} "
                f"(tie_word_embeddings), and one weight cannot become two; {_HOW}"
            )


def _refuse_shared_targets(model: "PeftModel", path: Path) -> None:
    """Refuse an adapter on a weight that several layers share (Zamba's blocks).

    A merge would change it for all of them.
    """
    holders: dict[int, list[str]] = {}
    adapted: dict[int, str] = {}
    # One layer that is called in several places has one adapter there too, and comes once.
    for name, module in base_of(model).named_modules():
        if ".token_adapter" in name:
            continue  # rows of tokens, which PEFT keeps tied
        layer, found, _ = name.partition(".base_layer")
        for parameter_name, parameter in module.named_parameters(recurse=False):
            full = f"{layer}.{parameter_name}"
            holders.setdefault(id(parameter), []).append(full)
            if found:
                adapted[id(parameter)] = full
    shared = {key: full for key, full in adapted.items() if len(holders[key]) > 1}
    if shared:
        key, full = next(iter(shared.items()))
        other = next(name for name in holders[key] if name != full)
        raise ModelError(
            f"{path} cannot be merged: it adapts {full}, which is one weight with {other} ({len(shared)} such weights), while "
            f"each has its own adapter or none, and one weight cannot become two; {_HOW}. An adapter whose target_modules name "
            "none of these layers can be merged"
        )


def _trained(module: Any) -> list[torch.Tensor]:
    """Return what PEFT trains in place of an embedding or a head: rows of tokens, or a copy."""
    if hasattr(module, "token_adapter"):
        return list(module.token_adapter.trainable_tokens_delta.values())
    if hasattr(module, "modules_to_save"):
        return [copied.weight for copied in module.modules_to_save.values()]
    return [torch.empty(0)]


def _other(name: str) -> str:
    return "head" if name == "embedding" else "embedding"


def logits_of(model: torch.nn.Module, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Compute the logits of each sample by itself: float32[S, V], or a classifier's [C].

    Of a model without a head its hidden states [S, D].
    """
    with torch.no_grad():
        outs = [model(input_ids=torch.tensor([list(row)]), use_cache=False) for row in samples]
        return [(out.logits if hasattr(out, "logits") else out.last_hidden_state)[0].float() for out in outs]


def relative_difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Return the largest |difference| of two logits, relative to the largest expected |logit|."""
    largest = max(logits.abs().max().item() for logits in expected)
    apart = [(one - other).abs().max().item() for one, other in zip(expected, found, strict=True)]
    # Python's max() would drop a NaN that does not come first.
    return torch.tensor(apart).max().item() / max(largest, 1e-30)
