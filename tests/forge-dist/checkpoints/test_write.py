"""A rank's file, byte for byte."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from forge_dist.checkpoints._plan import DTYPES, local_pieces
from forge_dist.checkpoints._write import write_file

MANY = {
    "scalar": torch.tensor(2.5),
    "column": torch.randn(3, 5).t(),
    "nothing": torch.zeros(0, 4),
    "byte": torch.tensor([1, 2, 255], dtype=torch.uint8),
    **{name: torch.randint(0, 2, (3, 2)).to(dtype) for name, dtype in DTYPES.items()},
    "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else list(tensor.shape)


def test_every_format_comes_back(tmp_path):
    """Every dtype, scalars, transposed and empty tensors: the safetensors library reads the very bits; size and hash are the
    file's.
    """
    file = tmp_path / "rank_0.safetensors"
    pieces, values = local_pieces(MANY)
    written = write_file(file, pieces, values, list(values))
    assert written.size == file.stat().st_size
    assert written.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    found = load_file(file)
    assert found.keys() == MANY.keys()
    for name, tensor in MANY.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_large_tensors_are_written_in_blocks(tmp_path, monkeypatch):
    """A tensor of many blocks, of which each write takes a part only, is whole in the file and in its hash."""
    from forge_dist.checkpoints import _write as _checkpoint_write

    monkeypatch.setattr(_checkpoint_write, "_BLOCK", 64)
    real = open

    class Stubborn:
        """A file of which each write takes at most seven bytes, as a pipe or a network disk may."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            return self.file.write(data[:7])

        def fileno(self):
            return self.file.fileno()

    monkeypatch.setattr("builtins.open", lambda *a, **k: Stubborn(real(*a, **k)))
    pieces, values = local_pieces({"w": torch.arange(1001)})
    file = tmp_path / "rank_0.safetensors"
    written = write_file(file, pieces, values, ["w"])
    monkeypatch.undo()
    assert written.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert torch.equal(load_file(file)["w"], torch.arange(1001))


def test_it_is_durable_when_it_is_reported(tmp_path, monkeypatch):
    """The bytes are on the disk, all of them, before size and hash are handed on to be listed."""
    import os

    file, synced = tmp_path / "rank_0.safetensors", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    pieces, values = local_pieces({"w": torch.arange(1001)})
    written = write_file(file, pieces, values, ["w"])
    assert synced == [written.size]


def test_torch_reads_it_too(tmp_path):
    """torch's own safetensors reader loads the file with torch.distributed.checkpoint.load: the format is not ours alone."""
    import torch.distributed.checkpoint as dcp

    tensors = {"a": torch.randn(4, 3), "b": torch.randn(6).bfloat16()}
    pieces, values = local_pieces(tensors)
    write_file(tmp_path / "rank_0.safetensors", pieces, values, list(values))
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())


def test_nothing_is_written_over(tmp_path):
    """A file that is there already belongs to somebody else."""
    file = tmp_path / "rank_0.safetensors"
    file.write_text("theirs")
    pieces, values = local_pieces({"w": torch.ones(1)})
    with pytest.raises(FileExistsError):
        write_file(file, pieces, values, ["w"])
    assert file.read_text() == "theirs"


def test_entries_are_aligned(tmp_path):
    """Every tensor begins at a multiple of its item size, so that it can be mapped into memory as it is."""
    pieces, values = local_pieces(MANY)
    file = tmp_path / "rank_0.safetensors"
    write_file(file, pieces, values, list(values))
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == set(MANY)
    import json

    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in MANY.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name
