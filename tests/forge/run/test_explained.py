"""What a run without memory left is told to set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import forge_algos
from forge.run._explained import out_of_memory
from forge.verbs._osft import OSFTAdapterSettings


@pytest.mark.parametrize(
    ("adapter", "offered"),
    [
        (forge_algos.AdapterSettings(adapter="lora"), False),
        (forge_algos.AdapterSettings(adapter="osft"), True),
        (OSFTAdapterSettings(), False),
    ],
    ids=["lora", "sft with osft", "osft"],
)
def test_what_is_left_to_set(adapter: Any, offered: bool, tmp_path: Any) -> None:
    """Where few settings are left, those are named (it was an IndexError); no adapter is offered that the verb has not."""
    s: Any = SimpleNamespace(
        device=SimpleNamespace(device="cpu"),
        plan=SimpleNamespace(max_tokens_per_gpu=512),
        strategy=SimpleNamespace(activation_checkpointing="none"),
        optimizer=forge_algos.OptimizerSettings(optimizer="muon"),
        adapter=adapter,
    )
    found = str(out_of_memory(MemoryError(), s, tmp_path))
    assert ("adapter=lora" in found) == offered
    s.strategy.activation_checkpointing = "full"
    found = str(out_of_memory(MemoryError(), s, tmp_path))
    assert ("adapter=lora" in found) == offered
    assert "a lower max_seq_len; --dry-run" in found
