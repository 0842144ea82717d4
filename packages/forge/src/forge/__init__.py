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
    from forge._errors import (
        DataLintError,
        ForgeError,
        PreemptedError,
        RecipeError,
        RunDirectoryError,
        RunWriteError,
        SettingsError,
    )
    from forge._result import RunResult
    from forge.exporting._export import export
    from forge.verbs._distill import distill
    from forge.verbs._dpo import dpo
    from forge.verbs._generate import generate
    from forge.verbs._grpo import grpo
    from forge.verbs._kto import kto
    from forge.verbs._orpo import orpo
    from forge.verbs._osft import osft
    from forge.verbs._ppo import ppo
    from forge.verbs._pretrain import pretrain
    from forge.verbs._reward import reward
    from forge.verbs._rloo import rloo
    from forge.verbs._sft import sft
    from forge.verbs._simpo import simpo

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
    "distill": "verbs._distill",
    "dpo": "verbs._dpo",
    "export": "exporting._export",
    "generate": "verbs._generate",
    "grpo": "verbs._grpo",
    "kto": "verbs._kto",
    "orpo": "verbs._orpo",
    "osft": "verbs._osft",
    "ppo": "verbs._ppo",
    "pretrain": "verbs._pretrain",
    "reward": "verbs._reward",
    "rloo": "verbs._rloo",
    "sft": "verbs._sft",
    "simpo": "verbs._simpo",
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
