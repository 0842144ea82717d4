"""Numbers that a job is asked for → checked numbers."""

from __future__ import annotations

from typing import Any

import attrs

from forge._counted import counted
from forge._errors import SettingsError
from forge.settings._backends import FORGE, backend_class


def count(name: str, value: object, least: int) -> None:
    """Raise SettingsError unless a value is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name} must be a whole number of {least} or more, not {value!r}.")


def check_image(image: str) -> None:
    """Raise SettingsError unless an image has a name."""
    if not image or any(sign.isspace() for sign in image):
        raise SettingsError(f"image must be the name of a container image, not {image!r}.")


def processes(settings: Any, nodes: int, gpus: int, nproc_per_node: int | None) -> int:
    """Return the processes of each node: asked for, the recipe's, or one an accelerator.

    Raises:
        SettingsError: they are no number, more than there are accelerators, or more in all than a step has samples.

    """
    if nproc_per_node is not None:
        count("nproc_per_node", nproc_per_node, 1)
    asked = settings.launch.nproc_per_node if nproc_per_node is None else nproc_per_node
    if asked in (None, "auto", "gpu"):
        asked = max(1, gpus)
    if not isinstance(asked, int) and not asked.isdecimal():
        raise SettingsError(
            f"nproc_per_node={asked!r} depends on a machine that is not this one: give a number, or leave it out for one "
            "process for each accelerator."
        )
    number = int(asked)
    if gpus and number > gpus:
        raise SettingsError(
            f"nproc_per_node={number} is more than the {counted(gpus, 'accelerators')} of a node: lower it, or raise gpus."
        )
    try:
        attrs.evolve(settings.launch, nproc_per_node=number)
    except ValueError as error:
        raise SettingsError(f"{error}.") from None
    backend = settings.backend.backend
    why = backend_class(backend).refused.get("nnodes") if nodes > 1 and backend != FORGE else None
    if why is not None:
        raise SettingsError(
            f"nodes={nodes} is not available with backend={backend}: {why}. Ask for one, or choose backend=forge."
        )
    # Ranks that share rows count as one, as in the run, which would refuse it in the cluster.
    shards = nodes * number // (settings.strategy.tp_size * settings.strategy.cp_size)
    if settings.plan.effective_batch_size < shards:
        raise SettingsError(
            f"effective_batch_size={settings.plan.effective_batch_size} is less than the {shards} ranks of {nodes} "
            f"node{'s' * (nodes > 1)}: some would never have a sample. Set effective_batch_size to {shards} or more, or ask "
            "for less."
        )
    return number
