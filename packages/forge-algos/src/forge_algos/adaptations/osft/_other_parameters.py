"""Parameters that OSFT may train whole beside its targets, by kind."""

from collections.abc import Iterator, Sequence
from typing import get_args

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import head, language_modules
from forge_algos.adaptations.base._parts import score
from forge_algos.settings._adapter import Rest


def train_rest(model: nn.Module, kinds: Sequence[Rest]) -> dict[str, list[str]]:
    """Let the parameters of these kinds train, and return their names by kind.

    "all" stands for the kinds that the model has. Those of a reward model's `score` are there under "score", whatever was asked
    for. A head tied to the embeddings is one weight with them: either kind trains it.
    """
    found: dict[str, list[str]] = {}
    if "all" in kinds:
        kinds = [kind for kind in get_args(Rest) if kind in _all(model)]
    for kind in dict.fromkeys(kinds):
        found[kind] = [name for name, of in _kinds(model) if kind in of]
        if not found[kind]:
            raise AdapterError(
                f"osft_train_rest={kind}: {type(model).__name__} has none. It has "
                f"{', '.join(sorted(_all(model))) or 'none of them'}"
            )
    ends = [name for name, of in _kinds(model) if "score" in of]
    if ends:
        # It is newly initialised or nearly so, and of no use frozen.
        found["score"] = ends
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in {name for names in found.values() for name in names}:
        parameters[name].requires_grad_()
    return found


def tied(model: nn.Module) -> bool:
    """Return whether the head and the embeddings are one weight."""
    top = head(model)
    weight = getattr(top, "weight", None)
    return any(isinstance(m, nn.Embedding) and m.weight is weight for m in model.modules())


def _all(model: nn.Module) -> set[str]:
    return {kind for _, of in _kinds(model) for kind in of} - {"score"}


def _kinds(model: nn.Module) -> Iterator[tuple[str, set[str]]]:
    """Yield (name, kinds) of each parameter that is of any kind, under every name that it has."""
    tops, scores, language = head(model), score(model), language_modules(model)
    for home, module in model.named_modules():
        if module not in language:
            continue
        norm = "norm" in type(module).__name__.lower()
        for key, _ in module.named_parameters(recurse=False):
            kinds = {
                "embeddings": isinstance(module, nn.Embedding),
                "head": module is tops,
                "score": module is scores,
                "norms": norm,
                # Those of experts are one tensor with a name of its own.
                "biases": (key == "bias" or key.endswith("_bias")) and not norm,
            }
            if any(kinds.values()):
                yield f"{home}.{key}".removeprefix("."), {kind for kind, is_one in kinds.items() if is_one}
