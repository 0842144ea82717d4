"""Numbers that a job is asked for → checked numbers."""

from __future__ import annotations

from typing import Any

from forge._errors import SettingsError


def count(name: str, value: object, least: int) -> None:
    """Raise SettingsError unless a value is a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name} must be a whole number of {least} or more, not {value!r}.")


def check_image(image: str) -> None:
    """Raise SettingsError unless an image has a name."""
    if not image or any(sign.isspace() for sign in image):
        raise SettingsError(f"image must be the name of a container image, not {image!r}.")


def processes(settings: Any, gpus: int, nproc_per_node: int | None) -> int:
    """Return the processes of each node: asked for, the recipe's, or one an accelerator.

    Raises:
        SettingsError: they are no number, or more than there are accelerators.

    """
    if nproc_per_node is not None:
        count("nproc_per_node", nproc_per_node, 1)
    asked = settings.launch.nproc_per_node if nproc_per_node is None else nproc_per_node
    if asked in (None, "auto", "gpu"):
        return max(1, gpus)
    if not isinstance(asked, int) and not asked.isdecimal():
        raise SettingsError(
            f"nproc_per_node={asked!r} depends on a machine that is not this one: give a number, or leave it out for one "
            "process for each accelerator."
        )
    if gpus and int(asked) > gpus:
        raise SettingsError(f"nproc_per_node={asked} is more than the {gpus} accelerators of a node: lower it, or raise gpus.")
    return int(asked)
