"""examples/osft_two_tasks: its rows, how it measures, and the whole page on a model small enough for a test."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from .repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

MODULES = ("run", "tasks", "measure", "model", "questions")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules, imported as its script imports them."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "osft_two_tasks"), *sys.path])
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import run

    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_tasks_are_in_each_others_way(example: ModuleType) -> None:
    """The same words would be answered otherwise by the other rule, always; rows follow from the seed alone."""
    for task, other in ("AB", "BA"):
        rows = example.rows(task, 200, seed=0)
        assert rows == example.rows(task, 200, seed=0)
        assert rows[:50] != example.rows(task, 50, seed=1)
        for row in rows:
            words = re.fullmatch(r"Words: (.*)\. (Second|Longest):", row["prompt"]).group(1).split(", ")
            rules = {"A": words[1], "B": max(words, key=len)}
            assert row["completion"] == f" {rules[task]}" != f" {rules[other]}"


def test_measuring_is_what_generating_says(example: ModuleType, model_dir: Path) -> None:
    """A row counts as right exactly when the model, left to itself, writes its completion."""
    import measure

    model, tokenizer = measure.load(model_dir)
    prompt = "Words: apple, pear. Second:"
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    said = model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)[
        0, ids["input_ids"].shape[1] :
    ]
    completion_text = tokenizer.decode(said)
    if tokenizer(completion_text, add_special_tokens=False)["input_ids"] != said.tolist():
        pytest.skip("what the model wrote is not how its tokenizer would write it")
    found = measure.measure(
        model, tokenizer, [{"prompt": prompt, "completion": completion_text}, {"prompt": prompt, "completion": " pear"}]
    )
    assert found.right == 0.5
    assert found.loss > 0


@pytest.mark.lane
@pytest.mark.slow
def test_the_page_runs(
    example: ModuleType, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script prints its table; both second runs start from the first one's directory and can be inspected."""
    from forge.reports.osft._inspect import inspect

    monkeypatch.setattr(example, "HELD_OUT", 4)
    monkeypatch.setattr(sys, "argv", ["run.py", "--model", str(model_dir), "--runs", str(tmp_path / "runs"), "--steps", "2"])
    example.main()
    said = capsys.readouterr().out
    lines = said[said.index("trained on") :].splitlines()
    assert [line[:20].strip() for line in lines[1:5]] == ["before", "A", "A, then B (full)", "A, then B (osft)"]
    for name in ("B-full", "B-osft"):
        settings = yaml.safe_load((tmp_path / "runs" / name / "config.yaml").read_text())
        assert settings["model_path"] == str(tmp_path / "runs" / "A-full" / "hf_format" / "samples_32")
    assert "0 of" in inspect(tmp_path / "runs" / "B-osft").splitlines()[-2]
