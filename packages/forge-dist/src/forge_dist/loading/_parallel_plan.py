"""Plan by which transformers divides a model's layers, and what of it is used here.

Two kinds of its rules are left out. Embedding and head stay whole beside their FSDP shards, so that what computes in the head's
place sees its weight, and a tie stays one weight. And rules that add up gradients of a norm over ranks at every backward pass
count those of earlier micro-batches again (transformers 5.23): the strategy adds them up once a step (`partial_parameters`).
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SUMMED = "replicated_with_grad_allreduce"
"""transformers' style of a module whose weight every rank holds whole, and of whose gradient each has a part."""
_AFTER = {"act_fn": "up_proj", "q_norm": "q_proj", "k_norm": "k_proj"}
"""Module → the layer beside it whose output it is given."""
_PARTIAL = "_partial_over_ranks"
"""Attribute of a model: the rules of that style."""


def keep_plan(model: "PreTrainedModel") -> None:
    """Leave the rules out of a model's tensor-parallel plan that are not used here."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = {wildcard(name) for name, module in model.named_modules() if module in ends}
    plan: dict[str, str] = dict(model.tp_plan or {})
    summed = {rule for rule, style in plan.items() if style == _SUMMED}
    setattr(model, _PARTIAL, summed | _unplanned(model, plan))
    # The public property's setter validates each of them; these were valid before.
    model._tp_plan = {rule: style for rule, style in plan.items() if style != _SUMMED and rule not in whole}


def _unplanned(model: "PreTrainedModel", plan: Mapping[str, str]) -> set[str]:
    """Return the modules that compute with part of a divided layer, without a rule of the plan.

    Each rank's gradient is that of its part: of Apertus' activations, and of Sarvam MoE's norms of queries and keys (5.24).
    """
    found = set()
    for name, module in model.named_modules():
        parent, _, child = wildcard(name).rpartition(".")
        divided = plan.get(f"{parent}.{_AFTER[child]}") == "colwise" if child in _AFTER else False
        if divided and f"{parent}.{child}" not in plan and next(module.parameters(), None) is not None:
            found.add(f"{parent}.{child}")
    return found


def partial_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of whose gradient each rank has a part."""
    found: list[nn.Parameter] = []
    for owner in model.modules():
        rules: set[str] = getattr(owner, _PARTIAL, set())
        for name, module in owner.named_modules() if rules else ():
            if wildcard(name) in rules:
                found += [parameter for parameter in module.parameters() if parameter.requires_grad]
    return list(dict.fromkeys(found))


def wildcard(name: str) -> str:
    """Replace indices by *, as the plans do: layers.3.mlp → layers.*.mlp."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
