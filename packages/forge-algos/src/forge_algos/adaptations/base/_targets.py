"""Names, patterns and kinds of targets → full names of linear layers and expert stacks."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._errors import AdapterError
from forge_algos._experts import Stack, expert_stacks
from forge_algos._modules import head
from forge_algos.adaptations.base._modalities import LANGUAGE, Parts
from forge_algos.adaptations.base._parts import kind_of, score
from forge_algos.adaptations.base._unfrozen import named_by
from forge_algos.settings._adapter import EXPRESSION, whole_name

KINDS = ("attention", "mlp", "experts", "router", "all-linear")


def resolve_targets(model: nn.Module, targets: Sequence[str] | None, parts: Parts = LANGUAGE) -> list[str]:
    """Return the full names of linear layers and expert stacks that `targets` select.

    They are in the model's order. A target is a full name; the last part or parts of names (`q_proj`, `mlp.up_proj`,
    `experts.down_proj`); a pattern with `*`, `?` or `[` that fits a full name or its last parts (`layers.0.*`); `re:` and a
    regular expression of full names, as PEFT reads one; or a kind.
    `attention`: layers inside a module whose class is called so, or that projects queries, keys and values. `experts`: expert
    matrices, stacked or not. `router`: the linear layers that choose experts. `mlp`: the other linear layers of a decoder
    layer. `all-linear`, or None: all of these. The head over the vocabulary, and a reward model's `score`, are selected only by
    their full names. Of a model of several modalities `parts` are looked at, by default the language part alone: text runs no
    other.
    """
    stacks = expert_stacks(model)
    known = _in_order(model, stacks, parts)
    ends = output_layers(model)
    inner = [name for name in known if name not in ends]
    found: set[str] = set()
    missing: list[str] = []
    for target in targets or ("all-linear",):
        selected = _selected(model, target, inner) or {name for name in known if name == target}
        found |= selected
        missing += [] if selected else [target]
    if missing:
        raise AdapterError(_unmatched(model, missing, inner, stacks))
    return [name for name in known if name in found]


def _in_order(model: nn.Module, stacks: Mapping[str, Stack], parts: Parts) -> list[str]:
    """Return the names of all linear layers and stacks in the model's order."""
    found: list[str] = []
    homes: dict[int, list[str]] = {}
    for name, stack in stacks.items():
        homes.setdefault(id(stack.module), []).append(name)
    inside = parts.modules(model)
    for name, module in model.named_modules():
        if module in inside:
            found += [name] if is_linear(module) else homes.get(id(module), [])
    return found


def is_linear(module: nn.Module) -> bool:
    """Return whether a module maps [..., M] to [..., N] as a linear layer does.

    Routers (Llama 4's) and grouped projections (DeepSeek-V4's) are subclasses of nn.Linear that compute something else. A
    subclass with a forward of its own is called on the meta device, with stand-ins for its weights.
    """
    if isinstance(module, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    if type(module).forward is nn.Linear.forward or not module.weight.is_floating_point():
        return True
    like = {"device": "meta", "dtype": torch.float32}
    bias = {} if module.bias is None else {"bias": torch.empty(module.out_features, **like)}
    weights = {"weight": torch.empty(module.out_features, module.in_features, **like), **bias}
    x = torch.empty(2, 3, module.in_features, **like)
    try:
        y = torch.func.functional_call(module, weights, (x,))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(y, torch.Tensor) and y.shape == (2, 3, module.out_features)


def output_layers(model: nn.Module) -> set[str]:
    """Return names of output layers, which only full names select: head, or reward `score`."""
    selected = [module for module in (head(model), score(model)) if module is not None]
    return {name for name, module in model.named_modules() if name and any(module is top for top in selected)}


def matches(target: str, name: str) -> bool:
    """Return whether `target`, a name, the end of one or a pattern, selects the module `name`."""
    return any(fnmatchcase(end, target) if _is_pattern(target) else end == target for end in _suffixes(name))


def _selected(model: nn.Module, target: str, inner: Sequence[str]) -> set[str]:
    if target == "all-linear":
        return set(inner)
    if target in KINDS:
        return {name for name in inner if kind_of(model, name) == target}
    if target.startswith(EXPRESSION):
        return set(named_by(whole_name(target).fullmatch, inner, f"target_modules={target}"))
    return {name for name in inner if matches(target, name)}


def _suffixes(name: str) -> Iterator[str]:
    """Yield a.b.c, b.c, c."""
    while name:
        yield name
        name = name.partition(".")[2]


def _is_pattern(target: str) -> bool:
    return any(sign in target for sign in "*?[")


def _unmatched(model: nn.Module, missing: Sequence[str], inner: Sequence[str], stacks: Mapping[str, Stack]) -> str:
    known = sorted({name.rpartition(".")[2] for name in inner})
    others = {end: module for name, module in model.named_modules() for end in _suffixes(name)}
    kinds = {target: type(others[target]).__name__ for target in missing if target in others}
    nearest = [close for target in missing for close in get_close_matches(target, [*known, *inner], n=1) if target not in kinds]
    hints = [f"Did you mean {_joined(nearest)}?"] if nearest else []
    if any("," in target for target in missing):
        hints = [f"Give each name by itself, without commas: {' '.join(','.join(missing).replace(',', ' ').split())}."]
    hints += [
        f"{target} ({kind}) is no linear layer"
        + (f": say {target}.* for those in it." if _contains_targets(others[target]) else ".")
        for target, kind in kinds.items()
    ]
    found = {kind_of(model, name) for name in inner}
    available = [kind for kind in KINDS if kind in found or kind == "all-linear"]
    return " ".join(
        [
            f"target_modules: {_joined(missing)} matches no linear layer of {type(model).__name__}.",
            *hints,
            f"Kinds: {_joined(available)}. Linear layers{' and expert matrices' if stacks else ''} here: {_joined(known)}",
        ]
    )


def _contains_targets(module: nn.Module) -> bool:
    return any(map(is_linear, module.modules())) or bool(expert_stacks(module))


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
