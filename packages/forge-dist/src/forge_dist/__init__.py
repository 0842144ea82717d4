"""Models into ranks and back out: launching, loading, strategies, full-state checkpoints, verified exports.

Every public name is imported when it is first asked for, so that `import forge_dist` and the settings classes load neither torch nor
transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_dist._adapter_base import AdapterBase, adapter_base
    from forge_dist._atomic import atomic_directory, write_text_atomically
    from forge_dist._check import check_export
    from forge_dist._checkpoints import Checkpoint, Checkpoints
    from forge_dist._dtype import base_dtype
    from forge_dist._errors import (
        CheckpointError,
        ExportError,
        ForgeDistError,
        LaunchError,
        ModelError,
        StrategyError,
        WorkerError,
    )
    from forge_dist._export import export_model
    from forge_dist._export_check import ExportCheck
    from forge_dist._gguf import export_gguf
    from forge_dist._gguf_check import GGUFCheck, check_gguf
    from forge_dist._identity import model_identity
    from forge_dist._launch import launch
    from forge_dist._load import load_model
    from forge_dist._load_trained import load_trained
    from forge_dist._merge import Merged, merge_adapter
    from forge_dist._model_path import check_model_path
    from forge_dist._ranks import Ranks, join
    from forge_dist._report import worker_report
    from forge_dist._settings import CheckpointSettings, LaunchSettings, ModelSettings, StrategySettings
    from forge_dist._strategies import make_strategy
    from forge_dist._strategy import Strategy
    from forge_dist._topology import Topology, topology

__version__ = "0.4.0"

__all__ = [
    "AdapterBase",
    "Checkpoint",
    "CheckpointError",
    "CheckpointSettings",
    "Checkpoints",
    "ExportCheck",
    "ExportError",
    "ForgeDistError",
    "GGUFCheck",
    "LaunchError",
    "LaunchSettings",
    "Merged",
    "ModelError",
    "ModelSettings",
    "Ranks",
    "Strategy",
    "StrategyError",
    "StrategySettings",
    "Topology",
    "WorkerError",
    "adapter_base",
    "atomic_directory",
    "base_dtype",
    "check_export",
    "check_gguf",
    "check_model_path",
    "export_gguf",
    "export_model",
    "join",
    "launch",
    "load_model",
    "load_trained",
    "make_strategy",
    "merge_adapter",
    "model_identity",
    "topology",
    "worker_report",
    "write_text_atomically",
]

_HOMES = {
    "AdapterBase": "_adapter_base",
    "Checkpoint": "_checkpoints",
    "CheckpointError": "_errors",
    "CheckpointSettings": "_settings",
    "Checkpoints": "_checkpoints",
    "ExportCheck": "_export_check",
    "ExportError": "_errors",
    "ForgeDistError": "_errors",
    "GGUFCheck": "_gguf_check",
    "LaunchError": "_errors",
    "LaunchSettings": "_settings",
    "Merged": "_merge",
    "ModelError": "_errors",
    "ModelSettings": "_settings",
    "Ranks": "_ranks",
    "Strategy": "_strategy",
    "StrategyError": "_errors",
    "StrategySettings": "_settings",
    "Topology": "_topology",
    "WorkerError": "_errors",
    "adapter_base": "_adapter_base",
    "atomic_directory": "_atomic",
    "base_dtype": "_dtype",
    "check_export": "_check",
    "check_gguf": "_gguf_check",
    "check_model_path": "_model_path",
    "export_gguf": "_gguf",
    "export_model": "_export",
    "join": "_ranks",
    "launch": "_launch",
    "load_model": "_load",
    "load_trained": "_load_trained",
    "make_strategy": "_strategies",
    "merge_adapter": "_merge",
    "model_identity": "_identity",
    "topology": "_topology",
    "worker_report": "_report",
    "write_text_atomically": "_atomic",
}


def __getattr__(name: str) -> object:
    """Import a public name from the private module that is its home, once."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
