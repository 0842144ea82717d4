"""A model's modules and parameters → its parts: attention, mlp, experts, router and more."""

from collections.abc import Iterator, Sequence

from torch import nn

from forge_algos._experts import class_name, is_experts, shape_of
from forge_algos._modules import head

PARTS = ("attention", "mlp", "experts", "router", "embeddings", "head", "score", "norms", "other")
"""Parts of a model whose parameters are counted, in the order of the log."""

# In names of classes; a router that is a linear layer is known by its own name.
_ROUTERS = ("router", "gating")
# Names of children by which a module is an attention: a projection of queries, or one of queries, keys and values.
_QUERIES = ("q_proj", "query", "q", "wq")
_FUSED = ("qkv", "c_attn", "query_key_value")


def score(model: nn.Module) -> nn.Module | None:
    """Return the scoring layer of a sequence classifier, which has no head over a vocabulary."""
    found: object = getattr(model, "score", None)
    return found if head(model) is None and isinstance(found, nn.Linear) else None


def kind_of(model: nn.Module, name: str) -> str | None:
    """Return the part of a decoder layer that holds a module or a parameter.

    It is attention, mlp, experts or router; None outside of the layers.
    """
    *parts, last = name.split(".")
    above = list(_modules_along(model, parts))
    # The outermost list holds the layers; lists inside of a layer are experts, for instance.
    depth = next((i for i, module in enumerate(above) if isinstance(module, (nn.ModuleList, nn.Sequential))), None)
    inside = above if depth is None else above[depth + 2 :]
    itself = getattr(above[-1], last, None)
    named = [*inside, itself] if isinstance(itself, nn.Module) else inside
    if any(called in class_name(module) for module in named for called in _ROUTERS):
        return "router"
    if "experts" in parts or any(map(is_experts, named)):
        return "experts"
    if any(map(_is_attention, inside)):
        return "attention"
    # A linear layer that is itself an element of the list has no layer around it.
    if depth is None or len(above) < depth + 2:
        return None
    return "router" if {"router", "gate"} & {*parts, last} else "mlp"


def numbers_by_part(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Count the parameters of each part of a model: name of the part → (those that train, all).

    Weights in 4 bits are counted as the numbers that they stand for, and divided ones whole.
    """
    top = head(model)
    found: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            above = list(_modules_along(model, path.split(".") if path else []))
            if any(isinstance(outer, nn.Embedding) for outer in above):
                part = "embeddings"
            elif any(outer is top for outer in above):
                part = "head"
            elif top is None and "score" in path.split("."):
                part = "score"
            elif "norm" in class_name(module):
                part = "norms"
            else:
                part = kind_of(model, f"{path}.{key}") or "other"
            trained, total = found.get(part, (0, 0))
            number = _numbers(parameter)
            found[part] = trained + number * parameter.requires_grad, total + number
    return {part: found[part] for part in PARTS if part in found}


def _numbers(parameter: nn.Parameter) -> int:
    number = 1
    for size in shape_of(parameter):
        number *= size
    # bitsandbytes packs two numbers of 4 bits in a byte.
    return number * 2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else number


def _modules_along(model: nn.Module, parts: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules on a path, from the model down."""
    yield model
    for part in parts:
        model = model.get_submodule(part)
        yield model


def _is_attention(module: nn.Module) -> bool:
    called = class_name(module)
    children = [name.lower() for name, _ in module.named_children()]
    return (
        "attention" in called
        or called.endswith("attn")
        or any(name in _QUERIES for name in children)
        or any(part in name for name in children for part in _FUSED)
    )
