"""Settings, data and a batch plan → a run as far as it is known before its model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs

import forge_accel
import forge_packing
from forge.tasks._task import Task
from forge.tasks.items._items import Items
from forge.tasks.items._media import MediaRows

SHARDED = ("fsdp2", "hsdp")
"""Strategies by PyTorch's `fully_shard`."""


@attrs.frozen(kw_only=True)
class Planned:
    """Run as far as it is known before its model is loaded."""

    task: Task
    settings: Any
    machine: forge_accel.Accelerator
    dtype: Any
    """torch dtype of the computation."""
    strategy: str
    """Name of the strategy on its ranks."""
    ranks: int
    attention: forge_accel.Attention
    packed: bool
    """Whether documents share a row, where no draft says so."""
    draft: Any
    """Small random model of the same configuration, probed; None where none can be made."""
    model_path: str
    new_tokens: tuple[int, ...]
    loading: Mapping[str, Any]
    """Further arguments of a load: the quantization."""
    tokenizer: Any
    train: Items
    held_out: Items | None
    plan: forge_packing.BatchPlan
    num_steps: int | None
    identity: Mapping[str, str]
    media: bool = False
    """Whether rows have images, which the parts beside the language compute on."""
    media_rows: MediaRows | None = None
    """How rows hold samples with images; None where that is known of the loaded model alone."""
    shown: bool = False
    """Whether `eval_prompts` have some."""

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Function that makes the context of the forwards."""
        return lambda: self.machine.autocast(self.dtype)

    @property
    def weights(self) -> Any:
        """Torch dtype of the weights that train."""
        return getattr(forge_accel, self.settings.device.weights)

    @property
    def frozen(self) -> bool:
        """Whether only an adapter is trained."""
        return self.settings.adapter.adapter not in ("none", "osft")

    @property
    def gathers(self) -> Any:
        """Torch dtype in which ranks gather weights to compute with; None where it is their own."""
        s = self.settings.strategy
        shared = (s.shard_size or self.ranks) if self.strategy == "hsdp" else self.ranks
        if self.strategy not in SHARDED or self.frozen or self.ranks == 1 or shared == s.tp_size or s.gather_dtype == "float32":
            return None
        return forge_accel.bfloat16 if forge_accel.bfloat16 == self.dtype or s.gather_dtype == "bfloat16" else None
