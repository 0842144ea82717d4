"""Full names of targets → the shortest list that selects them alone.
adapter_config.json holds it.
"""

from collections.abc import Callable, Sequence

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


def short_names(model: nn.Module, names: Sequence[str], *, rule: Rule = selects) -> list[str]:
    """Return last parts of names where they select no other module, and full names elsewhere.

    They are in the order of `names`.
    """
    wanted = set(names)
    others = [name for name, _ in model.named_modules() if name not in wanted]
    found: dict[str, None] = {}
    known: dict[str, bool] = {}
    for name in names:
        parts = name.split(".")
        for start in range(len(parts) - 1, -1, -1):
            short = ".".join(parts[start:])
            if short not in known:
                # A name that begins with a layer's number could be taken for a version; the full one is clearer.
                known[short] = not parts[start].isdecimal() and not any(rule(short, other) for other in others)
            if known[short] or not start:
                found[short] = None
                break
    return list(found)
