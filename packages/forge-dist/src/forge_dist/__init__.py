"""Models into ranks and back out: launching, loading, strategies, full-state checkpoints, verified exports.

Every public name is imported when it is first asked for, so that `import forge_dist` and the settings classes load neither torch nor
transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_dist._errors import (
        CheckpointError,
        ExportError,
        ForgeDistError,
        LaunchError,
        ModelError,
        StrategyError,
        WorkerError,
    )
    from forge_dist._files import atomic_directory, write_text_atomically
    from forge_dist._settings import CheckpointSettings, LaunchSettings, ModelSettings, StrategySettings
    from forge_dist.adapters._base_model import AdapterBase, adapter_base
    from forge_dist.adapters._load_trained import load_trained
    from forge_dist.adapters._merge import Merged, merge_adapter
    from forge_dist.checkpoints._checkpoints import Checkpoint, Checkpoints
    from forge_dist.environment._topology import Topology, topology
    from forge_dist.exporting._export import export_model
    from forge_dist.gguf._check import GGUFCheck, check_gguf
    from forge_dist.gguf._export import export_gguf
    from forge_dist.launching._launch import launch
    from forge_dist.loading._dtype import base_dtype
    from forge_dist.loading._identity import model_identity
    from forge_dist.loading._load import load_model
    from forge_dist.loading._model_path import check_model_path
    from forge_dist.ranks._failure_report_from_report import worker_report
    from forge_dist.ranks._ranks import Ranks, join
    from forge_dist.strategies._choose import make_strategy
    from forge_dist.strategies._strategy import Strategy
    from forge_dist.verifying._check import check_export
    from forge_dist.verifying._result import ExportCheck

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
    "AdapterBase": "adapters._base_model",
    "Checkpoint": "checkpoints._checkpoints",
    "CheckpointError": "_errors",
    "CheckpointSettings": "_settings",
    "Checkpoints": "checkpoints._checkpoints",
    "ExportCheck": "verifying._result",
    "ExportError": "_errors",
    "ForgeDistError": "_errors",
    "GGUFCheck": "gguf._check",
    "LaunchError": "_errors",
    "LaunchSettings": "_settings",
    "Merged": "adapters._merge",
    "ModelError": "_errors",
    "ModelSettings": "_settings",
    "Ranks": "ranks._ranks",
    "Strategy": "strategies._strategy",
    "StrategyError": "_errors",
    "StrategySettings": "_settings",
    "Topology": "environment._topology",
    "WorkerError": "_errors",
    "adapter_base": "adapters._base_model",
    "atomic_directory": "_files",
    "base_dtype": "loading._dtype",
    "check_export": "verifying._check",
    "check_gguf": "gguf._check",
    "check_model_path": "loading._model_path",
    "export_gguf": "gguf._export",
    "export_model": "exporting._export",
    "join": "ranks._ranks",
    "launch": "launching._launch",
    "load_model": "loading._load",
    "load_trained": "adapters._load_trained",
    "make_strategy": "strategies._choose",
    "merge_adapter": "adapters._merge",
    "model_identity": "loading._identity",
    "topology": "environment._topology",
    "worker_report": "ranks._failure_report_from_report",
    "write_text_atomically": "_files",
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
