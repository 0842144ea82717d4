"""A model directory is identified by its content."""

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forge_dist import ModelIdentities, model_identity
from forge_dist.loading import _identity


def changed_config(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 17.0}))


def changed_weight(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_copy_is_the_same(base, tmp_path):
    """Where it lies, and what else lies there, does not count."""
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("words")
    assert model_identity(str(tmp_path / "copy")) == model_identity(base)
    assert len(model_identity(base)) == 64


@pytest.mark.parametrize("limit", [None, 100])
@pytest.mark.parametrize("change", [changed_config, changed_weight])
def test_a_change_is_another(base, change, limit, monkeypatch):
    """One number in the weights or in the configuration is enough, in files that are hashed whole and in those too large for
    that.
    """
    if limit:
        monkeypatch.setattr(_identity, "_HASHED_WHOLE", limit)
        _identity._digest.cache_clear()
    before = model_identity(base)
    assert model_identity(base) == before
    change(Path(base))
    assert model_identity(base) != before
    _identity._digest.cache_clear()


def test_a_change_is_another_although_its_time_was_set_back(base):
    """As rsync and tar do: the weights of the same size, with the time of those before."""
    file = Path(base) / "model.safetensors"
    times, before = (file.stat().st_atime_ns, file.stat().st_mtime_ns), model_identity(base)
    with file.open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\x7e")
    os.utime(file, ns=times)
    assert model_identity(base) != before


def test_files_are_read_once(base, monkeypatch):
    """A run exports often: what did not change is not read again."""
    before = model_identity(base)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was read again"))
    assert model_identity(base) == before


def test_a_hub_name_stays_one():
    """Nothing is fetched to tell it."""
    assert model_identity("org/name") == "hub:org/name"


@pytest.fixture
def sharded(base, tmp_path):
    """The weights in seven files, as large models have them."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    shutil.copy(Path(base, "config.json"), folder)
    tensors = list(load_file(Path(base, "model.safetensors")).items())
    for number in range(7):
        save_file(dict(tensors[number::7]), folder / f"model-{number}.safetensors", metadata={"format": "pt"})
    _identity._digest.cache_clear()
    return folder


def test_files_are_hashed_in_the_order_of_their_names(sharded):
    """Several at a time, and the identity is that of one after another."""
    expected = hashlib.sha256((sharded / "config.json").read_bytes())
    for file in sorted(sharded.glob("*.safetensors")):
        expected.update(f"{file.name} {file.stat().st_size}".encode() + hashlib.sha256(file.read_bytes()).digest())
    assert model_identity(str(sharded)) == expected.hexdigest()


def test_identities_beside_other_work(base, sharded, monkeypatch):
    """Those of several models are there once all files are read, and not before; nothing is read twice."""
    go, read, content = threading.Event(), [], _identity._content

    def gated(file):
        assert go.wait(60)
        read.append(file[0])
        return content(file)

    monkeypatch.setattr(_identity, "_content", gated)
    reading = ModelIdentities({"model": str(sharded), "teacher": str(base), "judge": "org/name"})
    assert reading.wait(0.05) is None
    go.set()
    found = reading.wait()
    assert found == {"model": model_identity(str(sharded)), "teacher": model_identity(str(base)), "judge": "hub:org/name"}
    assert len(read) == len(set(read)) == 8


def test_a_file_that_cannot_be_read_is_an_error_of_who_waits(sharded, monkeypatch):
    """Of the thread that asks, with the file's name."""
    (sharded / "model-3.safetensors").unlink()
    (sharded / "model-3.safetensors").mkdir()
    reading = ModelIdentities({"model": str(sharded)})
    with pytest.raises(OSError, match="model-3"):
        reading.wait()
