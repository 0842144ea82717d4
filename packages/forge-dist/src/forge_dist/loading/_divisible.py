"""Configuration → whether a model's layers and experts can be divided over ranks."""

import re
from typing import Any

import torch

from forge_dist._errors import StrategyError
from forge_dist.loading._model_path import Task
from forge_dist.loading._outline import outline_model
from forge_dist.loading._parallel_plan import keep_plan, wildcard
from forge_dist.loading._request import LoadRequest

_PACKED = re.compile("packed_")
"""Styles that divide each of several weights in one tensor, of which a rank's part is no block."""
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
        experts = next(module for path, module in model.named_modules() if wildcard(path) in dispatched).num_experts
        if experts % ep_size:
            raise StrategyError(f"{what}: ep_size={ep_size} does not divide its {experts} experts: use a divisor of them")
    if tp_size == 1:
        return
    keep_plan(model)
    plan = {rule: style for rule, style in model.tp_plan.items() if ep_size == 1 or not _inside(rule, dispatched)}
    if not plan:
        raise StrategyError(f"{what}: transformers has no plan by which layers of {name} are divided: leave tp_size out")
    packed = [rule for rule, style in plan.items() if _PACKED.match(style)]
    if packed:
        remedy = f"divide its experts by ep_size={tp_size} too" if _inside(packed[0], dispatched) else "leave tp_size out"
        raise StrategyError(
            f"{what}: {packed[0]} is several weights in one, whose parts on a rank no full state can hold: {remedy}"
        )
    text = model.config.get_text_config()
    for kind in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, kind, None)
        if isinstance(heads, int) and heads % tp_size:
            raise StrategyError(f"{what}: tp_size={tp_size} does not divide its {heads} {kind}: use a divisor of them")


def _inside(rule: str, modules: set[str]) -> bool:
    return any(rule == module or rule.startswith(f"{module}.") for module in modules)
