"""Full names of targets → the shortest list that selects them alone.
adapter_config.json holds it.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import nn

Rule = Callable[[str, str], bool]


def selects(short: str, name: str) -> bool:
    """Apply PEFT's rule for target_modules: a name selects itself and every name that it ends.
    The end begins at a dot.
    """
    return name == short or name.endswith(f".{short}")


def selects_feedforward(short: str, name: str) -> bool:
    """Apply PEFT's rule for ia3's feedforward_modules, which pays no attention to dots."""
    return name.endswith(short)


def short_names(
    model: nn.Module, names: Sequence[str], *, rule: Rule = selects, among: Iterable[str] | None = None, least: int = 1
) -> list[str]:
    """Return last parts of names where they select nothing else, and full names elsewhere.

    They are in the order of `names`.

    Args:
        model: the base.
        names: full names.
        rule: by which PEFT selects.
        among: all names that the rule could select; by default those of the model's modules.
        least: number of parts of the shortest name.
    """
    wanted = set(names)
    everything = [name for name, _ in model.named_modules()] if among is None else among
    others = [name for name in everything if name not in wanted]
    found: dict[str, None] = {}
    known: dict[str, bool] = {}
    for name in names:
        parts = name.split(".")
        for start in range(max(0, len(parts) - least), -1, -1):
            short = ".".join(parts[start:])
            if short not in known:
                # A name that begins with a layer's number could be taken for a version; the full one is clearer.
                known[short] = not parts[start].isdecimal() and not any(rule(short, other) for other in others)
            if known[short] or not start:
                found[short] = None
                break
    return list(found)
