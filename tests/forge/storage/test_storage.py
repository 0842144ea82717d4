"""The copy of a run directory at a URL: whole or not counted, fetched again, pruned as the run directory is."""

import errno
import json
import os
import shutil
import threading
import time

import pytest

from forge import SettingsError, StorageError
from forge._errors import RunDirectoryError
from forge.settings._storage import StorageSettings
from forge.storage import _storage as module
from forge.storage._remote import Remote
from forge.storage._restore import RESTORING, remove_half
from forge.storage._snapshot import local_files, snapshots
from forge.storage._storage import Storage
from forge.storage._upload import Upload


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """A thread that looks every 10 ms."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)


@pytest.fixture
def url(request, tmp_path):
    """An address; `every_kind` gives one of each kind that needs no network."""
    folder = tmp_path / "elsewhere" / "ünï cödé"
    kinds = {"file": f"file://{folder}", "memory": f"memory://{tmp_path}/remote", "path": str(folder)}
    return kinds[getattr(request, "param", "file")]


every_kind = pytest.mark.parametrize("url", ["file", "memory", "path"], indirect=True)


@pytest.fixture
def run(tmp_path):
    """A run directory without a step."""
    return a_run(tmp_path / "run")


def a_run(path, identity="abc"):
    """Make a run directory without a step."""
    for name, text in {
        "config.yaml": "seed: 1\n",
        "run.json": json.dumps({"run": identity}),
        "metrics.jsonl": "",
        "log.txt": "begun\n",
        "data/train/ids.bin": "tokens",
        "data/.half.tmp": "never copied",
        "logs/rank_0.log": "never copied",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def put(folder, **files):
    """A folder that is there at once, as full states and exports are."""
    hidden = folder.with_name(f".{folder.name}.tmp")
    hidden.mkdir(parents=True)
    for name, text in files.items():
        (hidden / name).write_text(text)
    if folder.exists():
        shutil.rmtree(folder)
    hidden.rename(folder)


def step(run, number, keep=2):
    """One step, its line and its full state, with the older ones pruned."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + "\n")
    put(run / "full_state" / f"step_{number}", weights=f"weights {number}" * 9, manifest=f"of {number}")
    (run / "full_state" / "latest").write_text(f"step_{number}\n")
    states = sorted((run / "full_state").glob("step_*"), key=lambda path: int(path.name[5:]))
    for old in states[:-keep]:
        shutil.rmtree(old)


def content(path):
    """Every file that is copied, by its path."""
    return {name: (path / name).read_bytes() for name in local_files(path)}


def copied(url, run, identity="abc"):
    """One complete copy; the uploader."""
    upload = Upload(Remote(url), run, identity, lambda _: None)
    upload.take()
    upload.sync()
    return upload


@every_kind
def test_a_run_comes_back(run, url, tmp_path):
    """Every file but hidden ones and the ranks' logs, with its bytes and times; a second fetch finds nothing to copy."""
    step(run, 1)
    put(run / "hf_format" / "samples_4", **{"config.json": "{}"})
    copied(url, run)
    new = tmp_path / "new"
    new.mkdir()
    storage = Storage(url)
    storage.prepare(new, resuming=False)
    assert content(new) == content(run)
    assert local_files(new) == local_files(run)
    assert not {path.name for path in new.iterdir()} & {"logs", RESTORING}
    again = Upload(Remote(url), new, "abc", lambda _: None)
    again.take()
    assert not again.sync()
    assert again.copied == 0


@every_kind
def test_what_is_pruned_here_is_pruned_there(run, url):
    """After each copy the URL has the states of the run directory and one snapshot, and no folder that was left empty."""
    upload = copied(url, run)
    for number in range(1, 6):
        step(run, number)
        assert upload.sync()
        names = Remote(url).names()
        assert {name.split("/")[1] for name in names if name.startswith("full_state/")} - {"latest"} == {
            path.name for path in run.glob("full_state/step_*")
        }
        assert sum(name.startswith("snapshots/") for name in names) == 1
        assert sum(name.endswith("metrics.jsonl") for name in names) == 1
    folder = Remote(url).local_folder
    if folder is not None:
        assert not [path for path, folders, files in os.walk(folder) if not folders and not files]
    # The end of a run: its states go, its result stays.
    (run / "result.json").write_text("{}")
    shutil.rmtree(run / "full_state")
    assert upload.sync()
    assert not [name for name in Remote(url).names() if name.startswith("full_state/")]


def test_a_half_copy_is_never_used(run, url, tmp_path, monkeypatch):
    """Stopped before any one of its writes and removals, the copy before it is whole, and the next one cleans up."""
    copied(url, run)
    step(run, 1)
    copied(url, run)
    before = content(run)
    step(run, 2, keep=1)
    put(run / "hf_format" / "samples_8", **{"config.json": "{}"})
    after = content(run)
    calls, fail_at, armed = 0, 0, False

    def failing(method):
        real = getattr(Remote, method)

        def call(self, name, *rest):
            nonlocal calls
            calls += armed
            if armed and calls == fail_at:
                if rest:  # half of a file
                    real(self, name, iter([next(rest[0], b"")[:3]]))
                raise StorageError("cut")
            return real(self, name, *rest)

        return call

    monkeypatch.setattr(Remote, "write", failing("write"))
    monkeypatch.setattr(Remote, "remove", failing("remove"))
    backup = {name: Remote(url).read(name) for name in Remote(url).names()}
    found = []
    while True:
        fail_at, calls = fail_at + 1, 0
        for name in Remote(url).names():
            Remote(url).remove(name)
        for name, text in backup.items():
            Remote(url).write(name, iter([text]))
        armed = True
        try:
            copied(url, run)
            complete = True
        except StorageError:
            complete = False
        armed = False
        fetched = tmp_path / f"fetched {fail_at}"
        fetched.mkdir()
        Storage(url).prepare(fetched, resuming=False)
        got = content(fetched)
        # States come before exports, so there is a moment with the state alone.
        export = {name: text for name, text in after.items() if name.startswith("hf_format")}
        stages = [before, {name: text for name, text in after.items() if name not in export}, after]
        found.append(next(stage for stage, whole in enumerate(stages) if got == whole))
        assert found == sorted(found)
        if complete:
            break
    assert {0, 1, 2} <= set(found)
    assert len(found) > 10


@every_kind
def test_a_file_that_finds_no_room_is_not_there(url, monkeypatch):
    """Nothing half-written stays under a name; on a disk the message says to make room, elsewhere what to look at."""
    remote = Remote(url)
    remote.write("whole", iter([b"whole"]))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def content():
        yield b"half"
        full()

    local = remote.local_folder is not None
    remedy = "Its disk is full: make room" if local else "Check the address, what you may do there, and the network"
    with pytest.raises(StorageError, match=rf"model/weights cannot be written: No space left on device\. {remedy}\.$"):
        remote.write("model/weights", content())
    assert remote.names() == {"whole": 5}
    if local:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="other cannot be written: No space left"):
            remote.write("other", iter([b"text"]))
        assert remote.names() == {"whole": 5}


def test_a_damaged_copy_is_refused_by_name(run, url, tmp_path):
    """A file that is missing or altered at the URL: nothing is left behind here."""
    step(run, 1)
    copied(url, run)
    new = tmp_path / "new"
    new.mkdir()
    Remote(url)._write("full_state/step_1/weights", iter([b"other"]))
    with pytest.raises(StorageError, match="full_state/step_1/weights is not what was copied to it"):
        Storage(url).prepare(new, resuming=False)
    Remote(url).remove("full_state/step_1/weights")
    with pytest.raises(StorageError, match="full_state/step_1/weights is missing"):
        Storage(url).prepare(new, resuming=False)
    assert list(new.iterdir()) == []


def test_a_torn_snapshot_is_passed_over(run, url):
    """Half of the record itself, which a kill leaves where writing is not atomic."""
    step(run, 1)
    copied(url, run)
    Remote(url)._write("snapshots/000009.json", iter([b'{"format": 1, "files": {"con']))
    remote = Remote(url)
    (found,) = snapshots(remote, remote.names())
    assert found.step == 1
    step(run, 2)
    copied(url, run)
    assert "snapshots/000009.json" not in remote.names()


def test_a_lone_damaged_snapshot_is_no_empty_url(run, url, tmp_path):
    """Its run is not begun anew, which would remove the copy; half of the very first one is passed over."""
    folder = tmp_path / "elsewhere" / "ünï cödé"
    step(run, 1)
    copied(url, run)
    first = folder / "snapshots" / "000001.json"
    whole = first.read_text()
    first.write_text(whole[:-9])
    assert snapshots(Remote(url), Remote(url).names()) == []
    first.write_text(whole)
    step(run, 2)
    copied(url, run)
    (only,) = folder.glob("snapshots/*.json")
    for text in ("", only.read_text()[:-9]):
        only.write_text(text)
        before = content(folder)
        with pytest.raises(StorageError, match="json is damaged, and no other snapshot is there"):
            Storage(url).prepare(tmp_path / "new", resuming=False)
        assert content(folder) == before


@pytest.mark.parametrize("change", [{"at": 5}, {"bytes": "5"}, {"modified": None}, {"sha256": 1}])
def test_a_snapshot_with_other_values(run, url, tmp_path, change):
    """One error that names the file, before anything is fetched."""
    step(run, 1)
    copied(url, run)
    (only,) = (tmp_path / "elsewhere").rglob("snapshots/*.json")
    about = json.loads(only.read_text())
    about["files"]["config.yaml"] |= change
    only.write_text(json.dumps(about))
    with pytest.raises(StorageError, match=r"json is not what a run writes"):
        Storage(url).prepare(tmp_path / "new", resuming=False)


def test_hostile_names_are_refused(run, url, tmp_path):
    """A snapshot that would write outside of the run directory."""
    step(run, 1)
    copied(url, run)
    remote = Remote(url)
    (found,) = snapshots(remote, remote.names())
    for bad in ("../../etc/passwd", "/etc/passwd"):
        text = found.to_bytes().replace(b'"config.yaml": {', json.dumps(bad).encode() + b": {")
        remote._write(found.name, iter([text]))
        with pytest.raises(StorageError, match="which is no file of a run directory"):
            Storage(url).prepare(tmp_path / "new", resuming=False)


@every_kind
def test_what_else_lies_there_stays(run, url, tmp_path):
    """A directory with other files is refused, and nothing in it is touched."""
    Remote(url)._write("photos/cat.png", iter([b"cat"]))
    with pytest.raises(RunDirectoryError, match=r"is not empty and holds no run \(but photos/cat.png\)"):
        Storage(url).prepare(run, resuming=True)
    assert Remote(url).names() == {"photos/cat.png": 3}


@every_kind
def test_another_run_is_refused(run, url, tmp_path):
    """A run with steps is never overwritten by another; one without a step is."""
    copied(url, run)
    other = a_run(tmp_path / "other", "xyz")
    Storage(url).prepare(other, resuming=True)
    step(run, 1)
    copied(url, run)
    with pytest.raises(RunDirectoryError, match=r"holds another run \(abc\)"):
        Storage(url).prepare(other, resuming=True)
    with pytest.raises(RunDirectoryError, match="holds the run up to step 1 .*resume=never"):
        Storage(url, "never").prepare(tmp_path / "new", resuming=False)


def test_an_older_run_directory_is_refused(run, url):
    """The copy is further than the directory: going on would throw away what another machine trained."""
    step(run, 1)
    step(run, 2)
    copied(url, run)
    shutil.rmtree(run / "full_state" / "step_2")
    with pytest.raises(RunDirectoryError, match="its run is at step 1, and .* holds step 2 of it"):
        Storage(url).prepare(run, resuming=True)
    # Asked for by name, it goes back, and so does the copy.
    Storage(url, "full_state/step_1").prepare(run, resuming=True)
    copied(url, run)
    Storage(url).prepare(run, resuming=True)


def test_two_processes(run, url):
    """The one that came last copies; the other says so and stops."""
    first = copied(url, run)
    second = copied(url, run)
    step(run, 1)
    assert second.sync()
    step(run, 2)
    with pytest.raises(StorageError, match="another process copies a run to it now"):
        first.sync()


def test_a_run_directory_that_vanished_takes_no_copy_with_it(run, url):
    """`rm -r` on the machine: the copy stays as it was."""
    step(run, 1)
    upload = copied(url, run)
    before = Remote(url).names()
    shutil.rmtree(run)
    run.mkdir()
    with pytest.raises(StorageError, match="is no run any more"):
        upload.sync()
    assert Remote(url).names() == before


def test_the_best_export_is_copied_with_its_mark(run, url):
    """hf_format/best without the best.json of its step is not copied yet; another best one replaces it."""
    step(run, 1)
    upload = copied(url, run)
    mark = run / "hf_format" / "best.json"
    for number in (1, 2):
        # As forge.saving replaces it: its mark goes first.
        mark.unlink(missing_ok=True)
        put(run / "hf_format" / "best", **{"config.json": f"{number}"})
        assert not upload.sync()
        mark.write_text(f'{{"step": {number}}}')
        os.utime(mark, (number, number))  # the clock was set back meanwhile
        assert upload.sync()
        remote = Remote(url)
        (found,) = snapshots(remote, remote.names())
        assert remote.read(found.files["hf_format/best/config.json"].at) == f"{number}".encode()


def test_links_are_not_copied_and_named(run, url, tmp_path):
    """States on another disk, by a link, would be missing from the copy without a word."""
    step(run, 1)
    (run / "full_state").rename(tmp_path / "disk")
    (run / "full_state").symlink_to(tmp_path / "disk")
    note = Note()
    with Storage(url) as storage:
        storage.prepare(run, resuming=True)
        storage.begin("abc", note)
    assert note.lines[1] == f"WARNING: checkpoint_storage {url}: links are not copied: full_state"


def test_a_state_pruned_while_it_is_copied(run, url, monkeypatch):
    """Links keep its bytes; where there are no links, the next look takes what is there."""
    upload = copied(url, run)
    real = Remote._write

    def pruned(self, name, blocks):
        shutil.rmtree(run / "full_state" / "step_1", ignore_errors=True)
        return real(self, name, blocks)

    for linked in (True, False):
        step(run, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "_write", pruned)
            if not linked:
                patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
            before = upload.copied
            assert upload.sync()
        assert upload.copied == before + linked
        assert snapshots(Remote(url), Remote(url).names())[0].step == 1
        step(run, 1)
        upload.sync()
    assert not (run / ".forge-storage.tmp").exists()


class Note:
    """What was logged."""

    def __init__(self):
        self.lines = []

    def __call__(self, line):
        self.lines.append(line)


def test_no_step_waits_for_a_copy(run, url, monkeypatch):
    """A URL that takes for ever: steps go on, only the newest state is taken next, and the end waits for progress only."""
    real, gate = Remote.write, threading.Event()

    def slow(self, name, blocks):
        if name.startswith("full_state/step_1/"):
            gate.wait(60)
        return real(self, name, blocks)

    monkeypatch.setattr(Remote, "write", slow)
    note = Note()
    with Storage(url) as storage:
        storage.prepare(run, resuming=True)
        storage.begin("abc", note)
        for number in range(1, 6):
            step(run, number)
            time.sleep(0.05)
        gate.set()
    remote = Remote(url)
    (found,) = snapshots(remote, remote.names())
    assert found.step == 5
    assert found.number <= 3
    assert note.lines == [f"checkpoint_storage {url}: each full state and export is copied there in the background"]


def test_a_url_that_fails_for_a_while(run, url, monkeypatch):
    """One warning, the run goes on, and the copy is whole at its end."""
    real, broken = Remote.write, True

    def failing(self, name, blocks):
        if broken and name.startswith("full_state"):
            raise StorageError("checkpoint_storage X: no route to host")
        return real(self, name, blocks)

    monkeypatch.setattr(Remote, "write", failing)
    note = Note()
    with Storage(url) as storage:
        storage.prepare(run, resuming=True)
        storage.begin("abc", note)
        step(run, 1)
        time.sleep(0.2)
        storage.tell()
        broken = False
    assert note.lines[1:] == ["WARNING: checkpoint_storage X: no route to host. The run goes on, and it is tried again"]
    assert Storage(url).check() is not None


def test_a_url_that_fails_to_the_end(run, url, monkeypatch):
    """A run that ended well fails with status 1 and says what to do; one that failed keeps its own error."""
    real = Remote.write

    def failing(self, name, blocks):
        if name.startswith("full_state"):
            raise StorageError("checkpoint_storage X: no route to host.")
        return real(self, name, blocks)

    monkeypatch.setattr(Remote, "write", failing)
    step(run, 1)

    def train(error=None):
        note = Note()
        with Storage(url) as storage:
            storage.prepare(run, resuming=True)
            storage.begin("abc", note)
            if error is not None:
                raise error
        return note

    with pytest.raises(StorageError, match="no route to host.*the same command copies what is missing") as caught:
        train()
    assert caught.value.exit_status == 1
    with pytest.raises(KeyError):
        train(KeyError("own"))
    monkeypatch.setattr(Remote, "write", real)
    # The same command of a finished run, which begins nothing.
    with Storage(url) as storage:
        storage.prepare(run, resuming=True)
    assert "up to step 1" in str(Storage(url).check())


def test_a_hanging_url_does_not_hang_the_end(run, url, monkeypatch):
    """Where no byte is taken, the wait ends."""
    monkeypatch.setattr(module, "_STALLED_SECONDS", 0.3)
    real, gate = Remote.write, threading.Event()

    def hanging(self, name, blocks):
        if name.startswith("full_state"):
            gate.wait(60)
        return real(self, name, blocks)

    monkeypatch.setattr(Remote, "write", hanging)
    step(run, 1)
    storage = Storage(url)
    with pytest.raises(StorageError, match="no byte was taken"), storage:
        storage.prepare(run, resuming=True)
        storage.begin("abc", Note())
    gate.set()
    storage._thread.join(60)


def test_half_a_fetch_is_made_again(run, url, tmp_path):
    """Killed while it fetched, or while it moved what it had fetched."""
    step(run, 1)
    copied(url, run)
    new = tmp_path / "new"
    (new / RESTORING / "data").mkdir(parents=True)
    (new / "run.json").write_text("half")
    assert remove_half(new)
    assert list(new.iterdir()) == []
    assert not remove_half(new)
    Storage(url).prepare(new, resuming=False)
    (new / RESTORING).mkdir()
    assert remove_half(new)
    assert content(new) == content(run)


def test_addresses(tmp_path, run):
    """What cannot be an address is refused by name, with what to do."""
    for bad, why in {
        "s3://user:secret@bucket/run": "holds a password",
        "https://host/run?token=1": "holds a password or a query",
        "": "must be a URL",
        "http://[": "is no address",
        "s3:/bucket/run": "is no address, and a strange path",
        "file://run": "must have a whole path after file://",
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"checkpoint_storage {why}"):
            StorageSettings(checkpoint_storage=bad)
    with pytest.raises(SettingsError, match="nosuch.*Give a URL of fsspec"):
        Storage("nosuch://x").prepare(run, resuming=True)
    with pytest.raises(SettingsError, match="zip://x: cannot be opened"):
        Storage("zip://x").prepare(run, resuming=True)
    with pytest.raises(SettingsError, match="lies in ckpt_output_dir"):
        Storage(f"file://{run}/copy").prepare(run, resuming=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(SettingsError, match="is a file. Give a directory"):
        Storage(f"file://{file}").prepare(run, resuming=True)
    with pytest.raises(StorageError, match="cannot be written"):
        Storage(f"file://{file}/run").prepare(run, resuming=True)
    assert Storage(None).check() is None


def test_a_file_that_cannot_be_opened_stays(tmp_path, monkeypatch):
    """What is somebody else's is not removed because it could not be written."""
    (tmp_path / "holder.json").write_text("theirs")
    remote = Remote(str(tmp_path))

    def refused(*_args, **_how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(remote._system, "open", refused)
    with pytest.raises(StorageError, match="Permission denied"):
        remote.write("holder.json", iter([b"mine"]))
    assert (tmp_path / "holder.json").read_text() == "theirs"
