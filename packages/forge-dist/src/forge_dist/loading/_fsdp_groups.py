"""FSDP2 groups of a model: which modules' weights are gathered together.

Two things are wrong with transformers' own groups (5.23, torch 2.13). A tied embedding and head land in two groups, and where
its rows do not divide evenly each group pads a copy of its own: after the first step of the optimizer one of them silently
computes with old weights. And an architecture whose layers are not called `layers` becomes one group, whose weights are
gathered all the time.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from forge_dist.loading._parallel_plan import keep_plan, wildcard
from forge_dist.loading._task import HEAD, Task, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

RESHARDED = "free_full_weight"
"""transformers' style of a group whose gathered weights are freed between its forward and its backward."""


_UNSET = frozenset({"mup_vector"})
"""Buffers that are in no file, and that Falcon-H1 computes only where a whole model is made (transformers 5.23)."""


def shardable_class(config: "PreTrainedConfig", task: Task = "causal") -> "type[PreTrainedModel]":
    """Return transformers' class for `config` and `task`, with the groups of this file.

    Builds the model on the meta device, to inspect it.

    Raises:
        ValueError: transformers knows no such model of this type.
    """
    with torch.device("meta"):
        kind = type(auto_class(task, config).from_config(config, trust_remote_code=False))

    def post_init(self: Any) -> None:
        kind.post_init(self)
        _tie_weights(self)
        # The public property has a setter from transformers 5.23 on.
        self._fsdp_plan = fsdp_groups(self)
        keep_plan(self)
        head: Any = getattr(self, HEAD, None)
        if head is not None:
            # transformers would draw it in shards, with a warning on CPUs and one random state for all ranks elsewhere;
            # `init_classifier_head` draws it.
            head._is_hf_initialized = True

    # The name stays: a saved config.json names the class by it.
    divided: type[PreTrainedModel] = type(kind.__name__, (kind,), {"post_init": post_init, "__module__": kind.__module__})
    return divided


def _tie_weights(model: "PreTrainedModel") -> None:
    """Make tied weights one object before FSDP looks: transformers ties them after loading."""
    for target, source in model.all_tied_weights_keys.items():
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, model.get_parameter(source))


def fsdp_groups(model: "PreTrainedModel") -> dict[str, str]:
    """Return module pattern → style of each group: transformers' plan without what does not fit.

    The root's group has the rest. Tied modules are left to the root, the one group that holds both, with all that is not freed
    after its forward anyway.
    """
    names = {wildcard(name) for name, _ in model.named_modules()}
    plan = {rule: style for rule, style in model.fsdp_plan.items() if rule in names}
    if not any("*" in rule for rule in plan):
        lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        plan |= {f"{name}.*": RESHARDED for name in lists if wildcard(name) == name}
    tied = dict(model.all_tied_weights_keys)
    if tied:
        tied_modules = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
        plan = {rule: style for rule, style in plan.items() if style == RESHARDED and rule not in tied_modules}
    return plan


def broken_tie(model: "PreTrainedModel") -> str | None:
    """Return the name of a weight that the configuration ties and the files do not, or None."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return next(
        (target for target, source in _declared_ties(model).items() if parameters[target] is not parameters[source]), None
    )


def misplaced(model: "PreTrainedModel") -> str | None:
    """Return the name of a weight that transformers put together from wrong shards, or None.

    Where a weight is several tensors of the files one after another (Kimi-Linear's convolutions), or several weights are one
    (HRM's queries, keys and values), each rank reads its shard of each tensor of the files, and what becomes of them is no
    shard of a weight that is divided along the same dimension (5.23).
    """
    from transformers.core_model_loading import Chunk, Concatenate

    for conversion in getattr(model, "_weight_conversions", None) or ():
        dims = {step.dim for step in getattr(conversion, "operations", ()) if isinstance(step, Chunk | Concatenate)}
        for name, parameter in model.named_parameters():
            along = {place.dim for place in getattr(parameter, "placements", ()) if isinstance(place, Shard)}
            if dims & along and any(re.search(pattern, name) for pattern in conversion.target_patterns):
                return name
    return None


def unset_buffer(model: "PreTrainedModel") -> str | None:
    """Return the name of a buffer that transformers leaves unset where it reads shards, or None."""
    return next((name for name, _ in model.named_buffers() if name.rpartition(".")[2] in _UNSET), None)


def _declared_ties(model: "PreTrainedModel") -> dict[str, str]:
    # Read again from the configuration: loading revokes the ties that the files contradict.
    return model.get_expanded_tied_weights_keys(all_submodels=True)
