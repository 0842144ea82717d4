"""Distributed runs: launching, loading, strategies, full states, verified exports.

Every public name is imported at its first use, so that `import forge_dist` and the settings classes load neither torch nor
transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_dist._errors import (
        CheckpointError as CheckpointError,
        ExportError as ExportError,
        ForgeDistError as ForgeDistError,
        LaunchError as LaunchError,
        MeetingError as MeetingError,
        ModelError as ModelError,
        StallError as StallError,
        StrategyError as StrategyError,
        WorkerError as WorkerError,
    )
    from forge_dist._files import (
        atomic_directory as atomic_directory,
        check_guards as check_guards,
        file_damage as file_damage,
        file_hash as file_hash,
        guarded as guarded,
        unreadable as unreadable,
        write_bytes_atomically as write_bytes_atomically,
        write_text_atomically as write_text_atomically,
    )
    from forge_dist._settings import (
        CheckpointSettings as CheckpointSettings,
        LaunchSettings as LaunchSettings,
        ModelSettings as ModelSettings,
        StrategySettings as StrategySettings,
    )
    from forge_dist._strategy_table import StrategySpec as StrategySpec
    from forge_dist._temporary import temporary_folder as temporary_folder
    from forge_dist.adapters._base_model import AdapterBase as AdapterBase, adapter_base as adapter_base
    from forge_dist.adapters._load_trained import load_trained as load_trained
    from forge_dist.adapters._merge import Merged as Merged, merge_adapter as merge_adapter
    from forge_dist.checkpoints._checkpoints import Checkpoint as Checkpoint, Checkpoints as Checkpoints
    from forge_dist.checkpoints._storage import ForgeReader as ForgeReader, ForgeWriter as ForgeWriter
    from forge_dist.environment._topology import Topology as Topology, topology as topology
    from forge_dist.exporting._export import export_model as export_model
    from forge_dist.exporting._token_rows import write_with_token_rows as write_with_token_rows
    from forge_dist.gguf._check import GGUFCheck as GGUFCheck, check_gguf as check_gguf
    from forge_dist.gguf._export import (
        export_gguf as export_gguf,
        refuse_gguf as refuse_gguf,
        require_gguf as require_gguf,
        rounded_weights as rounded_weights,
    )
    from forge_dist.gguf._types import gguf_rounded as gguf_rounded, gguf_type as gguf_type
    from forge_dist.launching._launch import launch as launch
    from forge_dist.loading._config_changes import unaligned_experts as unaligned_experts
    from forge_dist.loading._divisible import check_divisible as check_divisible
    from forge_dist.loading._draft import draft_model as draft_model
    from forge_dist.loading._dtype import base_dtype as base_dtype, weight_bytes as weight_bytes
    from forge_dist.loading._hub import check_hub_name as check_hub_name
    from forge_dist.loading._identity import ModelIdentities as ModelIdentities, model_identity as model_identity
    from forge_dist.loading._load import load_model as load_model
    from forge_dist.loading._modalities import (
        is_multimodal as is_multimodal,
        media_parts as media_parts,
        passed_over as passed_over,
    )
    from forge_dist.loading._model_path import (
        Classifier as Classifier,
        check_model_path as check_model_path,
        has_no_weights as has_no_weights,
    )
    from forge_dist.loading._outline import check_model as check_model, outline_model as outline_model
    from forge_dist.loading._positions import max_positions as max_positions, position_table as position_table
    from forge_dist.loading._request import LoadRequest as LoadRequest
    from forge_dist.loading._task import (
        asks_before_pooling as asks_before_pooling,
        directory_task as directory_task,
        has_modalities as has_modalities,
        hidden_size as hidden_size,
        model_pooling as model_pooling,
        model_prompts as model_prompts,
    )
    from forge_dist.ranks._failure_report import (
        follows_from_peer as follows_from_peer,
        same_signal_seconds as same_signal_seconds,
        signal_that_came as signal_that_came,
        worker_report as worker_report,
    )
    from forge_dist.ranks._ranks import Ranks as Ranks, join as join
    from forge_dist.strategies._choose import make_strategy as make_strategy
    from forge_dist.strategies._parallel_dims import ParallelDims as ParallelDims
    from forge_dist.strategies._strategy import Strategy as Strategy
    from forge_dist.strategies._torch import TorchStrategy as TorchStrategy
    from forge_dist.verifying._check import check_export as check_export
    from forge_dist.verifying._result import ExportCheck as ExportCheck
    from forge_dist.watching._beats import beat as beat, doing as doing
    from forge_dist.watching._under_guard import signal_answered as signal_answered

__version__ = "0.4.0"

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_errors": "CheckpointError ExportError ForgeDistError LaunchError MeetingError ModelError StallError StrategyError "
    "WorkerError",
    "_files": "atomic_directory check_guards file_damage file_hash guarded unreadable write_bytes_atomically "
    "write_text_atomically",
    "_settings": "CheckpointSettings LaunchSettings ModelSettings StrategySettings",
    "_strategy_table": "StrategySpec",
    "_temporary": "temporary_folder",
    "adapters._base_model": "AdapterBase adapter_base",
    "adapters._load_trained": "load_trained",
    "adapters._merge": "Merged merge_adapter",
    "checkpoints._checkpoints": "Checkpoint Checkpoints",
    "checkpoints._storage": "ForgeReader ForgeWriter",
    "environment._topology": "Topology topology",
    "exporting._export": "export_model",
    "exporting._token_rows": "write_with_token_rows",
    "gguf._check": "GGUFCheck check_gguf",
    "gguf._export": "export_gguf refuse_gguf require_gguf rounded_weights",
    "gguf._types": "gguf_rounded gguf_type",
    "launching._launch": "launch",
    "loading._divisible": "check_divisible",
    "loading._draft": "draft_model",
    "loading._dtype": "base_dtype weight_bytes",
    "loading._config_changes": "unaligned_experts",
    "loading._hub": "check_hub_name",
    "loading._identity": "ModelIdentities model_identity",
    "loading._load": "load_model",
    "loading._modalities": "is_multimodal media_parts passed_over",
    "loading._model_path": "Classifier check_model_path has_no_weights",
    "loading._outline": "check_model outline_model",
    "loading._positions": "max_positions position_table",
    "loading._request": "LoadRequest",
    "loading._task": "asks_before_pooling directory_task has_modalities hidden_size model_pooling model_prompts",
    "ranks._failure_report": "follows_from_peer same_signal_seconds signal_that_came worker_report",
    "ranks._ranks": "Ranks join",
    "strategies._choose": "make_strategy",
    "strategies._parallel_dims": "ParallelDims",
    "strategies._strategy": "Strategy",
    "strategies._torch": "TorchStrategy",
    "verifying._check": "check_export",
    "verifying._result": "ExportCheck",
    "watching._beats": "beat doing",
    "watching._under_guard": "signal_answered",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name from its module, once."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
