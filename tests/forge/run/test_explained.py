"""What a run without memory left is told to set."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge import RunExitError
from forge.run._explained import explained, out_of_memory
from forge.run._run_directory import NoDirectory
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


def test_an_exit_is_an_error_before_the_ranks_part(tmp_path: Path) -> None:
    """A rank that ends by `sys.exit(0)` would part as one that has finished, and wait for the others, who wait for it."""
    ranks: Any = SimpleNamespace(is_first=False)
    said = r"sys\.exit\(0\) at .*test_explained\.py:\d+, and is not finished"
    with pytest.raises(RunExitError, match=said) as caught, explained(None, NoDirectory(tmp_path), ranks):
        sys.exit(0)
    told = ranks.explain(caught.value.__cause__)
    assert (type(told), str(told)) == (RunExitError, str(caught.value))  # the other ranks say the same
