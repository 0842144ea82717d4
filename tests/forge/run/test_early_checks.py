"""What a small random model of a configuration is asked before a row is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forge_accel
import forge_algos
from forge.run._early_checks import _check_draft


def test_the_ratio_of_an_adapter_is_none_of_the_draft() -> None:
    """The draft carries no adapter: `loraplus_lr_ratio` is looked at once the model has its own."""
    pytest.importorskip("schedulefree")
    optimizer = forge_algos.OptimizerSettings(optimizer="schedule_free", lr_scheduler="constant", loraplus_lr_ratio=8.0)
    s: Any = SimpleNamespace(optimizer=optimizer, moe=forge_algos.MoESettings(), origins={"optimizer": "argument"})
    _check_draft(s, forge_accel.accelerator("cpu"), torch.nn.Linear(2, 2))
