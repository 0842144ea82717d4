"""Data sets of one run, each in a format and with columns of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge
import forge_data
from forge.cli._app import main
from forge.clusters._words import as_words

from .conftest import conversations, write_rows

FEW: dict[str, Any] = {"effective_batch_size": 4, "max_tokens_per_gpu": 256, "lr_scheduler": "constant"}
KEEP = ["--keep-full-state"]
ASKED = {"question": "instruction", "answer": "output"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Conversations, and questions with their answers."""
    folder = tmp_path_factory.mktemp("rows")
    texts = [{"question": f"what colour has the fig {at}?", "answer": "red"} for at in range(8)]
    return {
        "chats": str(write_rows(folder / "chats.jsonl", conversations(8))),
        "texts": str(write_rows(folder / "texts.jsonl", texts)),
    }


def test_a_run_and_its_resume(
    model_dir: Path, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe names them, config.yaml repeats it, a run goes on with them; the same files in another format are refused."""
    (tmp_path / "brief.txt").write_text("Be brief.\n")
    learned = {"train_on": "last", "train_on_turn_end": "none", "system_prompt": "Be brief."}
    own = {
        files["chats"]: {"data_format": "messages", **learned, "system_prompt": f"file:{tmp_path / 'brief.txt'}"},
        files["texts"]: {"data_format": "axolotl:alpaca", "rename_columns": ASKED},
    }
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump({"data_path": own, "model_path": str(model_dir), "ckpt_output_dir": str(run), **FEW}))
    assert main(["sft", str(recipe), "--max-steps", "2", *KEEP]) == 0
    own[files["chats"]]["system_prompt"] = "Be brief."
    assert yaml.safe_load((run / "config.yaml").read_text())["data_path"] == own
    words = [f"{path}={json.dumps(each)}" for path, each in own.items()]
    assert main(["sft", str(recipe), "--data-path", *words, "--max-steps", "3", *KEEP]) == 0
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    store = forge_data.TokenStore.open(run / "data" / "train")
    tokenizer = forge_data.load_tokenizer(model_dir)
    parts = [
        forge_data.prepare(files["chats"], tokenizer, tmp_path / "chats", format="messages", **learned),
        forge_data.prepare(files["texts"], tokenizer, tmp_path / "texts", format="axolotl:alpaca", rename_columns=ASKED),
    ]
    assert [list(each.labels) for each in store] == [list(each.labels) for part in parts for each in part]
    assert "alpaca" in str(forge_data.stats(store))
    capsys.readouterr()
    for at, changed in [(1, {"data_format": "alpaca"}), (0, {"train_on": "assistant"})]:
        path = list(own)[at]
        words[at] = f"{path}={json.dumps(own[path] | changed)}"
        assert main(["sft", str(recipe), "--data-path", *words, "--max-steps", "4", *KEEP]) == 2
        assert "the data" in capsys.readouterr().err
        words[at] = f"{path}={json.dumps(own[path])}"


def test_a_file_twice(model_dir: Path, files: dict[str, str], tmp_path: Path) -> None:
    """A list in a recipe, or a path twice in a shell, reads a file in two ways; config.yaml repeats the list."""
    entries = [
        {"path": files["texts"], "rename_columns": ASKED},
        {"path": files["texts"], "rename_columns": ASKED, "data_format": "axolotl:alpaca", "random_rows": 3},
    ]
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump({"data_path": entries, "model_path": str(model_dir), "ckpt_output_dir": str(run), **FEW}))
    assert main(["sft", str(recipe), "--max-steps", "1", *KEEP]) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["data_path"] == entries
    assert f"{files['texts']}#1, {files['texts']}#2: read 11 rows, kept 11" in (run / "log.txt").read_text()
    words = as_words({"data_path": entries})
    assert main(["sft", str(recipe), *words, "--max-steps", "2", *KEEP]) == 0
    store = forge_data.TokenStore.open(run / "data" / "train")
    read = [store.source(at) for at in range(len(store))]
    assert read == [*(f"texts.jsonl#1:{row}" for row in range(1, 9)), *(f"texts.jsonl#2:{row}" for row in (3, 5, 7))]
    words[-1] = words[-1].replace('"random_rows": 3', '"random_rows": 2')
    assert main(["sft", str(recipe), *words, "--max-steps", "3", *KEEP]) == 2


def test_what_is_refused(model_dir: Path, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By data set and row, before anything is loaded, in flags; nothing is written."""
    given = ["--model-path", str(model_dir), "--ckpt-output-dir", str(tmp_path / "run"), "--max-steps", "1"]
    wrong = [
        ("sft", ['{"data_format": "messages"}'], "texts.jsonl:1 has the fields 'question', 'answer', but the format messages"),
        ("sft", ['{"format": "messages"}'], "has 'format', which is not known; did you mean 'data_format'?"),
        (
            "sft",
            ['{"data_format": "alpaca"}', "--data-format", "text"],
            "--data-format text has no effect: each entry of --data-path has one of its own",
        ),
        (
            "sft",
            ['{"train_on": "lest"}'],
            f"--data-path: of the entry {files['texts']} train_on must be one of assistant, last",
        ),
        (
            "grpo",
            ['{"data_format": "alpaca"}', "--reward", "exact_match"],
            'has {"data_format": "alpaca"} of its own, and rows of this',
        ),
    ]
    for verb, (own, *more), message in wrong:
        assert main([verb, "--data-path", f"{files['texts']}={own}", *given, *more]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(forge.SettingsError, match="data_path must give each path a number"):
        forge.sft(model_path=model_dir, data_path={files["texts"]: "alpaca"}, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
