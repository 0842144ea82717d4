"""A model's class → the same class, which divides itself along groups that FSDP2 can keep right.

Two things are wrong with transformers' own groups (5.23, torch 2.13). A tied embedding and head land in two groups, and where its rows do
not divide evenly each group pads a copy of its own: after the first step of the optimizer one of them computes with old weights,
silently. And an architecture whose layers are not called `layers` becomes one group, whose weights are whole all the time.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist.loading._task import HEAD, Task, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FREED = "free_full_weight"
"""transformers' word for a group whose whole weights are freed between its forward and its backward."""


def shardable(config: "PreTrainedConfig", task: Task = "causal") -> "type[PreTrainedModel]":
    """The class that transformers takes for `config` and `task`, with our groups. Builds the model on the meta device, to ask it.

    Raises:
        ValueError: transformers knows no such model of this type.
    """
    with torch.device("meta"):
        kind = type(auto_class(task).from_config(config, trust_remote_code=False))

    def post_init(self: Any) -> None:
        kind.post_init(self)
        _tie(self)
        self.fsdp_plan = groups(self)
        head: Any = getattr(self, HEAD, None)
        if head is not None:
            # transformers would draw it in shards, with a warning on CPUs and one random state for all ranks elsewhere; `settle_head` does.
            head._is_hf_initialized = True

    # The name stays: a saved config.json tells the class by it.
    divided: type[PreTrainedModel] = type(kind.__name__, (kind,), {"post_init": post_init, "__module__": kind.__module__})
    return divided


def _tie(model: "PreTrainedModel") -> None:
    """Make tied weights one object now: transformers does it after loading, when FSDP has long looked where a weight has its homes."""
    for target, source in model.all_tied_weights_keys.items():
        home, _, name = target.rpartition(".")
        setattr(model.get_submodule(home), name, model.get_parameter(source))


def groups(model: "PreTrainedModel") -> dict[str, str]:
    """Which modules' weights are put together at once: transformers' plan without what does not fit. The rest is the root's group.

    Tied modules are left to the root, the one group that holds both, with all that is not freed after its forward anyway.
    """
    names = {_wildcard(name) for name, _ in model.named_modules()}
    plan = {rule: style for rule, style in model.fsdp_plan.items() if rule in names}
    if not any("*" in rule for rule in plan):
        lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        plan |= {f"{name}.*": FREED for name in lists if _wildcard(name) == name}
    tied = dict(model.all_tied_weights_keys)
    if tied:
        homes = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
        plan = {rule: style for rule, style in plan.items() if style == FREED and rule not in homes}
    return plan


def untied(model: "PreTrainedModel") -> str | None:
    """The name of a weight that FSDP holds for tied and the files do not, or None."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return next((target for target, source in _declared(model).items() if parameters[target] is not parameters[source]), None)


def _declared(model: "PreTrainedModel") -> dict[str, str]:
    # Read anew from the configuration: loading takes back what the files contradict.
    return model.get_expanded_tied_weights_keys(all_submodels=True)


def _wildcard(name: str) -> str:
    """layers.3.mlp → layers.*.mlp, as the plans spell it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
