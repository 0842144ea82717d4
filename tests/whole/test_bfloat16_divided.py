"""A run in bfloat16 whose weights two ranks divide: gathered in bfloat16, with autocast only where a model needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import RUN, metrics, sft

pytestmark = pytest.mark.slow


def run(given: dict[str, Any], where: Path, world_size: int = 2, **more: Any) -> Path:
    """Run two steps, and return the run directory."""
    run_on_ranks(sft, world_size, {**given, **more, "ckpt_output_dir": str(where)}, joined=False)
    return where


@pytest.fixture
def given(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """What every run of this file is given."""
    rows = write_rows(tmp_path / "rows.jsonl", conversations(8))
    own = {"num_epochs": None, "max_steps": 2, "effective_batch_size": 4, "dtype": "bfloat16", "full_state_every_steps": 0}
    return {"model_path": str(model_dir), "data_path": str(rows), **RUN, **own}


def test_gathered_in_bfloat16(given: dict[str, Any], tmp_path: Path) -> None:
    """By default weights are gathered in the dtype of the run, which the log says; losses are near one process's."""
    single = metrics(run(given, tmp_path / "single", 1))
    divided = run(given, tmp_path / "divided", strategy="fsdp2")
    said = (divided / "log.txt").read_text()
    assert "gather_dtype: bfloat16: weights travel in the dtype of the computation, so nothing is cast" in said
    for mine, theirs in zip(metrics(divided), single, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=5e-2)


@pytest.mark.lane
def test_a_model_that_needs_autocast_gets_it(given: dict[str, Any], tmp_path: Path) -> None:
    """GPT keeps numbers in float32 that weights in bfloat16 cannot be multiplied by: autocast stays on, and the log says so."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["model_path"])
    config = transformers.OpenAIGPTConfig(vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "gpt")
    tokenizer.save_pretrained(tmp_path / "gpt")
    divided = run({**given, "model_path": str(tmp_path / "gpt")}, tmp_path / "divided", strategy="fsdp2")
    assert "this model computes with numbers in float32 too, which autocast brings" in (divided / "log.txt").read_text()
    assert len(metrics(divided)) == 2
