"""A disk that is full: refused before training, or the run ends in order and goes on once there is room."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._disk import what_stays, write_remedy
from forge.run import _launching, _run
from forge.run._run_directory import RunDirectory
from forge.saving._full_state import FullStates
from forge.saving._room import no_room
from forge.tasks._answers import Answers
from forge_data import _disk
from forge_dist.checkpoints import _save
from forge_dist.exporting import _export

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .limits import largest_file
from .starts import metrics, untimed, weights
from .verbs import run_verb, settings_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def given(measured: dict[str, Any]) -> dict[str, Any]:
    """Eight steps with a state each, an export after every second, and a best model."""
    return measured | {
        "num_epochs": 2,
        "full_state_every_steps": 1,
        "async_save": False,
    }


@pytest.fixture(scope="module")
def undisturbed(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run whose disk has room."""
    return forge.sft(**given, ckpt_output_dir=tmp_path_factory.mktemp("undisturbed") / "run").output_dir


@contextmanager
def full(run: Path, *, states: Callable[[int], bool] = lambda _: False, exports: Callable[[str], bool]) -> Iterator[None]:
    """Let the disk of a run be full for full states of some steps and exports of some names."""
    write_file, write_configs = _save.write_file, _export.write_configs

    def no_room(path: Path) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def state(path: Path, *rest: Any) -> Any:
        if path.is_relative_to(run) and states(int(path.parent.name.split(".")[1].removeprefix("step_"))):
            raise no_room(path)
        return write_file(path, *rest)

    def model(inner: Any, folder: Path, *rest: Any) -> Any:
        if folder.is_relative_to(run) and exports(folder.name):
            raise no_room(folder)
        return write_configs(inner, folder, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_save, "write_file", state)
        patched.setattr(_export, "write_configs", model)
        yield


def alike(run: Path, undisturbed: Path, *, without: tuple[str, ...] = ()) -> None:
    """Raise unless two runs ended the same, but for exports that found no room."""
    assert untimed(run) == untimed(undisturbed)
    assert weights(run) == {name: found for name, found in weights(undisturbed).items() if name.split("/")[1] not in without}
    assert not [*run.rglob(".*")]


def test_states_that_fail_end_the_run_and_it_goes_on_from_emergency_dir(
    given: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    """Three states in a row found no room: the third is in emergency_dir, and with room the same command goes on from it."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = {**given, "ckpt_output_dir": run, "emergency_dir": elsewhere}
    message = (
        r"3 full states in a row could not be saved: .*step_6 cannot be written: .*No space left.*ends at step 6.*state is in "
    )
    with (
        full(run, states=lambda step: step >= 4, exports=lambda _: False),
        pytest.raises(forge.RunWriteError, match=message) as caught,
    ):
        forge.sft(**settings)
    assert caught.value.exit_status == 1
    (state,) = elsewhere.glob("forge-*/step_*")
    assert state.name == "step_6"
    forge.sft(**settings)
    assert f"resuming after step 6, from {state}" in (run / "log.txt").read_text()
    assert not [*elsewhere.iterdir()]
    alike(run, undisturbed)


def test_emergency_dir_within_the_run_is_refused(given: dict[str, Any], tmp_path: Path) -> None:
    """It would be full with it."""
    with pytest.raises(forge.SettingsError, match="emergency_dir .* lies in ckpt_output_dir"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run", emergency_dir=tmp_path / "run" / "spare")
    assert not (tmp_path / "run").exists()


def test_without_emergency_dir_the_end_is_clear(given: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """No state was ever saved: the message says that the same command begins anew, and it does, with the exports there."""
    settings = {**given, "ckpt_output_dir": tmp_path / "run", "max_failed_saves": 5}
    with (
        full(tmp_path / "run", states=lambda _: True, exports=lambda _: False),
        pytest.raises(forge.RunWriteError, match=r"5 full states .* The same command begins anew.*With emergency_dir"),
    ):
        forge.sft(**settings)
    assert (tmp_path / "run" / "hf_format" / "samples_24").is_dir()
    forge.sft(**settings)
    assert "no full state was saved before it ended: it begins at its first step" in (tmp_path / "run" / "log.txt").read_text()
    alike(tmp_path / "run", undisturbed)


def test_the_last_export_waits_for_a_state_that_finds_no_room(
    given: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a nearly full disk the last state takes what is left until it fails: the last export does not begin before that."""
    run, write_file, write_configs, taken = tmp_path / "run", _save.write_file, _export.write_configs, threading.Event()

    def full_disk(path: Path) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def state(path: Path, *rest: Any) -> Any:
        step = int(path.parent.name.split(".")[1].removeprefix("step_"))
        if step == 8:
            taken.set()
            time.sleep(1.0)
            taken.clear()
        if step >= 7:
            raise full_disk(path)
        return write_file(path, *rest)

    def model(inner: Any, folder: Path, *rest: Any) -> Any:
        if taken.is_set():
            raise full_disk(folder)
        return write_configs(inner, folder, *rest)

    monkeypatch.setattr(_save, "write_file", state)
    monkeypatch.setattr(_export, "write_configs", model)
    forge.sft(**given | {"async_save": True, "keep_best": False}, ckpt_output_dir=run)
    assert metrics(run)[-1]["step"] == 8
    name = "hf_format/samples_48/model.safetensors"
    assert weights(run)[name] == weights(undisturbed)[name]


@pytest.mark.lane
def test_neither_state_nor_last_export_find_room(given: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """The run fails at its end with the state in emergency_dir; the same command exports from there, and trains nothing."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = {**given, "ckpt_output_dir": run, "emergency_dir": elsewhere, "full_state_every_steps": 0}
    with (
        full(run, states=lambda step: step > 4, exports=lambda name: "samples_48" in name),
        pytest.raises(forge.dist.ExportError, match=r"samples_48 cannot be written: .*Its state is in .*step_8"),
    ):
        forge.sft(**settings)
    assert not (run / "result.json").exists()
    before = metrics(run)
    forge.sft(**settings)
    assert metrics(run) == before
    alike(run, undisturbed)


@pytest.mark.lane
def test_the_former_best_stays_without_room_for_a_better_one(given: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """best.json names the model that is there; the disk may be full from the second best on."""
    run, seen = tmp_path / "run", []

    def second(name: str) -> bool:
        seen.append(name)
        return "best" in name and sum("best" in each for each in seen) > 1

    with full(run, exports=second):
        forge.sft(**given, ckpt_output_dir=run)
    (first,) = [line for line in metrics(run) if line["step"] == 2 and "eval_loss" in line]
    assert json.loads((run / "hf_format" / "best.json").read_text())["value"] == first["eval_loss"]
    best = (run / "hf_format" / "best" / "model.safetensors").read_bytes()
    assert best == (undisturbed / "hf_format" / "samples_12" / "model.safetensors").read_bytes()
    assert "training goes on without this export" in (run / "log.txt").read_text()
    assert forge.repair(run).endswith("has the SHA-256 that was recorded.")


@pytest.mark.lane
def test_emergency_dir_is_written_where_a_signal_finds_no_room(given: dict[str, Any], tmp_path: Path) -> None:
    """Asked to stop with a full disk, the run leaves its state there, with status 75, and goes on from it."""
    run, elsewhere, calls = tmp_path / "run", tmp_path / "elsewhere", []
    settings = {**given, "ckpt_output_dir": run, "emergency_dir": elsewhere}

    def asked(step: int) -> bool:
        if step == 2 and not calls:
            calls.append(step)
            signal.raise_signal(signal.SIGTERM)
        return step >= 2

    with (
        full(run, states=asked, exports=lambda _: False),
        pytest.raises(forge.PreemptedError, match=r"could not be saved .*step_2 \(emergency_dir\)") as caught,
    ):
        forge.sft(**settings)
    assert caught.value.exit_status == 75
    forge.sft(**settings)
    assert "resuming after step 2" in (run / "log.txt").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("name", ci_keeps(["metrics.jsonl"], ["metrics.jsonl", "events.jsonl", "log.txt"]))
def test_a_record_finds_no_room(
    name: str, given: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the third step no line of it can be written: the run ends with its name, and goes on from its state bit-equal."""
    run, append = tmp_path / "run", RunDirectory._append

    def full_disk(out: RunDirectory, file: str, text: str) -> None:
        if file == name and out.step >= 3:
            out._files[file].close()
            out._files[file] = Path("/dev/full").open("w")  # noqa: SIM115 - closed by the run directory
        append(out, file, text)

    monkeypatch.setattr(RunDirectory, "_append", full_disk)
    with pytest.raises(forge.RunWriteError, match=rf"{name}: cannot be written: No space left.*its disk is full: make room"):
        forge.sft(**given, ckpt_output_dir=run)
    states = [state.name for state in (run / "full_state").glob("step_*")]
    assert "step_2" in states
    monkeypatch.undo()
    forge.sft(**given, ckpt_output_dir=run)
    assert f"resuming after step {max(int(state[5:]) for state in states)}" in (run / "log.txt").read_text()
    alike(run, undisturbed)


@contextmanager
def unsynced(named: Callable[[str], bool]) -> Iterator[None]:
    """Let the disk be full for each file that is made durable and whose path `named` picks."""
    fsync = os.fsync

    def no_room(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if named(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", no_room)
        yield


def files(run: Path, folder: str) -> dict[str, bytes]:
    """Return the files of a folder of a run."""
    return {file.name: file.read_bytes() for file in sorted((run / folder).iterdir())}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here")
@pytest.mark.parametrize(("verb", "folder"), ci_keeps([("grpo", "rollouts")], [("grpo", "rollouts"), ("sdft", "samples")]))
def test_what_is_sampled_finds_no_room(verb: str, folder: str, model_dir: Path, tmp_path: Path) -> None:
    """The run ends with the file of its third step and what to do; with room it goes on from its state, to the same bits."""
    given = settings_of(verb, model_dir, tmp_path) | {"full_state_every_steps": 1, "async_save": False}
    run, other = tmp_path / "run", tmp_path / "undisturbed"
    again = given | {"ckpt_output_dir": str(run)}
    run_verb(verb, given | {"ckpt_output_dir": str(other)}, str(tmp_path))
    with (
        unsynced(lambda path: path.startswith(str(run / folder / ".step_3.jsonl"))),
        pytest.raises(
            (forge.RunWriteError, forge.dist.ExportError), match=r"step_3\.jsonl.* its disk is full: make room"
        ) as caught,
    ):
        run_verb(verb, again, str(tmp_path))
    assert caught.value.exit_status == 1
    assert "\n" not in str(caught.value)
    assert sorted(files(run, folder)) == [name for name in sorted(files(other, folder)) if name < "step_3"]
    run_verb(verb, again, str(tmp_path))
    assert "resuming after step 2" in (run / "log.txt").read_text()
    assert files(run, folder) == files(other, folder)
    alike(run, other)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_answers_find_no_room(
    given: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the first answers reached the disk: the run ends with their file, and the same command asks all of them again."""
    run, write = tmp_path / "run", Answers.write
    settings = {**given, "ckpt_output_dir": run, "eval_prompts": ("what is red?", "and what is not?"), "eval_max_new_tokens": 4}

    def torn(answers: Answers, step: int) -> None:
        answers._file = Path("/dev/full")
        try:
            write(answers, step)
        finally:
            (run / "answers.jsonl").write_text(json.dumps({"step": step, "prompt": "what is red?", "answer": "?"}) + '\n{"st')

    monkeypatch.setattr(Answers, "write", torn)
    with pytest.raises(forge.RunWriteError, match=r"/dev/full: cannot be written: No space left.*its disk is full: make room"):
        forge.sft(**settings)
    monkeypatch.undo()
    forge.sft(**settings)
    found = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [step for step in (0, 2, 4, 6, 8) for _ in range(2)]
    assert "?" not in [line["answer"] for line in found]
    alike(run, undisturbed)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here")
def test_the_rows_find_no_room(given: dict[str, Any], tmp_path: Path) -> None:
    """Tokenizing ends with what to do, and nothing is left of the directory."""
    with (
        unsynced(lambda path: "/data/.train" in path),
        pytest.raises(
            forge.data.StoreError,
            match=r"run/data/train could not .*its disk is full: make room\. The directory is as it was[^:]*\.$",
        ) as caught,
    ):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG])
def test_rows_and_runs_have_the_same_remedy(number: int) -> None:
    """forge_data says on its own what a run says, which does not say it twice."""
    error = OSError(number, os.strerror(number))
    unwritten = forge.data.StoreError(f"train could not be written: {_disk.unwritten(error)}")
    unwritten.__cause__ = error
    for begun in (False, True):
        found = no_room(unwritten, Path("run"), begun=begun)
        assert str(found) == f"{unwritten}. {what_stays(begun=begun)}."
        assert str(found).count(write_remedy(error)) == 1
        assert no_room(found, Path("run"), begun=begun) is None


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here")
def test_the_report_finds_no_room(given: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """It is a warning, once, and the run ends as it would."""
    run = tmp_path / "run"
    with unsynced(lambda path: "/.report.html" in path):
        forge.sft(**given, ckpt_output_dir=run)
    log = (run / "log.txt").read_text()
    assert log.count("report.html cannot be renewed") == 1
    assert "report.html cannot be written: [Errno 28] No space left on device: its disk is full: make room)" in log
    assert not (run / "report.html").exists()
    alike(run, undisturbed)


def test_both_places_are_full(given: dict[str, Any], undisturbed: Path, tmp_path: Path) -> None:
    """Neither the run nor emergency_dir takes a state: the end says so, which steps are lost, and leaves nothing there."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    settings = {**given, "ckpt_output_dir": run, "emergency_dir": elsewhere}
    message = (
        r"3 full states in a row could not be saved: .*run/full_state/step_6 cannot be written: .*The run ends at step 6.* "
        r"Nor could it be saved to emergency_dir: .*elsewhere/forge-\S+/step_6 cannot be written: .*No space left.*\. "
        r"The same command goes on from .*/full_state/step_3, and makes steps 4 to 6 again: its disk is full: make room, there "
        r"or in emergency_dir\.$"
    )
    with (
        full(tmp_path, states=lambda step: step >= 4, exports=lambda _: False),
        pytest.raises(forge.RunWriteError, match=message),
    ):
        forge.sft(**settings)
    assert not [*elsewhere.iterdir()]
    forge.sft(**settings)
    assert "resuming after step 3" in (run / "log.txt").read_text()
    alike(run, undisturbed)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_limit_of_file_sizes(elsewhere: bool, given: dict[str, Any], tmp_path: Path) -> None:
    """`ulimit -f` is no full disk: it holds in emergency_dir too, which is not offered."""
    settings = given | {"max_steps": 3} | ({"emergency_dir": tmp_path / "elsewhere"} if elsewhere else {})
    with (
        largest_file(60_000),
        pytest.raises(forge.RunWriteError, match=r"File too large.* anew.*\(`ulimit -f`.*\): raise that limit\.$"),
    ):
        forge.sft(**settings, ckpt_output_dir=tmp_path / "run")


def test_a_signal_finds_both_places_full(given: dict[str, Any], tmp_path: Path) -> None:
    """The run ends with status 75, and says the same."""
    run, calls = tmp_path / "run", []

    def asked(step: int) -> bool:
        if step == 2 and not calls:
            calls.append(step)
            signal.raise_signal(signal.SIGTERM)
        return step >= 2

    message = r"stopped by SIGTERM: its state could not be saved .*Nor could .*goes on from .*step_1, and makes step 2 again"
    with full(tmp_path, states=asked, exports=lambda _: False), pytest.raises(forge.PreemptedError, match=message) as caught:
        forge.sft(**given, ckpt_output_dir=run, emergency_dir=tmp_path / "elsewhere")
    assert caught.value.exit_status == 75


def test_a_second_signal_finds_the_state_saved(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While older states are removed, or the answer is made: the status stays 75."""
    save, answer = FullStates.save, _run.preempted

    def saved(*words: Any, wait: bool) -> None:
        save(*words, wait=wait)
        if words[-1].step == 2:
            signal.raise_signal(signal.SIGTERM)

    def answered(*words: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return answer(*words, **named)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FullStates, "save", saved)
    monkeypatch.setattr(_run, "preempted", answered)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(forge.PreemptedError, match="step_2 holds the state to resume from"):
            forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, before)


def on_a_full_disk(settings: dict[str, Any], named: str, folder: str) -> None:
    """Run `forge.sft` on a rank for whose files of that name the disk is full; keep what the rank raises."""
    try:
        with unsynced(lambda path: named in path):
            forge.sft(**settings)
    except Exception as error:
        (Path(folder) / os.environ["RANK"]).write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc here")
def test_each_ranks_message_says_what_to_do(given: dict[str, Any], tmp_path: Path) -> None:
    """Whichever of two ranks is heard, it says which file found no room, by its name, and what to do."""
    settings = {**given, "ckpt_output_dir": str(tmp_path / "run")}
    with pytest.raises((forge.data.StoreError, forge.dist.WorkerError), match="its disk is full: make room"):
        run_on_ranks(on_a_full_disk, 2, settings, "/data/.train", str(tmp_path), joined=False)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first.startswith(
        f"StoreError: the token store {tmp_path}/run/data/train could not be finished: No space left on device"
    )
    assert second.startswith("WorkerError: rank 0 on ")
    assert second.endswith(first)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_launcher_finds_no_room(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it writes for its ranks does not fit: the directory is named, and nothing of it is left."""

    def no_room(*_: Any) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("settings")

    monkeypatch.setattr(_launching, "write_settings", no_room)
    with pytest.raises(forge.RunDirectoryError, match=r"ckpt_output_dir .*run: cannot be written: No space left.* Make room"):
        forge.sft(**given, ckpt_output_dir=tmp_path / "run", nproc_per_node=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.lane
@pytest.mark.parametrize(("size", "ends"), [("900k", "has less room than the run takes"), ("2m", "finished")])
def test_a_small_file_system(size: str, ends: str, given: dict[str, Any], tmp_path: Path) -> None:
    """On a file system of its own a run that cannot fit is refused, and one that can is finished."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
    command = f"mount -t tmpfs -o size={size} tmpfs {disk} && exec {sys.executable} -m forge sft {' '.join(words)}"
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no file systems for its users")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{command} --ckpt-output-dir={disk / 'run'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ends in done.stderr
    assert done.returncode == (0 if ends == "finished" else 2)
