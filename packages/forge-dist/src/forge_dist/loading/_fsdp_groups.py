"""FSDP2 groups of a model: which modules' weights are gathered together.

Three things are wrong with transformers' own groups (5.23, torch 2.13). A tied embedding and head land in two groups, and where
its rows do not divide evenly each group pads a copy of its own: after the first step of the optimizer one of them silently
computes with old weights. An architecture whose layers are not called `layers` becomes one group, whose weights are gathered
all the time. And layers that share a block (Zamba's) become groups that share its weights, which FSDP2 refuses.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_dist.loading._modalities import is_inside, other_modalities, passed_over
from forge_dist.loading._parallel_plan import keep_plan, wildcard
from forge_dist.loading._task import HEAD, Task, auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

RESHARDED = "free_full_weight"
"""transformers' style of a group whose gathered weights are freed between its forward and its backward."""
_GROUPS = (RESHARDED, "keep_full_weight")
"""transformers' styles of groups."""


_UNSET = frozenset({"mup_vector"})
"""Buffers that are in no file, and that the class sets for all of its layers where it initialises the module that holds them
(Falcon-H1, transformers 5.23).
"""


def shardable_class(config: "PreTrainedConfig", task: Task = "causal", *, media: bool = False) -> "type[PreTrainedModel]":
    """Return transformers' class for `config` and `task`, with the groups of this file.

    `media` as of `without_shared`.

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

    def expand_parallel_plan(self: Any, plan: dict[str, str]) -> dict[str, str]:
        return without_shared(self, kind._expand_parallel_plan(self, plan), media=media)

    # The name stays: a saved config.json names the class by it.
    own = {"post_init": post_init, "_expand_parallel_plan": expand_parallel_plan, "__module__": kind.__module__}
    divided: type[PreTrainedModel] = type(kind.__name__, (kind,), own)
    return divided


def _tie_weights(model: "PreTrainedModel") -> None:
    """Make tied weights one object before FSDP looks: transformers ties them after loading."""
    for target, source in model.all_tied_weights_keys.items():
        parent, _, name = target.rpartition(".")
        setattr(model.get_submodule(parent), name, model.get_parameter(source))


def fsdp_groups(model: "PreTrainedModel") -> dict[str, str]:
    """Return module pattern → style of each group: transformers' plan without what does not fit.

    The root's group has the rest. Tied modules are left to the root, the one group that holds both, with all that is not freed
    after its forward anyway. So are parts beside the language: a rank whose rows have no images does not run them, and would
    leave the others waiting for its shards.
    """
    others = set(other_modalities(model))
    language = [name for name, module in model.named_modules() if not others or _learns(name, module, others)]
    names = {wildcard(name) for name in language}
    plan = {rule: style for rule, style in model.fsdp_plan.items() if rule in names}
    if not any("*" in rule for rule in plan):
        lists = (name for name in language if isinstance(model.get_submodule(name), nn.ModuleList))
        plan |= {f"{name}.*": RESHARDED for name in lists if wildcard(name) == name}
    tied = dict(model.all_tied_weights_keys)
    if tied:
        tied_modules = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
        plan = {rule: style for rule, style in plan.items() if style == RESHARDED and rule not in tied_modules}
    return plan


def _learns(name: str, module: nn.Module, others: set[str]) -> bool:
    """Return whether a module holds weights of the language part."""
    return any(f"{name}.{own}".lstrip(".") not in others for own, _ in module.named_parameters())


def without_shared(model: "PreTrainedModel", groups: Mapping[str, str], *, media: bool = False) -> dict[str, str]:
    """Return module → style, without modules that hold a weight which others hold too.

    In the place of such a module stand the largest ones in it that share nothing; the root's group has the rest. Where rows
    have `media` it has layers that a row without passes over, too. Entries of other styles than those of groups stay.
    """
    idle = passed_over(model) if media else []
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shared = [same for same in names.values() if len(same) > 1]
    found: dict[str, str] = {}
    for name, style in groups.items():
        if style in _GROUPS and is_inside(name, idle):
            continue
        inner = _sharing_nothing(name, model.get_submodule(name), shared) if style in _GROUPS else iter([name])
        found |= dict.fromkeys(inner, style)
    return found


def _sharing_nothing(name: str, module: nn.Module, shared: list[list[str]]) -> Iterator[str]:
    inside = [[one.startswith(f"{name}.") for one in same] for same in shared]
    shares = any(any(each) and not all(each) for each in inside)
    # A list of modules computes nothing, so that no forward of it could gather its weights.
    if not shares and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield name
        return
    for key, child in module.named_children():
        if next(child.parameters(), None) is not None:
            yield from _sharing_nothing(f"{name}.{key}", child, shared)


def broken_tie(model: "PreTrainedModel") -> str | None:
    """Return the name of a weight that the configuration ties and the files do not, or None."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return next(
        (target for target, source in _declared_ties(model).items() if parameters[target] is not parameters[source]), None
    )


def set_buffers(model: "PreTrainedModel") -> None:
    """Compute the buffers that transformers leaves unset where it reads shards (`_UNSET`)."""
    if any(name.rpartition(".")[2] in _UNSET for name, _ in model.named_buffers()):
        with torch.no_grad():
            model._init_weights(model.base_model)


def _declared_ties(model: "PreTrainedModel") -> dict[str, str]:
    # Read again from the configuration: loading revokes the ties that the files contradict.
    return model.get_expanded_tied_weights_keys(all_submodels=True)
