"""A few settings to a run: `forge.sft(...)` in Python, `forge sft` in a shell.

A lazy door: importing `forge` loads none of the rooms behind it. `forge.data` is `forge_data`, `forge.packing` is
`forge_packing`, and so on; the verbs (`forge.sft`, `forge.dpo`, ..., `forge.generate`) load what they need when they are called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import forge_accel as accel
    import forge_algos as algos
    import forge_data as data
    import forge_dist as dist
    import forge_packing as packing
    from forge._distill import distill
    from forge._dpo import dpo
    from forge._errors import (
        DataLintError,
        ForgeError,
        PreemptedError,
        RecipeError,
        RunDirectoryError,
        RunWriteError,
        SettingsError,
    )
    from forge._export import export
    from forge._generate import generate
    from forge._grpo import grpo
    from forge._kto import kto
    from forge._orpo import orpo
    from forge._osft import osft
    from forge._ppo import ppo
    from forge._pretrain import pretrain
    from forge._result import RunResult
    from forge._reward import reward
    from forge._rloo import rloo
    from forge._sft import sft
    from forge._simpo import simpo

__version__ = "0.5.0"

__all__ = [
    "DataLintError",
    "ForgeError",
    "PreemptedError",
    "RecipeError",
    "RunDirectoryError",
    "RunResult",
    "RunWriteError",
    "SettingsError",
    "accel",
    "algos",
    "data",
    "dist",
    "distill",
    "dpo",
    "export",
    "generate",
    "grpo",
    "kto",
    "orpo",
    "osft",
    "packing",
    "ppo",
    "pretrain",
    "reward",
    "rloo",
    "sft",
    "simpo",
]

_ROOMS = {
    "accel": "forge_accel",
    "algos": "forge_algos",
    "data": "forge_data",
    "dist": "forge_dist",
    "packing": "forge_packing",
}
_HOMES = {
    "DataLintError": "_errors",
    "ForgeError": "_errors",
    "PreemptedError": "_errors",
    "RecipeError": "_errors",
    "RunDirectoryError": "_errors",
    "RunResult": "_result",
    "RunWriteError": "_errors",
    "SettingsError": "_errors",
    "distill": "_distill",
    "dpo": "_dpo",
    "export": "_export",
    "generate": "_generate",
    "grpo": "_grpo",
    "kto": "_kto",
    "orpo": "_orpo",
    "osft": "_osft",
    "ppo": "_ppo",
    "pretrain": "_pretrain",
    "reward": "_reward",
    "rloo": "_rloo",
    "sft": "_sft",
    "simpo": "_simpo",
}


def __getattr__(name: str) -> object:
    """Load a room or a verb when it is first asked for."""
    if name in _ROOMS:
        value: object = import_module(_ROOMS[name])
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
