"""The notebook: its cells run in order, and it is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .repository import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_outputs() -> None:
    """Format 4, and nothing in it of the machine on which somebody ran it."""
    assert NOTEBOOK["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in NOTEBOOK["cells"] if "outputs" in cell)


@pytest.mark.slow
def test_its_cells_run(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rows to an export that was compared, without a warning, on a model small enough for a test."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert 'model_path = "HuggingFaceTB/' in CELLS[0]
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"cell {number}", "exec"), names)
        if number == 0:
            names["model_path"] = str(model_dir)
    assert len(names["losses"]) == 16
    assert names["result"].eval_loss_after < names["result"].eval_loss_before
    assert (names["exported"] / "README.md").is_file()
    assert "WARNING" not in (names["result"].output_dir / "log.txt").read_text(encoding="utf-8")
