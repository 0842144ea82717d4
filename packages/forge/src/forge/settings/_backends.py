"""Names of backends → their classes: a row for each shipped one, and entry points."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from forge._errors import SettingsError

GROUP = "forge.backends"
"""Entry-point group; a name is a value of the setting `backend`, its value a subclass of `forge.backends.Backend`."""

FORGE = "forge"

_SHIPPED = {
    FORGE: EntryPoint(FORGE, "forge.backends._forge:ForgeBackend", GROUP),
    "trl": EntryPoint("trl", "forge.backends._trl:TRLBackend", GROUP),
    "instructlab-training": EntryPoint("instructlab-training", "forge.backends._instructlab:InstructLabBackend", GROUP),
    "mlx": EntryPoint("mlx", "forge.backends._mlx:MLXBackend", GROUP),
    "mini-trainer": EntryPoint("mini-trainer", "forge.backends._mini_trainer:MiniTrainerBackend", GROUP),
}
"""Name → its class, imported when it is chosen."""


@attrs.frozen(kw_only=True)
class BackendSettings:
    """Setting of the backend: which trainer makes the steps."""

    backend: str = attrs.field(default=FORGE, validator=[attrs.validators.instance_of(str), attrs.validators.min_len(1)])
    """Trainer that makes the steps: forge itself, trl, instructlab-training, mini-trainer, mlx, or one of the entry-point
    group forge.backends. Its own settings are then taken too."""


def shipped_names() -> list[str]:
    """Return the names of the backends of this package."""
    return list(_SHIPPED)


def backend_names() -> list[str]:
    """Return the names of all backends: the shipped ones, then those of entry points, sorted."""
    return [*_SHIPPED, *sorted(_known().keys() - _SHIPPED.keys())]


def backend_class(name: str) -> Any:
    """Import a backend's class.

    Raises:
        SettingsError: there is none of this name, or it cannot be imported.

    """
    # Who asks for a shipped one, as every run does several times, need not wait for the search through all that is installed.
    known = _SHIPPED if name in _SHIPPED else _known()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise SettingsError(f"backend: there is no backend {name!r}; known are {', '.join(backend_names())}.{hint}")
    try:
        found = known[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"backend={name}: {known[name].value} could not be loaded: {error}.") from error
    own = getattr(found, "Settings", None)
    if not (callable(getattr(found, "execute_training", None)) and (own is None or attrs.has(own))):
        raise SettingsError(
            f"backend={name}: {known[name].value} is no subclass of forge.backends.Backend with an attrs class, or None, as "
            "its Settings."
        )
    return found


def _known() -> dict[str, EntryPoint]:
    """Find all backends; a package that is merely installed replaces none that is shipped."""
    return {entry.name: entry for entry in entry_points(group=GROUP)} | _SHIPPED
