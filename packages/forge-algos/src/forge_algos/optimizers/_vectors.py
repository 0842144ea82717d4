"""Trainable parameters of a model → those that have the shape of matrices and are none."""

from torch import nn

from forge_algos.settings._adapter_table import ADAPTERS


def vectors(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have the shape of matrices and are vectors.

    Those of adapters stand in their table: ia3's factors (`ia3_l`) are columns. Biases of experts are stacked, and so are the
    singular values that OSFT trains of them.
    """
    named = {name for kind in ADAPTERS.values() for name in kind.vectors}
    found: set[int] = set()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if not named.isdisjoint(parts) or parts[-1].endswith("bias") or ("osft" in parts and parts[-1] == "values"):
            found.add(id(parameter))
    return found
