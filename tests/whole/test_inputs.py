"""The same command for a finished run: what it read, and which of that is another by now."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forge
from forge.saving import _inputs

from .conftest import conversations, write_rows
from .verbs import run_verb, settings_of

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def own(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows in a file and in a directory, a preprocess, and a finished run of them."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(model_dir, folder / "model")
    (folder / "rows").mkdir()
    write_rows(folder / "rows" / "a.jsonl", conversations(8))
    write_rows(folder / "b.jsonl", conversations(4))
    (folder / "own_preprocess.py").write_text("def same(row):\n    return row\n")
    sys.path.append(str(folder))
    forge.sft(**given(folder))
    sys.path.remove(str(folder))
    return folder


def given(folder: Path) -> dict[str, Any]:
    """Settings of the run of one step."""
    return {
        "model_path": str(folder / "model"),
        "data_path": [str(folder / "rows"), str(folder / "b.jsonl")],
        "preprocess": "own_preprocess:same",
        "effective_batch_size": 6,
        "max_tokens_per_gpu": 256,
        "max_steps": 1,
        "ckpt_output_dir": str(folder / "run"),
    }


@pytest.fixture
def copied(own: Path, tmp_path: Path) -> Path:
    """The same folder elsewhere, as if it had always been there: paths that the run recorded are those of the copy."""
    folder = tmp_path / "own"
    shutil.copytree(own, folder)
    for file in (*(folder / "run").glob("*.*"), *(folder / "run" / "data").glob("*/store.json")):
        if file.suffix in (".json", ".yaml"):
            file.write_text(file.read_text().replace(str(own), str(folder)))
    return folder


def warned(settings: dict[str, Any], capsys: pytest.CaptureFixture[str], verb: str = "sft") -> list[str]:
    """Warnings of the same command."""
    capsys.readouterr()
    getattr(forge, verb)(**settings)
    lines = capsys.readouterr().err.splitlines()
    assert any("finished already" in line for line in lines), lines
    return [line for line in lines if line.startswith("WARNING")]


def touched(path: Path) -> None:
    """Change the times of a file alone."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 3600 * 10**9))


def rewritten(path: Path, old: str, new: str) -> None:
    """Write another content with the former times."""
    was = path.stat()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def test_nothing_changed_but_times(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is a copy with other times: nothing is warned of, for all has the content that was read."""
    for path in ("rows/a.jsonl", "b.jsonl", "own_preprocess.py", "model/model.safetensors", "model/tokenizer.json"):
        touched(copied / path)
    (copied / "rows" / "README.md").write_text("no rows\n")
    (copied / "model" / "README.md").write_text("no model\n")
    assert warned(given(copied), capsys) == []


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("b.jsonl", "role", "rule"),
        ("rows/a.jsonl", "user", "User"),
        ("own_preprocess.py", "return row", "return dict(row)"),
        ("model/config.json", "true", "false"),
        ("model/tokenizer_config.json", "{", "{ "),
    ],
)
def test_another_content_under_the_former_time_is_named(
    path: str, old: str, new: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same length or not; the result is that of what was read."""
    rewritten(copied / path, old, new)
    (line,) = warned(given(copied), capsys)
    named = f"model_path {copied / 'model'}" if path.startswith("model") else str(copied / path)
    assert line.startswith(f"WARNING: {named} changed after this run had read it, and its result is of what was there")


def test_other_weights_and_other_files_are_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of the same size, a file that came to a directory, and both together in one line; what is gone is not judged."""
    model = AutoModelForCausalLM.from_pretrained(copied / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    model.save_pretrained(copied / "model")
    write_rows(copied / "rows" / "c.jsonl", conversations(2))
    (line,) = warned(given(copied), capsys)
    assert f"{copied / 'rows'} (other files) and model_path {copied / 'model'} changed after this run had read them" in line
    shutil.rmtree(copied / "rows")
    (line,) = warned(given(copied), capsys)
    assert "rows" not in line


def test_of_large_files_times_must_do(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a hash a file of the same length and another time was written to; one of another length changed."""
    file = copied / "run" / "inputs.json"
    known = json.loads(file.read_text())
    known["files"] = {name: [_inputs._stamp(Path(name)), None] for name in known["files"]}
    file.write_text(json.dumps(known))
    touched(copied / "b.jsonl")
    (line,) = warned(given(copied), capsys)
    assert line.startswith(f"WARNING: {copied / 'b.jsonl'} was written to after this run had read it")
    rewritten(copied / "b.jsonl", "user", "userr")
    assert "b.jsonl changed after" in warned(given(copied), capsys)[0]
    monkeypatch.setattr(_inputs, "_HASHED", 0)
    assert _inputs._recorded([str(copied / "b.jsonl")], 2**63)[str(copied / "b.jsonl")][1] is None
    assert _inputs._recorded([str(copied / "b.jsonl")], 0) == {str(copied / "b.jsonl"): (None, None)}


@pytest.mark.parametrize("record", [None, "{broken", '{"files": {"a": 3}, "places": {}, "models": {}, "adapter": {}}', "[1]"])
def test_a_run_of_an_earlier_version(record: str | None, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a record times of data and weights are compared with the run's, and weights by their digest; damaged alike."""
    if record is None:
        (copied / "run" / "inputs.json").unlink()
    else:
        (copied / "run" / "inputs.json").write_text(record)
    now = max(file.stat().st_mtime for file in (copied / "run").rglob("*.json"))
    for path in ("b.jsonl", "model/model.safetensors"):
        os.utime(copied / path, (now + 60, now + 60))
    (line,) = warned(given(copied), capsys)
    assert line.startswith(f"WARNING: {copied / 'b.jsonl'} was written to after this run had read it")


def test_a_resumed_run_has_read_what_is_there_then(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column that no token comes from changes the file and not the run: it is resumed, and the record is of that file."""
    settings = {**given(copied), "max_steps": 2, "keep_full_state": True, "lr_scheduler": "constant"}
    settings["ckpt_output_dir"] = str(copied / "other")
    forge.sft(**{**settings, "max_steps": 1})
    rewritten(copied / "b.jsonl", '{"messages"', '{"id": 1, "messages"')
    assert "b.jsonl changed" in warned({**settings, "max_steps": 1}, capsys)[0]
    forge.sft(**settings)
    assert warned(settings, capsys) == []


def test_another_adapter_is_named(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of the same shape under the same path; touched, or gone, it is not."""
    few = {"adapter": "lora", "learning_rate": 1e-2, "max_steps": 1}
    settings = settings_of("sft", model_dir, tmp_path) | few
    first = run_verb("sft", {**settings, "lora_r": 4, "ckpt_output_dir": str(tmp_path / "first")})
    adapter = tmp_path / "adapter"
    shutil.copytree(first["model_dir"], adapter)
    settings |= {"adapter_path": str(adapter), "ckpt_output_dir": str(tmp_path / "run")}
    second = forge.sft(**settings)
    touched(adapter / WEIGHTS)
    assert warned(settings, capsys) == []
    shutil.copy(second.model_dir / WEIGHTS, adapter)
    (line,) = warned(settings, capsys)
    assert line.startswith(f"WARNING: adapter_path {adapter} changed after this run had read it")
    shutil.rmtree(adapter)
    assert warned(settings, capsys) == []


def test_another_entry_of_a_file_of_data_sets_is_no_change(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dataset_info.json` is added to from one run to the next; what it says of this run's data set counts."""
    write_rows(tmp_path / "a.jsonl", conversations(4))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": "a.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps({"mine": entry}))
    settings = given(tmp_path) | {"model_path": str(model_dir), "data_path": f"{info}:mine", "effective_batch_size": 4}
    del settings["preprocess"]
    forge.sft(**settings)
    info.write_text(json.dumps({"mine": entry, "new": {"file_name": "b.jsonl"}}))
    assert not warned(settings, capsys)
    info.write_text(json.dumps({"mine": entry | {"tags": tags | {"observation_tag": "tool"}}}))
    (line,) = warned(settings, capsys)
    assert f"{info} changed" in line
