"""A run in bfloat16 whose weights two ranks divide: gathered in bfloat16, with autocast only where a model needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forge
from forge_accel.attention import _documents

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import RUN, metrics, sft

pytestmark = pytest.mark.slow


def long_conversations(number: int) -> list[dict[str, Any]]:
    """Samples of more than 128 tokens, beside which shorter ones are attended in float32."""
    question = [{"role": "user", "content": "how often?"}]
    return [{"messages": [*question, {"role": "assistant", "content": "very " * (110 + n) + "often."}]} for n in range(number)]


def run(given: dict[str, Any], where: Path, world_size: int = 2, **more: Any) -> Path:
    """Run two steps, and return the run directory."""
    run_on_ranks(sft, world_size, {**given, **more, "ckpt_output_dir": str(where)}, joined=False)
    return where


@pytest.fixture
def given(model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    """What every run of this file is given."""
    rows = write_rows(tmp_path / "rows.jsonl", conversations(6) + long_conversations(2))
    own = {
        "max_tokens_per_gpu": 400,
        "num_epochs": None,
        "max_steps": 2,
        "effective_batch_size": 4,
        "dtype": "bfloat16",
        "full_state_every_steps": 0,
    }
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


def test_pairs_that_share_long_prompts(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several samples of a row, with prompts of more than 128 tokens in it once, have float32's losses and gradients."""
    attended, opaque = [], _documents.opaque_attention

    def noted(*states: Any, **how: Any) -> torch.Tensor:
        attended.append((states[0].dtype, len(states[3]) - 1, int(states[3].diff().max()), states[4] is not None))
        return opaque(*states, **how)

    monkeypatch.setattr(_documents, "opaque_attention", noted)
    texts = [("very " * (110 + n) + "red?", "yes " * (2 + n), "no") for n in range(8)]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    rows = [
        {name: [{"role": role, "content": text}] for (name, role), text in zip(roles.items(), each, strict=True)}
        for each in texts
    ]
    more = {"data_path": str(write_rows(tmp_path / "pairs.jsonl", rows)), "learning_rate": 1e-3, "max_tokens_per_gpu": 900}
    found = []
    for dtype in ("float32", "bfloat16"):
        forge.dpo(**{**given, **more, "dtype": dtype, "ckpt_output_dir": str(tmp_path / dtype)})
        found.append(metrics(tmp_path / dtype))
    assert any(samples > 1 and longest > 128 and shared for _, samples, longest, shared in attended)
    for mine, theirs in zip(*found, strict=True):
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
