"""Marks and tokens of media in prompts and texts without any: of a model that takes media they are said, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge
import forge_data
from forge._progress import Reporter
from forge.settings._settings import resolve
from forge.verbs._registry import task_of

from . import pictures
from .conftest import write_model, write_rows

pytestmark = pytest.mark.usefixtures("unchecked_exports")

ROWS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"prompt": "the plum", "answer": "<image>"}, {"prompt": "the {} pear"}],
    "sdft": [{"prompt": "the {} pear", "demonstration": "red"}],
    "embed": [{"anchor": "the plum", "positive": "the {} pear"}, {"anchor": "the fig", "positive": "the pear"}],
    "classify": [{"text": "the {} pear", "label": "a"}, {"text": "the plum", "label": "b"}],
}
MORE: dict[str, dict[str, Any]] = {"grpo": {"reward": ("builtins:dict",)}, "classify": {"labels": ("a", "b")}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images."""
    return pictures.save("gemma3", tmp_path_factory.mktemp("gemma3"))


def checked(verb: str, model: Path, mark: str, tmp_path: Path) -> list[str]:
    """What a verb says of rows with a mark."""
    rows = [{name: value.format(mark) for name, value in row.items()} for row in ROWS[verb]]
    tmp_path.mkdir(exist_ok=True)
    data, task, lines = write_rows(tmp_path / "rows.jsonl", rows), task_of(verb), list[str]()
    given = {"model_path": str(model), "data_path": str(data), "ckpt_output_dir": str(tmp_path / "run"), **MORE.get(verb, {})}
    s = resolve(task.settings, ("argument", given))
    report = Reporter(lambda text, **_: lines.append(text), quiet=True)
    tokenizer = forge_data.load_tokenizer(model)
    store = task.prepare(s, str(data), tokenizer, tmp_path / "store", report)
    task.check_data(s, report, store, None)
    return lines


@pytest.mark.parametrize("verb", ROWS)
def test_a_mark_is_said_and_a_token_refused(verb: str, model: Path, tmp_path: Path) -> None:
    """Once, with file and row; the columns beside a prompt are no part of it."""
    (line,) = checked(verb, model, "<image>", tmp_path)
    number = 2 if verb == "grpo" else 1
    assert line.startswith(f"WARNING: rows.jsonl:{number}: has <image> in its text and no image in the row")
    for token in ("<img>", "<boi>"):  # of the image, and what the chat template writes for one
        with pytest.raises(forge_data.DataError, match=rf"rows.jsonl:{number}: .*'{token}' in its text, which stands for"):
            checked(verb, model, token, tmp_path / token[1:-1])


def test_a_model_of_text_reads_letters(tmp_path: Path) -> None:
    """Nothing stands for an image there, and nothing is said."""
    assert checked("grpo", write_model(tmp_path / "model"), "<image>", tmp_path) == []


def test_a_run_of_prompts_says_it(model: Path, tmp_path: Path) -> None:
    """Before it samples, and ends with nothing written where a token is in a text."""
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "the <img> plum"}] * 4)
    (file := tmp_path / "rewards.py").write_text("def zero(completions, **_):\n    return [0.0] * len(completions)\n")
    given = {"model_path": model, "data_path": data, "ckpt_output_dir": tmp_path / "run", "max_steps": 1}
    with pytest.raises(forge.data.DataError, match="take it out of the text"):
        forge.grpo(**given, reward=f"{file}:zero")
    assert not list((tmp_path / "run").glob("hf_format/*"))
