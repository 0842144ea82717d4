"""Full states through torch.distributed.checkpoint: `load` and `save`, without a pickle."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from forge_dist import CheckpointError, Checkpoints, ForgeReader, ForgeWriter

from ...ranks import run_on_ranks
from ..alone import Alone
from .test_ranks import TENSORS, WAYS, divided, local, state, value

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def empty_like(tensors):
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def by_torch(ranks, root):
    """Read what Checkpoints saved with torch's load, and what torch's save wrote with Checkpoints, each divided otherwise."""
    path = Path(root)
    with Checkpoints(path / "ours", ranks, keep=3, background=False) as checkpoints:
        checkpoints.save(1, state(1, 0, ranks.rank), {"position": 3}, must_match={"seed": 1})
        assert checkpoints.failed is None
        compared = 0
        for shift in range(len(WAYS)):
            expected = {name: divided(value(name, 1), WAYS[(i + shift) % len(WAYS)]) for i, name in enumerate(TENSORS)}
            for source in (path / "ours" / "step_1", checkpoints.at(path / "ours" / "step_1", {"seed": 1})):
                into = empty_like(expected)
                dcp.load(into, storage_reader=ForgeReader(source))
                for name, tensor in into.items():
                    assert torch.equal(local(tensor), local(expected[name])), (name, shift)
                    compared += 1
    # torch plans with all ranks' names, so each has the same.
    tensors = {name: divided(value(name, 2), WAYS[i % len(WAYS)]) for i, name in enumerate(TENSORS)}
    dcp.save(dict(tensors), storage_writer=ForgeWriter(path / "torchs", 2, about={"x": [1]}, must_match={"seed": 1}))
    found = Checkpoints(path / "torchs", ranks, keep=2, background=False).newest({"seed": 1}, pytest.fail)
    assert (found.step, found.about, found.world_size) == (2, {"x": [1]}, ranks.world_size)
    for shift in (0, 1, 4):
        expected = {name: divided(value(name, 2), WAYS[(i + shift) % len(WAYS)]) for i, name in enumerate(TENSORS)}
        into = empty_like(expected)
        found.read(into)
        for name, tensor in into.items():
            assert torch.equal(local(tensor), local(expected[name])), (name, shift)
            compared += 1
    return compared


@pytest.mark.slow
def test_what_one_wrote_the_other_reads(tmp_path):
    """On three ranks, each tensor divided in every way, shards of no rows and scalars included: the same bits."""
    assert run_on_ranks(by_torch, 3, str(tmp_path)) == [(2 * len(WAYS) + 3) * len(TENSORS)] * 3


@pytest.fixture
def saved(tmp_path):
    """A state of one process: its directory and its tensors."""
    tensors = {name: value(name, 1) for name in TENSORS}
    Checkpoints(tmp_path / "states", Alone(), keep=1, background=False).save(1, tensors, {})
    return tmp_path / "states" / "step_1", tensors


@ALONE
def test_no_pickle_is_read_or_written(saved, tmp_path, monkeypatch):
    """Neither torch.load nor pickle is called, and every file is JSON or safetensors."""

    def never(*_args, **_kwargs):
        raise AssertionError("a pickle")

    path, tensors = saved
    for module, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "dump"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, never)
    into = empty_like(tensors)
    dcp.load(into, storage_reader=ForgeReader(path))
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    dcp.save(dict(tensors), storage_writer=ForgeWriter(tmp_path / "w", 0))
    assert sorted(file.name for file in (tmp_path / "w" / "step_0").iterdir()) == ["manifest.json", "rank_0.safetensors"]
    assert json.loads((tmp_path / "w" / "step_0" / "manifest.json").read_text())["step"] == 0


@ALONE
@pytest.mark.parametrize("damage", ["flipped", "cut", "no manifest", "edited", "no such directory"])
def test_damage_is_refused(saved, damage):
    """A byte that differs, a file that is shorter, a manifest that is gone or edited: nothing is loaded, and it is named."""
    path, tensors = saved
    file, manifest = path / "rank_0.safetensors", path / "manifest.json"
    if damage == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 4
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "edited":
        manifest.write_text(manifest.read_text().replace('"step":1', '"step":2'))
    else:
        path = path.parent / "step_9"
    into = empty_like(tensors)
    with pytest.raises(CheckpointException, match="is not whole|manifest|Damaged"):
        dcp.load(into, storage_reader=ForgeReader(path))
    assert all(torch.equal(into[name], empty_like(tensors)[name]) for name in tensors)


@ALONE
def test_a_state_that_does_not_fit_is_refused(saved):
    """Another dtype is not converted silently; a name that was not saved and another shape are torch's own errors."""
    path, _ = saved
    for into, words in [
        ({"model/odd": torch.zeros(7, 3, dtype=torch.bfloat16)}, "holds model/odd as torch.float32, and torch.bfloat16"),
        ({"model/none": torch.zeros(1)}, "model/none"),
        ({"model/odd": torch.zeros(3, 7)}, "Size mismatch"),
    ]:
        with pytest.raises(CheckpointException, match=words):
            dcp.load(into, storage_reader=ForgeReader(path))


@ALONE
def test_what_is_no_tensor_is_refused_and_leaves_nothing(tmp_path):
    """Values that torch would pickle, and dtypes without a name in a file, are refused by name."""
    complex_numbers = torch.zeros(1, dtype=torch.complex64)
    for bad, words in [({"a": object()}, "a is no tensor"), ({"z": complex_numbers}, "z cannot be kept")]:
        with pytest.raises(CheckpointException, match=words):
            dcp.save(bad, storage_writer=ForgeWriter(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []
    for step in (7.0, True, "7"):
        with pytest.raises(ValueError, match="a whole number from 0, not"):
            ForgeWriter(tmp_path, step)
    with pytest.raises(ValueError, match="step must be 0 or more"):
        ForgeWriter(tmp_path, -1)
    with pytest.raises(CheckpointError, match="must be JSON"):
        ForgeWriter(tmp_path, 1, about={"x": {1, 2}})


@ALONE
def test_a_place_given_to_torch(saved, tmp_path):
    """checkpoint_id names the state to read; a writer refuses another place than its own."""
    path, tensors = saved
    into = empty_like(tensors)
    dcp.load(into, checkpoint_id=path, storage_reader=ForgeReader(tmp_path / "elsewhere"))
    assert torch.equal(into["model/odd"], tensors["model/odd"])
    assert ForgeReader.validate_checkpoint_id(path)
    assert not ForgeReader.validate_checkpoint_id(tmp_path)
    assert ForgeWriter.validate_checkpoint_id(path)
    with pytest.raises(CheckpointError, match="leave it out"):
        dcp.save(dict(tensors), checkpoint_id=tmp_path / "other", storage_writer=ForgeWriter(tmp_path, 3))
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "step_3", storage_writer=ForgeWriter(tmp_path, 3))
    assert (tmp_path / "latest").read_text() == "step_3\n"


@ALONE
@pytest.mark.parametrize("by", ["Checkpoint.read", "dcp.load"])
def test_a_state_of_version_1_is_read(by, tmp_path):
    """What forge-dist 0.4.0 saved on two ranks (every tensor with its own chunks in the manifest) is read as it was."""
    shutil.copytree(Path(__file__).parent / "version_1", tmp_path / "full_state")
    found = Checkpoints(tmp_path / "full_state", Alone(), keep=2, background=False).newest({"seed": 1}, pytest.fail)
    assert (found.step, found.world_size, found.about) == (7, 2, {"position": {"step": 7}})
    numbers = torch.arange(15, dtype=torch.float32).reshape(5, 3)
    expected = {
        "model/layer.weight": numbers,
        "model/other.weight": numbers + 100,
        "model/norm.weight": (torch.arange(3) / 4).to(torch.bfloat16),
        "optimizer/layer.weight/exp_avg": numbers / 8,
        "optimizer/layer.weight/step": torch.tensor(7.0),
    }
    into = empty_like(expected)
    if by == "dcp.load":
        dcp.load(into, storage_reader=ForgeReader(found.path))
    else:
        found.read(into)
    assert all(torch.equal(into[name], expected[name]) for name in expected)


def test_a_save_after_one_of_version_1_goes_on(tmp_path):
    """The next save counts on from it, and the older one is still there to be read."""
    shutil.copytree(Path(__file__).parent / "version_1", tmp_path / "full_state")
    checkpoints = Checkpoints(tmp_path / "full_state", Alone(), keep=2, background=False)
    checkpoints.newest({"seed": 1}, pytest.fail)
    checkpoints.save(8, {"w": torch.ones(2)}, {})
    assert json.loads((tmp_path / "full_state" / "step_8" / "manifest.json").read_text())["serial"] == 2
    assert checkpoints.at(tmp_path / "full_state" / "step_7", {"seed": 1}).step == 7
