"""Configuration → whether a model's layers and experts can be divided over ranks."""

import re
from typing import Any

import torch

from forge_dist._errors import StrategyError
from forge_dist.loading._model_path import Task, expand_user
from forge_dist.loading._outline import outline_model
from forge_dist.loading._parallel_plan import keep_plan, wildcard
from forge_dist.loading._request import LoadRequest

_PACKED = re.compile("packed_")
"""Styles that divide each of several weights in one tensor, of which a rank's part is no block."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names by which configurations have their number of experts."""
_OF_ALL = "activation_sparsity"
"""Attribute of a layer that computes with the mean over all of its numbers (Gemma 3n's MLP; transformers 5.24 divides it)."""
_DISPATCHED = "ep_dispatch_experts"
"""Style of a module whose experts are divided, and which is brought its tokens."""


def check_divisible(model_path: str, *, tp_size: int = 1, ep_size: int = 1, task: Task = "causal") -> None:
    """Check from its configuration that a model's layers and experts can be divided over ranks.

    Raises:
        ModelError: no outline of the model can be made.
        StrategyError: transformers has no plan for it, or a number of heads or experts is not divisible.
    """
    if tp_size == 1 and ep_size == 1:
        return
    model: Any = outline_model(LoadRequest(model_path=model_path, dtype=torch.float32, attention=None, task=task))
    what, name = f"model_path {model_path}", type(model).__name__
    dispatched = {rule for rule, style in (model.ep_plan or {}).items() if style == _DISPATCHED}
    if ep_size > 1:
        if not dispatched:
            raise StrategyError(f"{what}: transformers has no plan by which experts of {name} are divided: leave ep_size out")
        layer: Any = next((module for path, module in model.named_modules() if wildcard(path) in dispatched), None)
        if layer is None:
            raise StrategyError(f"{what}: no layer of it has experts: leave ep_size out")
        if layer.num_experts % ep_size:
            raise StrategyError(
                f"{what}: ep_size={ep_size} does not divide its {layer.num_experts} experts: use a divisor of them"
            )
    if tp_size == 1:
        return
    keep_plan(model)
    plan = {rule: style for rule, style in model.tp_plan.items() if ep_size == 1 or not _inside(rule, dispatched)}
    if not plan:
        raise StrategyError(f"{what}: transformers has no plan by which layers of {name} are divided: leave tp_size out")
    for path, module in model.named_modules():
        if getattr(module, _OF_ALL, 0) and any(_inside(rule, {wildcard(path)}) for rule in plan):
            raise StrategyError(
                f"{what}: {path} compares each number with the mean of all ({_OF_ALL}), and a rank would have a part of them: "
                "leave tp_size out"
            )
    interleaved, weights = _interleaved(model), {wildcard(name) for name, _ in model.named_parameters()}
    # A dense Gemma 4 has the plan of one with experts, which it lacks.
    packed = [
        rule
        for rule, style in plan.items()
        if (_PACKED.match(style) or rule in interleaved) and any(_inside(name, {rule}) for name in weights)
    ]
    if packed:
        experts = _inside(packed[0], dispatched) and not all(_inside(rule, dispatched) for rule in plan)
        remedy = f"divide its experts by ep_size={tp_size} too" if experts else "leave tp_size out"
        raise StrategyError(
            f"{what}: {packed[0]} is several weights in one, whose parts on a rank no full state can hold: {remedy}"
        )
    text = model.config.get_text_config()
    for kind in ("num_attention_heads", "num_key_value_heads"):
        # Layers may have different numbers, as Gemma 4's with and without a window.
        found = {getattr(layer, kind, None) for layer in text.per_layer_config}
        for heads in sorted(number for number in found if isinstance(number, int)):
            if heads % tp_size:
                raise StrategyError(f"{what}: tp_size={tp_size} does not divide its {heads} {kind}: use a divisor of them")


def check_expert_shards(model_path: str, *, shards: int, ep_size: int = 1, task: Task = "causal") -> None:
    """Check that every rank gets a part of each layer's experts.

    Where files have them one by one, transformers (5.23) puts the experts of a layer together as it reads them, and fails on a
    rank whose shard has none.

    Raises:
        ModelError: no outline of the model can be made.
        StrategyError: a layer has fewer experts than ranks divide it.
    """
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(expand_user(model_path), trust_remote_code=False).get_text_config()
    numbers = [getattr(text, name, None) for name in _EXPERTS]
    # Most models have none, or enough: they need no outline.
    if all(not isinstance(number, int) or number // ep_size >= shards for number in numbers):
        return
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import MergeModulelist

    model: Any = outline_model(LoadRequest(model_path=model_path, dtype=torch.float32, attention=None, task=task))
    for conversion in get_model_conversion_mapping(model):
        if not any(isinstance(step, MergeModulelist) for step in getattr(conversion, "operations", ())):
            continue
        for name, parameter in model.named_parameters():
            experts = len(parameter) // ep_size if parameter.ndim == 3 else shards
            if experts < shards and any(re.search(pattern, name) for pattern in conversion.target_patterns):
                beside = f" (ep_size={ep_size} leaves {experts} of them)" if ep_size > 1 else ""
                raise StrategyError(
                    f"model_path {model_path}: {shards} ranks would divide the {len(parameter)} experts of {name}{beside}, and "
                    f"transformers cannot read a part with none: use strategy=hsdp with a shard_size of at most {experts}, "
                    "strategy=ddp, or fewer ranks"
                )


def _interleaved(model: Any) -> set[str]:
    """Return the rules of weights that are several, interleaved in the files.

    Inkling 2's experts are: put in order, a rank's part would be rows of one of them alone.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    targets = [
        pattern
        for conversion in get_model_conversion_mapping(model)
        # Cut afterwards, each is a weight by itself.
        if [type(step).__name__ for step in getattr(conversion, "operations", ())][-1:] == ["Interleave"]
        for pattern in conversion.target_patterns
    ]
    names = (name for name, _ in model.named_parameters()) if targets else ()
    return {wildcard(name) for name in names if any(re.search(pattern, name) for pattern in targets)}


def _inside(rule: str, modules: set[str]) -> bool:
    return any(rule == module or rule.startswith(f"{module}.") for module in modules)
