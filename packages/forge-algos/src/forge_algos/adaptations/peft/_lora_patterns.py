"""rank_pattern and alpha_pattern → the rank and the scale of each of LoRA's targets."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from torch import nn

from forge_algos._errors import AdapterError
from forge_algos.adaptations.base._targets import matches
from forge_algos.adaptations.peft._target_names import short_names
from forge_algos.settings._adapter import AdapterSettings

_Value = TypeVar("_Value", int, float)


def ranks_of(settings: AdapterSettings, names: Sequence[str], others: Iterable[str] = ()) -> dict[str, int]:
    """Return the rank of each target by its full name; 0 where it gets no adapter.

    Args:
        settings: lora_r and rank_pattern.
        names: full names of the linear layers among the targets.
        others: targets whose rank cannot be chosen: expert matrices, which have lora_r.

    Raises:
        AdapterError: an entry fits no target, or only such as cannot be chosen.
    """
    return _by_name("rank_pattern", settings.rank_pattern, names, others, settings.lora_r, int)


def alphas_of(settings: AdapterSettings, names: Sequence[str], others: Iterable[str] = ()) -> dict[str, float]:
    """Return lora_alpha of each target by its full name; arguments and errors as of `ranks_of`."""
    return _by_name("alpha_pattern", settings.alpha_pattern, names, others, settings.lora_alpha, float)


def pattern_of(model: nn.Module, values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return PEFT's pattern for values by full name: short names that select those that differ."""
    found: dict[str, Any] = {}
    for value in dict.fromkeys(values.values()):
        if value != default:
            found |= dict.fromkeys(short_names(model, [name for name in values if values[name] == value]), value)
    return found


def _by_name(
    setting: str,
    entries: Iterable[str] | None,
    names: Sequence[str],
    others: Iterable[str],
    default: _Value,
    convert: Callable[[str], _Value],
) -> dict[str, _Value]:
    found = dict.fromkeys(names, default)
    for entry in entries or ():
        pattern, _, value = entry.rpartition("=")
        selected = [name for name in names if matches(pattern, name)]
        if not selected:
            experts = [name for name in others if matches(pattern, name)]
            raise AdapterError(f"{setting} {entry!r}: {_unmatched(pattern, names, experts)}")
        found |= dict.fromkeys(selected, convert(value))
    return found


def _unmatched(pattern: str, names: Sequence[str], experts: Sequence[str]) -> str:
    if experts:
        return f"{experts[0]} are expert matrices, which all have lora_r and lora_alpha; leave it out"
    last = sorted({name.rpartition(".")[2] for name in names})
    nearest = get_close_matches(pattern, [*last, *names], n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    return f"{pattern} matches no target.{hint} Targets here: {', '.join(last) or 'none'}"
