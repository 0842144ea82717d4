"""The same command for a finished run: what it read, and which of that is another by now."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import forge
from forge._progress import Reporter
from forge.saving import _inputs
from forge.saving._inputs import Inputs
from forge.settings._settings import resolve

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


def test_rows_that_would_be_refused_do_not_hide_that_the_run_is_finished(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever became of its first row, of its model, the same command has the run's result, and says what changed."""
    write_rows(copied / "rows" / "a.jsonl", [{"words": 1}])
    (line,) = warned(given(copied), capsys)
    assert f"{copied / 'rows' / 'a.jsonl'} changed" in line
    (copied / "model" / "model.safetensors").unlink()
    (line,) = warned(given(copied), capsys)
    assert "a.jsonl" in line
    with pytest.raises(forge.ERRORS, match=r"model\.safetensors|no weights|weights"):
        forge.sft(**given(copied) | {"learning_rate": 1e-3})


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


def test_of_large_files_times_must_do(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a hash a file of the same length and another time was written to; one of another length changed."""
    file = copied / "run" / "inputs.json"
    known = json.loads(file.read_text())
    known["files"] = {name: [_inputs.stamp_of(Path(name)), None] for name in known["files"]}
    file.write_text(json.dumps(known))
    touched(copied / "b.jsonl")
    (line,) = warned(given(copied), capsys)
    assert line.startswith(f"WARNING: {copied / 'b.jsonl'} was written to after this run had read it")
    rewritten(copied / "b.jsonl", "user", "userr")
    assert "b.jsonl changed after" in warned(given(copied), capsys)[0]


def record_of(copied: Path, root: Path, *, since: int = 2**63, former: Path | None = None) -> Inputs:
    """The record of the run's settings, written to `root`."""
    task = forge.sft.task
    s = resolve(task.settings, ("given", given(copied)))
    if not (store := root / "data" / "train" / "store.json").exists():
        store.parent.mkdir(parents=True)
        shutil.copy(copied / "run" / "data" / "train" / "store.json", store)
    return Inputs(task, s, root, Reporter(lambda _: None, quiet=True), since=since, former=former)


def files_of(root: Path) -> dict[str, Any]:
    """What the record says of the data files: name → [stamp, SHA-256]."""
    return {Path(name).name: entry for name, entry in json.loads((root / "inputs.json").read_text())["files"].items()}


def test_files_are_hashed_while_the_run_trains(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is made before a file is hashed; the record of the finished run has the hashes all the same."""
    run, began = tmp_path / "run", []

    def sha256(self: Inputs, path: Path) -> str | None:
        while not ((run / "metrics.jsonl").exists() and '"loss"' in (run / "metrics.jsonl").read_text()):
            assert time.monotonic() < end
            time.sleep(0.01)
        began.append(path.name)
        return own(self, path)

    own, end = Inputs._sha256, time.monotonic() + 60
    monkeypatch.setattr(Inputs, "_sha256", sha256)
    forge.sft(**given(copied) | {"ckpt_output_dir": str(run)})
    assert {"a.jsonl", "b.jsonl", "tokenizer.json"} <= set(began)
    want = hashlib.sha256((copied / "b.jsonl").read_bytes()).hexdigest()
    assert files_of(run)["b.jsonl"] == [_inputs.stamp_of(copied / "b.jsonl"), want]


def test_what_is_known_is_not_hashed_again(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has the hashes of its record where the stamp is the same; another file is hashed."""
    root, hashed = tmp_path / "new", []
    record_of(copied, copied / "run").complete(copied / "run")
    own = Inputs._sha256
    monkeypatch.setattr(Inputs, "_sha256", lambda self, path: hashed.append(path.name) or own(self, path))
    record_of(copied, root, former=copied / "run").complete(root)
    assert hashed == []
    assert files_of(root) == files_of(copied / "run")
    rewritten(copied / "b.jsonl", "role", "rule")
    record_of(copied, root, former=copied / "run").complete(root)
    assert hashed == ["b.jsonl"]
    assert files_of(root)["b.jsonl"][1] == hashlib.sha256((copied / "b.jsonl").read_bytes()).hexdigest()
    (copied / "run" / "inputs.json").write_text('{"files": {"a": 3}, "models": {}}')
    record_of(copied, root, former=copied / "run").complete(root)
    assert {"a.jsonl", "b.jsonl", "tokenizer.json"} <= set(hashed)


def test_a_file_that_changes_while_it_is_hashed(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded of it, nor of one that was written to since the rows were read; the others are."""
    own = Inputs._sha256

    def sha256(self: Inputs, path: Path) -> str | None:
        found = own(self, path)
        if path.name == "b.jsonl":
            rewritten(path, "role", "rule")
        return found

    monkeypatch.setattr(Inputs, "_sha256", sha256)
    record_of(copied, tmp_path).complete(tmp_path)
    assert files_of(tmp_path)["b.jsonl"] == [None, None]
    assert files_of(tmp_path)["a.jsonl"][1] is not None
    record_of(copied, tmp_path, since=0).complete(tmp_path)
    assert list(files_of(tmp_path).values()) == [[None, None]] * 2


def test_a_run_that_ends_before_its_files_are_hashed(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record has size and times, from which it goes on; hashing ends with the run."""
    monkeypatch.setattr(_inputs, "_HASHED", 0)
    record_of(copied, tmp_path).complete(tmp_path)
    stamps = {
        name: [_inputs.stamp_of(copied / path), None] for name, path in (("a.jsonl", "rows/a.jsonl"), ("b.jsonl", "b.jsonl"))
    }
    assert files_of(tmp_path) == stamps
    monkeypatch.undo()
    monkeypatch.setattr(Inputs, "_sha256", lambda self, _: self._stopping.wait(60) and None)
    stopped = record_of(copied, tmp_path)
    stopped.stop()
    assert stopped._thread is not None
    stopped._thread.join(30)
    assert not stopped._thread.is_alive()
    assert files_of(tmp_path) == stamps
    monkeypatch.undo()
    record_of(copied, copied / "run", former=tmp_path).complete(copied / "run")
    assert warned(given(copied), capsys) == []


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
