"""Models into ranks and back out: loading, verified exports, atomic directories.

Every public name is imported when it is first asked for, so that `import forge_dist` and the settings classes load neither torch nor
transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_dist._atomic import atomic_directory, write_text_atomically
    from forge_dist._check import check_export
    from forge_dist._dtype import base_dtype
    from forge_dist._errors import ExportError, ForgeDistError, LaunchError, ModelError
    from forge_dist._export import export_model
    from forge_dist._export_check import ExportCheck
    from forge_dist._launch import require_single_process
    from forge_dist._load import load_model
    from forge_dist._load_trained import load_trained
    from forge_dist._model_path import check_model_path
    from forge_dist._settings import CheckpointSettings, ModelSettings

__version__ = "0.1.0"

__all__ = [
    "CheckpointSettings",
    "ExportCheck",
    "ExportError",
    "ForgeDistError",
    "LaunchError",
    "ModelError",
    "ModelSettings",
    "atomic_directory",
    "base_dtype",
    "check_export",
    "check_model_path",
    "export_model",
    "load_model",
    "load_trained",
    "require_single_process",
    "write_text_atomically",
]

_HOMES = {
    "CheckpointSettings": "_settings",
    "ExportCheck": "_export_check",
    "ExportError": "_errors",
    "ForgeDistError": "_errors",
    "LaunchError": "_errors",
    "ModelError": "_errors",
    "ModelSettings": "_settings",
    "atomic_directory": "_atomic",
    "base_dtype": "_dtype",
    "check_export": "_check",
    "check_model_path": "_model_path",
    "export_model": "_export",
    "load_model": "_load",
    "load_trained": "_load_trained",
    "require_single_process": "_launch",
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
