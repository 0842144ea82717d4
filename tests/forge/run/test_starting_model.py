"""Model of a run with new tokens, which has files of its own and links to the others."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forge.run._starting_model import BASE, starting_model
from forge.settings._settings import resolve
from forge.verbs._sft import SFT, SFTSettings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose layers lie in files without the embedding."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(tmp_path / "model", max_shard_size="8KB")
    vocabulary = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<s>", unk_token="<s>")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("how", ["moved", "copied without links"])
def test_it_is_made_again_of_the_model_where_that_is_now(how: str, model: Path, tmp_path: Path) -> None:
    """A run with steps goes on: with the same files, whether their links lead nowhere or are gone."""
    run = tmp_path / "run"
    run.mkdir()
    out: Any = SimpleNamespace(path=run, has_steps=True, place=lambda name: run / name)
    report: Any = SimpleNamespace(note=lambda _: None)

    def start(path: Path) -> dict[str, bytes]:
        s = resolve(SFTSettings, ("argument", {"model_path": str(path), "data_path": "x", "ckpt_output_dir": str(run)}))
        starting_model(SFT(), s.with_value("model", "add_tokens", ("<tool>",)), out, report)
        return {file.name: file.read_bytes() for file in (run / BASE).iterdir()}

    first = start(model)
    links = [file for file in (run / BASE).iterdir() if file.is_symlink()]
    assert links
    if how == "moved":
        shutil.move(model, tmp_path / "elsewhere")
    else:
        for link in links:
            link.unlink()
    assert start(tmp_path / "elsewhere" if how == "moved" else model) == first
