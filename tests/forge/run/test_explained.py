"""What a run without memory left is told to set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge.run._explained import out_of_memory
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

SHORT: dict[str, Any] = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "device": "cpu", "optimizer": "muon"}


@pytest.mark.parametrize(
    ("verb", "more", "offered"),
    [
        ("sft", {"adapter": "lora"}, "strategy=fsdp2 on several ranks or a lower max_seq_len"),
        ("sft", {"adapter": "osft"}, "adapter=lora, strategy=fsdp2 on several ranks or a lower max_seq_len"),
        ("osft", {}, "strategy=fsdp2 on several ranks or a lower max_seq_len"),
        ("pretrain", {"adapter": "lora"}, "strategy=fsdp2 on several ranks or a lower block_size"),
        ("sdft", {"adapter": "lora"}, "strategy=fsdp2 on several ranks or a lower max_new_tokens"),
    ],
)
def test_what_is_left_to_set(verb: str, more: dict[str, Any], offered: str, tmp_path: Path) -> None:
    """Few settings are named too (it was an IndexError), and none that the verb has not."""
    s: Any = resolve(task_of(verb).settings, ("argument", {**SHORT, **more, "activation_checkpointing": True}))
    assert f". Set {offered}; --dry-run" in str(out_of_memory(MemoryError(), s, tmp_path))
