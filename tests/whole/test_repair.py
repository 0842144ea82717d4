"""A finished run is finished only where it is whole; what was damaged is named, and made whole or said to be lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli import _repair
from forge.cli._app import main

from ..lanes import ci_keeps
from .starts import damaged

pytestmark = pytest.mark.slow

LAST = "hf_format/samples_24"
NOBODY = 65534


@pytest.fixture(scope="module")
def given(measured: dict[str, Any]) -> dict[str, Any]:
    """Four steps with an export after the second, and a best model of the first measurement."""
    return measured | {
        "num_epochs": 1,
    }


@pytest.fixture(scope="module")
def finished(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, with the full state of its last step."""
    return forge.sft(**given, keep_full_state=True, ckpt_output_dir=tmp_path_factory.mktemp("finished") / "run").output_dir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def content(run: Path) -> dict[str, bytes]:
    """Every file of the exports, and the result."""
    files = [*(run / "hf_format").rglob("*"), run / "result.json"]
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.is_file()}


@pytest.mark.parametrize(
    ("name", "how", "named", "source"),
    [
        (f"{LAST}/model.safetensors", "deleted", "samples_24/model.safetensors is missing", "full_state/step_4"),
        (f"{LAST}/model.safetensors", "bit flipped", "another SHA-256", "full_state/step_4"),
        (f"{LAST}/config.json", "deleted", "samples_24/config.json is missing", "taken from hf_format/"),
        ("hf_format/best/tokenizer.json", "truncated", r"best/tokenizer.json has \d+ bytes and should have", "hf_format/sampl"),
        ("result.json", "truncated", "result.json is not JSON", "written again from events.jsonl"),
        ("result.json", "bit flipped", "result.json", "written again from events.jsonl"),
        ("hf_format/hashes.json", "deleted", "hashes.json is missing", "written again from events.jsonl"),
        ("hf_format/hashes.json", "bit flipped", "hashes.json", "written again from events.jsonl"),
    ],
)
def test_what_was_damaged_is_named_and_made_whole(
    name: str, how: str, named: str, source: str, given: dict[str, Any], run: Path, finished: Path
) -> None:
    """The same command names the file, changes nothing, and finds the run finished once it is repaired."""
    if "full_state" in source:
        # Its twin would do as well.
        shutil.rmtree(run / "hf_format" / "best")
        (run / "hf_format" / "best.json").unlink()
    before = content(run)
    damaged(run / name, how, run)
    after = content(run)
    with pytest.raises(forge.RunDirectoryError, match=rf"its run is finished, and is damaged: .*{named}.*`forge repair {run}`"):
        forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    assert content(run) == after
    said = forge.repair(run)
    assert source in said
    assert said.endswith("is whole again.")
    assert content(run) == before
    assert forge.sft(**given, keep_full_state=True, ckpt_output_dir=run).model_dir == run / LAST
    assert forge.repair(run).endswith("has the SHA-256 that was recorded.")
    assert not [*run.rglob(".*")]


def test_all_exports_are_gone(given: dict[str, Any], run: Path, finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The last one is made again from the full state, from the full state and the store of the run."""
    shutil.rmtree(run / "hf_format")
    assert main(["sft", str(run / "config.yaml"), "--ckpt-output-dir", str(run)]) == 2
    assert "samples_24 is missing" in capfd.readouterr().err
    assert main(["repair", str(run)]) == 0
    assert "hf_format/samples_24: made again from full_state/step_4" in capfd.readouterr().out
    assert content(run)[f"{LAST}/model.safetensors"] == content(finished)[f"{LAST}/model.safetensors"]
    assert not [*run.rglob(".*")]


@pytest.mark.parametrize("what", ["file", "link"])
@pytest.mark.parametrize("name", ["samples_12", "samples_24"])
def test_something_else_in_the_place_of_an_export(name: str, what: str, given: dict[str, Any], run: Path) -> None:
    """Any export, not the last alone: it is named, nothing is written over what is there, and moved away it is made whole."""
    place = run / "hf_format" / name
    shutil.rmtree(place)
    place.write_text("mine") if what == "file" else place.symlink_to(run / "nothing")
    named = rf"{name} is a (file|link to nothing), and a directory was exported there; move it away first"
    with pytest.raises(forge.RunDirectoryError, match=named):
        forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    with pytest.raises(forge.RunDirectoryError, match=rf"is still damaged: .*{named}"):
        forge.repair(run)
    assert place.is_symlink() or place.read_text() == "mine"
    place.unlink()
    assert "whole" in forge.repair(run)


def test_two_repairs_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused while the first makes the last export again, and takes nothing from under it."""
    damaged(run / LAST / "model.safetensors", "bit flipped", run)
    shutil.rmtree(run / "hf_format" / "best")
    (run / "hf_format" / "best.json").unlink()
    train = _repair.train

    def meanwhile(*given: Any) -> Any:
        with pytest.raises(forge.RunDirectoryError, match="another run is writing to it now"):
            forge.repair(run)
        return train(*given)

    monkeypatch.setattr(_repair, "train", meanwhile)
    assert forge.repair(run).endswith("is whole again.")


def test_no_state_was_kept(given: dict[str, Any], run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What another export has the same of is taken from there; what is left is named with the command that trains it again."""
    shutil.rmtree(run / "full_state")
    damaged(run / LAST / "config.json", "truncated", run)
    damaged(run / LAST / "model.safetensors", "bit flipped", run)
    shutil.rmtree(run / "hf_format" / "best")
    (run / "hf_format" / "best.json").unlink()
    assert main(["sft", str(run / "config.yaml"), "--ckpt-output-dir", str(run)]) == 2
    assert "No full state was kept" in capfd.readouterr().err
    assert main(["repair", str(run)]) == 2
    printed = capfd.readouterr().err
    assert "Made whole: hf_format/samples_24/config.json: taken from hf_format/samples_12" in printed
    assert f"`forge sft {run}/config.yaml --ckpt-output-dir NEW`" in printed
    assert "config.json" not in printed.partition("Made whole")[0]


def linked_to_itself(entry: Path) -> None:
    """Put a link that leads to itself in the place of a file or folder."""
    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    entry.symlink_to(entry.name)


def a_directory(entry: Path) -> None:
    """Put a directory in the place of a file."""
    entry.unlink()
    entry.mkdir()


@pytest.mark.parametrize(
    ("place", "damage", "message"),
    [
        ("full_state/step_4/manifest.json", Path.unlink, "manifest.json is missing.*: only training again makes it"),
        ("full_state/step_4/rank_0.safetensors", a_directory, "rank_0.safetensors is a directory, and a file of"),
        ("full_state/step_4/rank_0.safetensors", lambda file: file.write_bytes(b""), "rank_0.safetensors has 0 bytes"),
        ("full_state/step_4", linked_to_itself, "step_4 is no directory"),
    ],
)
def test_the_full_state_is_damaged_too(place: str, damage: Any, message: str, run: Path) -> None:
    """What is left of the run is named, with the command that trains it again; what could be made whole is whole."""
    shutil.rmtree(run / "hf_format" / "best")
    (run / "hf_format" / "best.json").unlink()
    (run / LAST / "model.safetensors").write_bytes(b"")
    damaged(run / LAST / "config.json", "deleted", run)
    damage(run / place)
    with pytest.raises(forge.RunDirectoryError, match=f"is still damaged: .*damaged too: .*{message}") as caught:
        forge.repair(run)
    assert caught.value.exit_status == 2
    assert f"Made whole: {LAST}/config.json: taken from hf_format/samples_12" in str(caught.value)
    assert f"`forge sft {run}/config.yaml --ckpt-output-dir NEW`" in str(caught.value)


def test_a_directory_in_the_place_of_an_exports_file(given: dict[str, Any], run: Path) -> None:
    """It is named as one, by the run and by its repair; moved away, the file is made again."""
    file = run / LAST / "model.safetensors"
    a_directory(file)
    (file / "mine").write_text("mine")
    with pytest.raises(forge.RunDirectoryError, match="model.safetensors is a directory, and a file of .*move it away first"):
        forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    with pytest.raises(forge.RunDirectoryError, match=r"model.safetensors: is a directory, .* Move it away, and repair again"):
        forge.repair(run)
    file.rename(run.parent / "away")
    assert (run.parent / "away" / "mine").read_text() == "mine"
    assert forge.repair(run).endswith("is whole again.")


ROOT_ALONE = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can be somebody else for a moment"
)


@pytest.fixture(scope="module")
def open_to_all(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings with model and rows where everybody may read them, and the finished run in `home` there."""
    # Not in the folder of these tests, which may be closed to others.
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        asked = dict(given)
        for name in ("model_path", "data_path", "eval_data_path"):
            copy = shutil.copytree if Path(given[name]).is_dir() else shutil.copyfile
            asked[name] = str(copy(given[name], Path(home, f"{name}_{Path(given[name]).name}")))
        forge.sft(**asked, keep_full_state=True, ckpt_output_dir=Path(home, "finished"))
        for entry in (Path(home), *Path(home).rglob("*")):
            os.chown(entry, NOBODY, NOBODY)
        yield asked


@pytest.fixture
def theirs(open_to_all: dict[str, Any]) -> Iterator[Path]:
    """A copy of the run that another user has, whose export is damaged and has no twin."""
    home = Path(open_to_all["model_path"]).parent
    copy = Path(shutil.copytree(home / "finished", home / "run"))
    shutil.rmtree(copy / "hf_format" / "best")
    (copy / "hf_format" / "best.json").unlink()
    (copy / LAST / "model.safetensors").write_bytes(b"")
    for entry in (copy, *copy.rglob("*")):
        os.chown(entry, NOBODY, NOBODY)
    yield copy
    shutil.rmtree(copy)


@contextmanager
def nobody(run: Path) -> Iterator[None]:
    """Be that user for a moment; the run's files stay as they were."""
    before = content(run)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
    assert content(run) == before


@ROOT_ALONE
@pytest.mark.parametrize("closed", ["full_state", "hf_format", LAST])
def test_what_may_not_be_read_is_named(closed: str, theirs: Path) -> None:
    """A folder that is closed to whoever repairs is named, and not taken for one that is missing; nothing changes."""
    (theirs / closed).chmod(0)
    with nobody(theirs), pytest.raises(forge.RunDirectoryError, match=rf"{closed} belongs to nobody .*mode 0000") as caught:
        forge.repair(theirs)
    assert caught.value.exit_status == 2


@ROOT_ALONE
@pytest.mark.parametrize(
    ("closed", "command"),
    [
        *(("full_state", command) for command in ("repair", "again", "more epochs", "goes on", "resume")),
        *(("full_state/step_4", command) for command in ("repair", "goes on")),
    ],
)
def test_full_states_of_another_user_are_not_taken_for_lost(
    closed: str, command: str, open_to_all: dict[str, Any], theirs: Path
) -> None:
    """What may not be read, whose it is, what to do: by its repair, and by each start that would go on from there."""
    os.chown(theirs / closed, 0, 0)
    (theirs / closed).chmod(0o700)
    asked = open_to_all | {"keep_full_state": True, "ckpt_output_dir": theirs}
    if command == "more epochs":
        asked["num_epochs"] = 2
    elif command == "goes on":
        (theirs / "result.json").unlink()
    elif command == "resume":
        asked["resume"] = str(theirs / "full_state" / "step_4")
    with nobody(theirs), pytest.raises(forge.ForgeError) as caught:
        forge.repair(theirs) if command == "repair" else forge.sft(**asked)
    assert caught.value.exit_status == 2
    said = str(caught.value)
    whose = r"belongs to root \(uid 0\), with mode 0700, and nobody \(uid 65534\) may not read it"
    assert re.search(rf"{theirs / closed} {whose}\. Have it given to this user", said)
    assert "kept" not in said
    assert "removed" not in said


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("unfinished", "its run is not finished"),
        ("no run", "is no run directory"),
        ("no verb", "names no verb"),
        ("no settings", "cannot be read"),
    ],
)
def test_what_is_not_repaired(damage: str, message: str, run: Path) -> None:
    """A run that goes on by the same command, no run at all, or one that cannot be known again: one error, nothing changed."""
    if damage == "unfinished":
        (run / "result.json").unlink()
        with (run / "events.jsonl").open("a") as events:
            events.write(json.dumps({"event": "resumed", "step": 4}) + "\n")
    elif damage == "no run":
        (run / "config.yaml").unlink()
    elif damage == "no verb":
        (run / "run.json").write_text("[]")
    else:
        (run / "config.yaml").write_bytes(b"\xff\xfe")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with pytest.raises(forge.ForgeError, match=message) as caught:
        forge.repair(run)
    assert caught.value.exit_status == 2
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_an_earlier_version_recorded_nothing(given: dict[str, Any], run: Path) -> None:
    """A run without hashes is finished where its files can be read, and damaged where they cannot."""
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({name: value for name, value in result.items() if name != "sha256"}))
    (run / "hf_format" / "hashes.json").unlink()
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("files", None)
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert forge.sft(**given, keep_full_state=True, ckpt_output_dir=run).steps == 4
    weights = (run / LAST / "model.safetensors").read_bytes()
    damaged(run / LAST / "model.safetensors", "truncated", run)
    with pytest.raises(forge.RunDirectoryError, match="samples_24 has no config.json, or a file of weights that is not whole"):
        forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    assert "made again from full_state/step_4" in forge.repair(run)
    assert (run / LAST / "model.safetensors").read_bytes() == weights


def test_an_earlier_export_is_verified_when_the_run_goes_on(given: dict[str, Any], run: Path) -> None:
    """Damaged while nothing ran, it is mended by an export with the same file, or named; the end vouches for no damage."""
    (run / "result.json").unlink()
    early = run / "hf_format" / "samples_12"
    before = content(run)
    damaged(early / "tokenizer.json", "bit flipped", run)
    damaged(early / "model.safetensors", "bit flipped", run)
    forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    log = (run / "log.txt").read_text()
    assert "hf_format/samples_12/tokenizer.json: taken from hf_format/" in log
    assert log.count("WARNING: not as it was exported: hf_format/samples_12: model.safetensors does not have the bytes") == 2
    assert {name for name, data in content(run).items() if before.get(name) != data} == {
        "hf_format/samples_12/model.safetensors",
        "result.json",
    }
    with pytest.raises(forge.RunDirectoryError, match=r"is damaged: hf_format/samples_12: samples_12/model\.safetensors"):
        forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)


GARBAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "no text": lambda _: b"\xff\xfe\x00 half\n\x80",
    "torn": lambda text: text + b'{"step": 9, "lo',
    "other JSON": lambda _: b"5\n[]\nnull\n",
    "empty": lambda _: b"",
}


RECORDS = ("result.json", "metrics.jsonl", "events.jsonl")
IN_CI = [("result.json", "cut"), ("metrics.jsonl", "no text"), ("events.jsonl", "torn")]


@pytest.mark.parametrize(("name", "how"), ci_keeps(IN_CI, [(name, how) for name in RECORDS for how in GARBAGE]))
def test_torn_records_are_no_traceback(name: str, how: str, given: dict[str, Any], run: Path, tmp_path: Path) -> None:
    """Every command that reads a run answers, or refuses in one message."""
    file = run / name
    file.write_bytes(GARBAGE[how](file.read_bytes()))
    other = shutil.copytree(run, tmp_path / "other")
    for words in (
        ["report", str(run)],
        ["compare", str(run), str(other), "--output", str(tmp_path / "page.html")],
        ["push", str(run), "org/name"],
        ["eval", str(run), "--tasks", "arc_easy"],
        ["generate", str(run), "what colour has the fig?", "--max-new-tokens", "1"],
        ["sft", str(run / "config.yaml"), "--ckpt-output-dir", str(run), "--dry-run"],
        ["repair", str(run)],
        ["sft", str(run / "config.yaml"), "--ckpt-output-dir", str(run)],
    ):
        assert main(words) in (0, 2), words


def test_metrics_of_invalid_bytes_are_kept(given: dict[str, Any], run: Path) -> None:
    """A run that goes on keeps the bytes up to its state as they are, and drops those after it."""
    (run / "result.json").unlink()
    shutil.rmtree(run / "hf_format")
    file = run / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"\xff" + whole[1:] + b'{"step": 5, "lo\xff')
    forge.sft(**given, keep_full_state=True, ckpt_output_dir=run)
    found = file.read_bytes()
    assert found.startswith(b"\xff" + whole[1:].rpartition(b'{"time"')[0])
    assert b"\xff" not in found[1:]
