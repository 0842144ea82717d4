"""Names of the weights that train → a model whose other weights are frozen."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import language_modules, repeated_blocks
from forge_algos.adaptations.base._parts import score
from forge_algos.settings._adapter import LAYERS, unfrozen

SECONDS = 10.0
"""Longest search of a pattern: one with many repeats may take hours for a name that it does not fit."""


def freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter but those that `unfrozen_parameters` names.

    What is frozen already stays so: the vision tower of a multimodal model, for instance. The scoring layer of a reward model
    or classifier trains in any case, for it begins without meaning.

    Args:
        model: changed in place.
        patterns: regular expressions; one names a parameter whose name it matches from the beginning up to the end of one of
            the name's parts, so that `model.layers.1` is layer 1 and not 10. `last:8` is the last eight of the language
            part's layers, `first:2.mlp` the feed-forward of the first two.

    Raises:
        AdapterError: more layers than there are; a pattern that names no parameter, or only frozen ones, or is searched for
            too long.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    top = score(model)
    moving = set() if top is None else {id(parameter) for parameter in top.parameters()}
    for pattern in patterns:
        named = named_by(unfrozen(_of_layers(model, pattern)).match, parameters, f"unfrozen_parameters={pattern}")
        movable = {id(parameters[name]) for name in named if parameters[name].requires_grad}
        if not movable:
            like = get_close_matches(pattern, parameters, n=1, cutoff=0) or ["none"]
            why = f"is frozen in this model ({named[0]})" if named else f"names no weight, whose names are like {like[0]}"
            raise AdapterError(f"unfrozen_parameters={pattern}: {why}")
        moving |= movable
    for parameter in parameters.values():
        if id(parameter) not in moving:
            parameter.requires_grad = False


def _of_layers(model: nn.Module, pattern: str) -> str:
    """Return the expression of the layers that a pattern counts; any other as it is."""
    asked = LAYERS.fullmatch(pattern)
    if asked is None:
        return pattern
    inner, names = language_modules(model), {module: name for name, module in model.named_modules()}
    layers = [names[block] for block in repeated_blocks(model) if block in inner]
    number = int(asked["number"])
    if not 0 < number <= len(layers):
        raise AdapterError(
            f"unfrozen_parameters={pattern}: the model has {len(layers)} layers; ask for a number of them from 1 on"
        )
    chosen = layers[:number] if asked["end"] == "first" else layers[-number:]
    return f"({'|'.join(map(re.escape, chosen))}){asked['rest']}"


def named_by(fits: Callable[..., object], names: Iterable[str], setting: str) -> list[str]:
    """Return the names that an expression fits, in their order.

    Args:
        fits: its `match` or `fullmatch`.
        names: names of weights or modules.
        setting: setting and value, for the error.

    Raises:
        AdapterError: it is searched for too long.
    """
    end = time.monotonic() + SECONDS
    try:
        return [name for name in names if fits(name, timeout=max(0.001, end - time.monotonic()))]
    except TimeoutError as error:
        raise AdapterError(
            f"{setting}: its search among the model's names takes more than {SECONDS:g} seconds: write "
            "`.*` for any text in place of several repeats, or give several expressions"
        ) from error
