"""Ratchet by counting: how often a run does at its start what one time would do. Fewer are better."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from transformers import PreTrainedTokenizerBase

import forge
import forge_dist

if TYPE_CHECKING:
    from pathlib import Path

LOADS = 2
"""Loads of a tokenizer in a run: one that reads the rows, which may change its backend, and one that is exported."""
DRAFTS = 2
"""Small random models that a run with a memory plan makes: before its rows are read, and before its first step."""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Get the folder of each tokenizer that is loaded."""
    load: Any = PreTrainedTokenizerBase.from_pretrained
    found: list[str] = []

    def from_pretrained(kind: Any, path: str, *given: Any, **more: Any) -> Any:
        found.append(str(path))
        return load.__func__(kind, path, *given, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(from_pretrained))
    return found


def run(model: Path, chats: Path, out: Path, **more: Any) -> forge.RunResult:
    """One step on a few rows."""
    more = {"learning_rate": 1e-3, "effective_batch_size": 4, "max_steps": 1} | more
    return forge.sft(model_path=model, data_path=chats, ckpt_output_dir=out, **more)


def test_the_tokenizer_is_loaded_twice(model_dir: Path, chats: Path, tmp_path: Path, loads: list[str]) -> None:
    """From the model's directory alone, with held-out rows too; what changed there between two runs is read anew."""
    model = shutil.copytree(model_dir, tmp_path / "model")
    run(model, chats, tmp_path / "first", validation_split=0.2)
    assert loads == [str(model)] * LOADS
    file = model / "chat_template.jinja"
    file.write_text(file.read_text() + "{# another #}")
    result = run(model, chats, tmp_path / "second")
    assert loads == [str(model)] * (2 * LOADS)
    assert (result.model_dir / "chat_template.jinja").read_text() == file.read_text()


def test_the_small_model_of_the_memory_plan_is_the_one_that_was_tried(
    model_dir: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made and probed before the rows are read, and the plan is made with it."""
    monkeypatch.setattr("forge.run._memory._SMALL", 0)
    make, made = forge_dist.draft_model, []

    def draft_model(*given: Any, **more: Any) -> Any:
        made.append(given)
        return make(*given, **more)

    monkeypatch.setattr(forge_dist, "draft_model", draft_model)
    run(model_dir, chats, tmp_path / "run")
    assert len(made) == DRAFTS
    memory = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert memory["phases"]
