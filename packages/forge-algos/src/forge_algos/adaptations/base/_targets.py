"""Names, patterns and kinds of targets → full names of a model's linear layers."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers.pytorch_utils import Conv1D

from forge_algos._errors import AdapterError
from forge_algos._modules import head

KINDS = ("attention", "mlp", "all-linear")

_LINEAR = (nn.Linear, Conv1D)
# Names of children by which a module is an attention: a projection of queries, or one of queries, keys and values.
_QUERIES = ("q_proj", "query", "q", "wq")
_FUSED = ("qkv", "c_attn", "query_key_value")


def resolve_targets(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Return the full names of the linear layers that `targets` select, in the model's order.

    A target is a full name; the last part or parts of names (`q_proj`, `mlp.up_proj`); a pattern with `*`, `?` or `[` that fits
    a full name or its last parts (`layers.0.*`); or a kind. `attention`: layers inside a module whose class is called so, or
    that projects queries, keys and values. `mlp`: the other linear layers of a decoder layer. `all-linear`, or None: all. The
    head over the vocabulary, and a reward model's `score`, are selected only by their full names.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, _LINEAR) and not _computes_otherwise(module)]
    ends = output_layers(model)
    inner = [name for name in linear if name not in ends]
    found: set[str] = set()
    missing: list[str] = []
    for target in targets or ("all-linear",):
        selected = _selected(model, target, inner) or {name for name in linear if name == target}
        found |= selected
        missing += [] if selected else [target]
    if missing:
        raise AdapterError(_unmatched(model, missing, inner))
    return [name for name in linear if name in found]


def _computes_otherwise(layer: nn.Module) -> bool:
    """Return whether a linear layer multiplies by its weight in groups, as DeepSeek-V4's."""
    return type(layer).__name__.endswith("GroupedLinear")


def output_layers(model: nn.Module) -> set[str]:
    """Return names of output layers, which only full names select: head, or reward `score`."""
    selected = [module for module in (head(model), score(model)) if module is not None]
    return {name for name, module in model.named_modules() if name and any(module is top for top in selected)}


def score(model: nn.Module) -> nn.Module | None:
    """Return the scoring layer of a sequence classifier, which has no head over a vocabulary."""
    found: object = getattr(model, "score", None)
    return found if head(model) is None and isinstance(found, nn.Linear) else None


def matches(target: str, name: str) -> bool:
    """Return whether `target`, a name, the end of one or a pattern, selects the module `name`."""
    return any(fnmatchcase(end, target) if _is_pattern(target) else end == target for end in _suffixes(name))


def _selected(model: nn.Module, target: str, inner: Sequence[str]) -> set[str]:
    if target == "all-linear":
        return set(inner)
    if target in KINDS:
        return {name for name in inner if kind_of(model, name) == target}
    return {name for name in inner if matches(target, name)}


def kind_of(model: nn.Module, name: str) -> str | None:
    """Return the part of a decoder layer that holds a linear layer: attention or mlp, or None."""
    above = list(_ancestors(model, name))
    # The outermost list holds the layers; lists inside of a layer are experts, for instance.
    depth = next((i for i, module in enumerate(above) if isinstance(module, (nn.ModuleList, nn.Sequential))), None)
    inside = above if depth is None else above[depth + 2 :]
    if any(map(_is_attention, inside)):
        return "attention"
    # A linear layer that is itself an element of the list has no layer around it.
    return None if depth is None or len(above) < depth + 2 else "mlp"


def _is_attention(module: nn.Module) -> bool:
    called = type(module).__name__.lower()
    children = [name.lower() for name, _ in module.named_children()]
    return (
        "attention" in called
        or called.endswith("attn")
        or any(name in _QUERIES for name in children)
        or any(part in name for name in children for part in _FUSED)
    )


def _ancestors(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that hold the one called `name`, from the model down to its parent."""
    yield model
    for part in name.split(".")[:-1]:
        model = model.get_submodule(part)
        yield model


def _suffixes(name: str) -> Iterator[str]:
    """Yield a.b.c, b.c, c."""
    while name:
        yield name
        name = name.partition(".")[2]


def _is_pattern(target: str) -> bool:
    return any(sign in target for sign in "*?[")


def _unmatched(model: nn.Module, missing: Sequence[str], inner: Sequence[str]) -> str:
    known = sorted({name.rpartition(".")[2] for name in inner})
    others = {end: module for name, module in model.named_modules() for end in _suffixes(name)}
    kinds = {target: type(others[target]).__name__ for target in missing if target in others}
    nearest = [close for target in missing for close in get_close_matches(target, [*known, *inner], n=1) if target not in kinds]
    hints = [f"Did you mean {_joined(nearest)}?"] if nearest else []
    hints += [
        f"{target} ({kind}) is no linear layer"
        + (f": say {target}.* for those in it." if _contains_linear(others[target]) else ".")
        for target, kind in kinds.items()
    ]
    return " ".join(
        [
            f"target_modules: {_joined(missing)} matches no linear layer of {type(model).__name__}.",
            *hints,
            f"Kinds: {_joined(KINDS)}. Linear layers here: {_joined(known)}",
        ]
    )


def _contains_linear(module: nn.Module) -> bool:
    return any(isinstance(inner, _LINEAR) for inner in module.modules())


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def stacked_experts(model: nn.Module) -> list[str]:
    """Return a line for the log where experts are stacked tensors, which no linear layer holds.
    Otherwise `all` would be taken to include them.
    """
    experts = [p for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in f".{name}"]
    numbers = sum(p.numel() for p in experts)
    return [f"no target: {len(experts)} tensors of experts, {numbers:,} parameters"] if experts else []
