"""Full names of targets → the shortest list that says these modules and no others, as adapter_config.json holds it."""

from collections.abc import Callable, Sequence

from torch import nn

Says = Callable[[str, str], bool]


def says(short: str, name: str) -> bool:
    """PEFT's rule for target_modules: a name means itself and all names that it ends."""
    return name == short or name.endswith(f".{short}")


def ends(short: str, name: str) -> bool:
    """PEFT's rule for ia3's feedforward_modules, which minds no dots."""
    return name.endswith(short)


def short_names(model: nn.Module, names: Sequence[str], *, rule: Says = says) -> list[str]:
    """Last parts of names where they mean no other module of the model, full names where they do; in the order of `names`.

    Args:
        model: whose modules they are.
        names: full names, all of what is to be said.
        rule: whether a short name means a full one.

    >>> model = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(1, 1)}), "b": nn.ModuleDict({"up": nn.Linear(1, 1)})})
    >>> short_names(model, ["a.up", "b.up"])
    ['up']
    >>> short_names(model, ["b.up"])
    ['b.up']
    """
    wanted = set(names)
    others = [name for name, _ in model.named_modules() if name not in wanted]
    found: dict[str, None] = {}
    said: dict[str, bool] = {}
    for name in names:
        parts = name.split(".")
        for start in range(len(parts) - 1, -1, -1):
            short = ".".join(parts[start:])
            if short not in said:
                # A name that begins with a layer's number reads like a version; the full one is clearer.
                said[short] = not parts[start].isdecimal() and not any(rule(short, other) for other in others)
            if said[short] or not start:
                found[short] = None
                break
    return list(found)
