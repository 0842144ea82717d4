"""A token of an image in the text of a row without one, beside rows with images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import forge
import forge_data

from . import pictures
from .conftest import write_rows

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto"])
def test_a_token_of_an_image_in_a_text_without_the_lint(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error with row and field before a model is loaded; it was transformers', in a step."""
    monkeypatch.setattr("forge.run._run.load_with_attention", lambda *_, **__: pytest.fail("a model is loaded"))
    model = pictures.save("gemma3", tmp_path / "model")
    data = {"sft": pictures.rows, "dpo": pictures.pairs, "kto": pictures.rated}[verb](tmp_path, 6)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    said = next(rows[2][name] for name in ("messages", "chosen", "completion") if name in rows[2])
    said[-1]["content"] += " <img>"
    write_rows(data, rows)
    settings = {"model_path": str(model), "data_path": str(data), "ckpt_output_dir": tmp_path / "run", "lint": "off"}
    with pytest.raises(forge_data.DataError, match=r":3: field messages\[\d\] \(assistant\) has '<img>'") as caught:
        getattr(forge, verb)(**settings)
    assert caught.value.exit_status == 2
