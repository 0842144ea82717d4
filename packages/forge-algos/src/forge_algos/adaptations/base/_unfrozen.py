"""Names of the weights that train → a model whose other weights are frozen."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._parts import score
from forge_algos.settings._adapter import unfrozen


def freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter but those that `unfrozen_parameters` names.

    What is frozen already stays so: the vision tower of a multimodal model, for instance. The scoring layer of a reward model
    or classifier trains in any case, for it begins without meaning.

    Args:
        model: changed in place.
        patterns: regular expressions; one names a parameter whose name it matches from the beginning up to the end of one of
            the name's parts, so that `model.layers.1` is layer 1 and not 10.

    Raises:
        AdapterError: a pattern that names no parameter, or only frozen ones.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    top = score(model)
    moving = set() if top is None else {id(parameter) for parameter in top.parameters()}
    for pattern in patterns:
        fitting = unfrozen(pattern)
        named = [name for name in parameters if fitting.match(name)]
        movable = {id(parameters[name]) for name in named if parameters[name].requires_grad}
        if not movable:
            like = get_close_matches(pattern, parameters, n=1, cutoff=0) or ["none"]
            why = f"is frozen in this model ({named[0]})" if named else f"names no weight, whose names are like {like[0]}"
            raise AdapterError(f"unfrozen_parameters={pattern}: {why}")
        moving |= movable
    for parameter in parameters.values():
        if id(parameter) not in moving:
            parameter.requires_grad = False
