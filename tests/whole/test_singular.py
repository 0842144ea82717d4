"""What a person reads is "1 row", not "1 rows"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from forge.cli._app import main

from .conftest import conversations, write_rows

if TYPE_CHECKING:
    from pathlib import Path

_ONE_OF_MANY = re.compile(r"(?<![\d,.])1 (?:[a-z]+ )?[a-z-]+(?<![aeious])s\b")


@pytest.mark.slow
def test_a_run_of_one_row_is_told_in_the_singular(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log, result and report of a run with one row, one step, one prompt and one held-out row."""
    rows, run = conversations(2), tmp_path / "run"
    data, held_out = write_rows(tmp_path / "data.jsonl", rows[:1]), write_rows(tmp_path / "held_out.jsonl", rows[1:])
    words = f"sft --model-path {model_dir} --data-path {data} --eval-data-path {held_out} --ckpt-output-dir {run} --max-steps 1"
    assert main([*words.split(), "--effective-batch-size", "1"]) == 0
    said = capsys.readouterr()
    assert main(["data", "stats", str(run / "data" / "train")]) == 0
    assert main(["plan", str(run), "--step", "1", "--draw", str(tmp_path / "plan.html")]) == 0
    counts = capsys.readouterr().out
    texts = [said.out, said.err, counts]
    for page in (run / "report.html", tmp_path / "plan.html"):
        body = re.sub(r"(?s)<(script|style).*?</\1>", " ", page.read_text())
        texts.append(" ".join(re.sub(r"<[^>]*>", "|", body).split()))
    assert all("1 row" in text or "1 sample" in text for text in texts[1:])
    assert [found.group() for text in texts for found in _ONE_OF_MANY.finditer(text)] == []
