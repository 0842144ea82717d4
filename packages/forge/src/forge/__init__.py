"""Fine-tuning runs from a few settings: `forge.sft(...)` in Python, `forge sft` in a shell.

Importing `forge` loads none of the packages behind it. `forge.data` is `forge_data`, `forge.packing` is `forge_packing`, and so
on; the verbs (`forge.sft`, `forge.dpo`, ..., `forge.generate`) load what they need when they are called.
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
    from forge import backends as backends, clusters as clusters, mini as mini
    from forge._dry_run import DryRun as DryRun
    from forge._error_families import ERRORS as ERRORS
    from forge._errors import (
        BackendError as BackendError,
        DataLintError as DataLintError,
        ForgeError as ForgeError,
        OutOfMemoryError as OutOfMemoryError,
        PreemptedError as PreemptedError,
        PushError as PushError,
        RecipeError as RecipeError,
        RunDirectoryError as RunDirectoryError,
        RunExitError as RunExitError,
        RunTakenOverError as RunTakenOverError,
        RunWriteError as RunWriteError,
        SettingsError as SettingsError,
        StorageError as StorageError,
        TrackingError as TrackingError,
    )
    from forge._result import RunResult as RunResult
    from forge.backends._train import dry_run as dry_run
    from forge.cli._repair import repair as repair
    from forge.cli._track import track as track
    from forge.exporting._export import export as export
    from forge.exporting._push import push as push
    from forge.talking._chat import chat as chat
    from forge.talking._evaluate import evaluate as evaluate
    from forge.talking._forgetting import forgetting as forgetting
    from forge.talking._generate import generate as generate
    from forge.talking._serve import serve as serve
    from forge.teaching._teach import teach as teach
    from forge.verbs._classify import classify as classify
    from forge.verbs._distill import distill as distill
    from forge.verbs._embed import embed as embed
    from forge.verbs._online import grpo as grpo, ppo as ppo, rloo as rloo
    from forge.verbs._osft import osft as osft
    from forge.verbs._preferences import dpo as dpo, kto as kto, orpo as orpo, reward as reward, simpo as simpo
    from forge.verbs._pretrain import pretrain as pretrain
    from forge.verbs._sdft import sdft as sdft
    from forge.verbs._sft import sft as sft

__version__ = "0.5.1"

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_dry_run": "DryRun",
    "_error_families": "ERRORS",
    "_errors": "BackendError DataLintError ForgeError OutOfMemoryError PreemptedError PushError RecipeError RunDirectoryError "
    "RunExitError RunTakenOverError RunWriteError SettingsError StorageError TrackingError",
    "_result": "RunResult",
    "cli._repair": "repair",
    "cli._track": "track",
    "exporting._export": "export",
    "backends._train": "dry_run",
    "exporting._push": "push",
    "talking._chat": "chat",
    "talking._evaluate": "evaluate",
    "talking._forgetting": "forgetting",
    "talking._generate": "generate",
    "talking._serve": "serve",
    "teaching._teach": "teach",
    # The public names of verbs/ are the training verbs, in the order of `forge --help`.
    "verbs._sft": "sft",
    "verbs._osft": "osft",
    "verbs._pretrain": "pretrain",
    "verbs._distill": "distill",
    "verbs._sdft": "sdft",
    "verbs._preferences": "dpo orpo simpo kto reward",
    "verbs._classify": "classify",
    "verbs._embed": "embed",
    "verbs._online": "ppo grpo rloo",
}
# `forge.data` is `forge_data`, and so on.
_PACKAGES = {
    "accel": "forge_accel",
    "algos": "forge_algos",
    "backends": "forge.backends",
    "clusters": "forge.clusters",
    "data": "forge_data",
    "dist": "forge_dist",
    "mini": "forge.mini",
    "packing": "forge_packing",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted({**_MODULE_OF, **_PACKAGES})


def __getattr__(name: str) -> object:
    """Import a package or a public name when it is first used."""
    if name in _PACKAGES:
        value: object = import_module(_PACKAGES[name])
    elif name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    else:
        from forge.settings._elsewhere import COMMANDS

        told = f": here it is forge.{COMMANDS[name]}" if COMMANDS.get(name, " ").isidentifier() else ""
        msg = f"module {__name__!r} has no attribute {name!r}{told}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
