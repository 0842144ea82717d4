"""Number of free directions of each target, exactly, from the share of all of them."""

from collections.abc import Mapping
from difflib import get_close_matches
from fractions import Fraction
from math import floor

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._targets import matches
from forge_algos.settings._adapter import AdapterSettings

_LEAST_PROTECTED = Fraction(1, 10)
"""The paper's minimal retention ratio: protected share of a target with importance 0."""


def free_ranks(
    shapes: Mapping[str, tuple[int, int]], settings: AdapterSettings, importance: Mapping[str, float] | None = None
) -> dict[str, int]:
    """Compute how many singular directions of each target may move, the smallest ones.

    uniform: the whole number nearest to unfreeze_rank_ratio · d, d = min(N, M); halves go up. 0.1 means one tenth, not the
    binary number beside it, so 0 and 1 are exactly none and all.

    adaptive (arXiv 2504.07097): the protected share is mrr + I (trr − mrr) with trr = 1 − unfreeze_rank_ratio, mrr = min(0.1,
    trr) and the importance I, whose mean is 1. A share above 1 is cut to 1, and what that takes is given to the others by their
    importance, so that the mean over the targets is still what was asked for; ratios 0 and 1 are none and all whatever the
    importance.

    rank_pattern gives the number itself; where several entries match a target, the last one counts.

    Args:
        shapes: [N, M] of each target, by full name.
        settings: of adapter="osft".
        importance: for osft_rank="adaptive" each target's, not below 0; `osft_importance`.

    Raises:
        AdapterError: osft_rank="adaptive" without the importance of a target; an entry of rank_pattern that matches no target,
            or asks for more directions than a target has.
    """
    ratio = Fraction(str(settings.unfreeze_rank_ratio))
    shares = dict.fromkeys(shapes, 1 - ratio)
    if settings.osft_rank == "adaptive" and shapes:
        shares = _adaptive(1 - ratio, _weights(shapes, importance))
    free = {name: floor(min(shape) * (1 - shares[name]) + Fraction(1, 2)) for name, shape in shapes.items()}
    for entry in settings.rank_pattern or ():
        pattern, _, rank = entry.rpartition("=")
        for name in _matching(pattern, shapes):
            if int(rank) > min(shapes[name]):
                raise AdapterError(
                    f"rank_pattern {entry!r}: {name} is {list(shapes[name])} and has {min(shapes[name])} directions; ask for "
                    "at most those"
                )
            free[name] = int(rank)
    return free


def _weights(shapes: Mapping[str, tuple[int, int]], importance: Mapping[str, float] | None) -> dict[str, Fraction]:
    if importance is None:
        raise AdapterError(
            "osft_rank='adaptive' needs the importance of each target: measure it with osft_importance, or set "
            "osft_rank='uniform'"
        )
    missing = [name for name in shapes if name not in importance]
    if missing:
        raise AdapterError(
            f"the importance of {missing[0]} is not there ({len(missing)} of {len(shapes)} targets): measure all of them"
        )
    wrong = [name for name in shapes if not 0 <= importance[name] < float("inf")]
    if wrong:
        raise AdapterError(f"the importance of {wrong[0]} is {importance[wrong[0]]}, which is no finite number from 0 on")
    return {name: Fraction(importance[name]) for name in shapes}


def _adaptive(mean: Fraction, weights: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Compute protected shares with this mean: the minimum, more by weight, none above 1."""
    least = min(_LEAST_PROTECTED, mean)
    shares: dict[str, Fraction] = {}
    rest = dict(weights)
    while rest:
        above = mean * len(weights) - sum(shares.values()) - least * len(rest)
        total = sum(rest.values())
        # Without any weight all get the same.
        found = {name: least + (above * weight / total if total else above / len(rest)) for name, weight in rest.items()}
        full = [name for name, share in found.items() if share > 1]
        if not full:
            return shares | found
        for name in full:
            shares[name] = Fraction(1)
            del rest[name]
    return shares


def _matching(pattern: str, names: Mapping[str, tuple[int, int]]) -> list[str]:
    found = [name for name in names if matches(pattern, name)]
    if not found:
        last = sorted({name.rpartition(".")[2] for name in names})
        nearest = get_close_matches(pattern, [*last, *names], n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise AdapterError(f"rank_pattern: {pattern} matches no target.{hint} Targets here: {', '.join(last) or 'none'}")
    return found
