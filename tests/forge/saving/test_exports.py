"""An export takes the place of another one whole, or not at all, wherever it is killed."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forge import RunDirectoryError
from forge._sealed import sealed
from forge.saving._damage import refuse_damaged_export
from forge.saving._exports import MARK, put_back, take_name
from forge.saving._hashes import FILE, FOLDER, damaged_files, hash_export, hashes_in_events, read_hashes, record_hashes
from forge.saving._mend import mend_exports


def export(folder: Path, content: str) -> Path:
    """A directory of two files."""
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_text(content)
    (folder / "deep" / "config.json").write_text(content * 2)
    return folder


def best(run: Path, step: int) -> None:
    """The best export of a step, with its mark and its hashes."""
    hashes = hash_export(export(run / FOLDER / "best", f"step {step}"))
    record_hashes(run, "best", hashes)
    (run / FOLDER / MARK).write_text(json.dumps({"step": step}))


class Killed(Exception):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("operation", range(1, 16))
def test_a_better_best_killed_anywhere(operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any of its file operations, and while that is undone, best and best.json are of one step and recorded."""
    best(tmp_path, 1)
    place = export(tmp_path / FOLDER / ".best.new.tmp", "step 2")
    hashes, mark = hash_export(place), tmp_path / FOLDER / MARK
    seen = 0

    def counted(original: Any) -> Any:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == operation:
                raise Killed
            return original(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "unlink"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        try:
            take_name(tmp_path, place, tmp_path / FOLDER / "best", hashes, lambda: mark.write_text(json.dumps({"step": 2})))
        except Killed:
            seen = 0
            with suppress(Killed):
                put_back(tmp_path)
    put_back(tmp_path)
    step = json.loads(mark.read_text())["step"]
    assert (tmp_path / FOLDER / "best" / "model.safetensors").read_text() == f"step {step}"
    assert damaged_files(tmp_path / FOLDER / "best", read_hashes(tmp_path)["best"]) == {}
    assert not [*tmp_path.rglob("*.replaced")]


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_put_back_is_not_taken_for_whole(recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A former best that was damaged while it was hidden is known as damaged, before and after the new one was recorded."""
    best(tmp_path, 1)
    was = read_hashes(tmp_path)["best"]
    place = export(tmp_path / FOLDER / ".best.new.tmp", "step 2")
    hashes = hash_export(place)

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, suppress(Killed):
        if not recorded:
            patched.setattr("forge.saving._exports.write_hashes", kill)
        take_name(tmp_path, place, tmp_path / FOLDER / "best", hashes, kill)
    former = tmp_path / FOLDER / ".best.replaced" / "deep" / "config.json"
    former.write_text(former.read_text().replace("1", "7"))
    put_back(tmp_path)
    assert read_hashes(tmp_path) == {"best": was}
    assert list(damaged_files(tmp_path / FOLDER / "best", was)) == ["deep/config.json"]


def test_of_what_nothing_was_recorded_nothing_is_vouched_for(tmp_path: Path) -> None:
    """An export without hashes that another one began to replace has none when it is put back."""
    place = export(tmp_path / FOLDER / ".samples_8.new.tmp", "again")
    export(tmp_path / FOLDER / "samples_8", "before")

    def kill() -> None:
        raise Killed

    with suppress(Killed):
        take_name(tmp_path, place, tmp_path / FOLDER / "samples_8", hash_export(place), kill)
    put_back(tmp_path)
    assert (tmp_path / FOLDER / "samples_8" / "model.safetensors").read_text() == "before"
    assert read_hashes(tmp_path) == {}


def test_exports_mend_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged file is taken from an export that has the same; what is left is named; a full disk is named, and no end."""
    for name, weights in (("samples_8", "one"), ("samples_16", "two")):
        directory = tmp_path / FOLDER / name
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text(weights)
        (directory / "tokenizer.json").write_text("words")
        record_hashes(tmp_path, name, hash_export(directory))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert mend_exports(tmp_path) == ([], [])
    (tmp_path / FOLDER / "samples_8" / "model.safetensors").write_text("onf")
    (tmp_path / FOLDER / "samples_8" / "tokenizer.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfile", full)
        mended, left = mend_exports(tmp_path)
    assert not mended
    assert any("No space left on device" in line for line in left)
    mended, left = mend_exports(tmp_path)
    assert mended == ["hf_format/samples_8/tokenizer.json: taken from hf_format/samples_16, for tokenizer.json is missing"]
    assert left == ["hf_format/samples_8: model.safetensors does not have the bytes that were written (another SHA-256)"]
    assert (tmp_path / FOLDER / "samples_8" / "tokenizer.json").read_text() == "words"
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_export_is_not_handed_on(how: str, tmp_path: Path) -> None:
    """Each file is compared with its recorded SHA-256; files that somebody added are nobody's concern."""
    directory = export(tmp_path / FOLDER / "samples_8", "some weights")
    record_hashes(tmp_path, "samples_8", hash_export(directory))
    (directory / "README.md").write_text("mine")
    refuse_damaged_export(tmp_path, directory)
    file = directory / "deep" / "config.json"
    file.unlink() if how == "gone" else file.write_text({"cut": "some", "flipped": "some weightssome weightt"}[how])
    with pytest.raises(RunDirectoryError, match=r"samples_8: is damaged: config\.json .* `forge repair"):
        refuse_damaged_export(tmp_path, directory)


def test_the_record_is_of_what_is_there(tmp_path: Path) -> None:
    """An export that was removed leaves the record with the next one; a damaged record is known from the events."""
    for name in ("samples_8", "samples_16"):
        record_hashes(tmp_path, name, hash_export(export(tmp_path / FOLDER / name, name)))
    (tmp_path / FOLDER / "samples_8").rename(tmp_path / "elsewhere")
    record_hashes(tmp_path, "samples_24", hash_export(export(tmp_path / FOLDER / "samples_24", "x")))
    assert sorted(read_hashes(tmp_path)) == ["samples_16", "samples_24"]
    record = tmp_path / FOLDER / FILE
    text = record.read_text()
    record.write_text(text.replace("samples_16", "samples_17"))
    with pytest.raises(ValueError, match="does not have the SHA-256 that it says it has"):
        read_hashes(tmp_path)
    event = {"event": "exported", "export": "samples_24", "files": read_files(text)}
    (tmp_path / "events.jsonl").write_bytes(b"\xff\n[]\n" + json.dumps(event).encode() + b'\n{"event": "expo')
    assert list(hashes_in_events(tmp_path)) == ["samples_24"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("samples_8", "../../../mine"),
        ("../samples_8", "x"),
        ("samples_8", "/mine"),
        ("..", "mine"),
        ("samples_8", "a\0b"),
        ("", "x"),
    ],
)
def test_a_record_leads_nowhere_else(name: str, file: str, tmp_path: Path) -> None:
    """In a run directory of somebody else a record cannot make a run read or write files outside of its exports."""
    export(tmp_path / "run" / FOLDER / "samples_8", "weights")
    files = {name: {file: (1, "0" * 64)}}
    (tmp_path / "run" / FOLDER / FILE).write_text(sealed(files))
    with pytest.raises(ValueError, match="is not what a run writes"):
        read_hashes(tmp_path / "run")
    event = {"event": "exported", "export": name, "files": files[name]}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert hashes_in_events(tmp_path / "run") == {}
    assert mend_exports(tmp_path / "run") == ([], [])


def read_files(text: str) -> dict[str, Any]:
    """The files of one export in a record."""
    return json.loads(text)["samples_24"]
