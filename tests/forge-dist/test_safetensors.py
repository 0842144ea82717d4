"""Headers of safetensors files."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file

from forge_dist._safetensors import read_directory, read_header

TENSORS = {"a": torch.zeros(3, 2), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}


def test_a_header_says_what_safetensors_wrote(tmp_path):
    """Name, dtype, shape and size are those of the library's own file."""
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "model.safetensors")
    assert {name: (t.dtype, t.shape, t.size) for name, t in found.items()} == {
        "a": ("F32", (3, 2), 24),
        "b": ("BF16", (5,), 10),
        "c": ("I64", (), 8),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(tmp_path, data):
    """Whatever the place where a file ends too early, or how much is appended, it is not taken for whole."""
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    size = data.draw(st.integers(0, len(whole) + 20).filter(lambda n: n != len(whole)))
    file.write_bytes((whole + bytes(20))[:size])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_header(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (8).to_bytes(8, "little") + b"not json",
    ],
)
def test_another_kind_of_file_is_refused(tmp_path, content):
    """An empty file, a Git LFS pointer or JSON of another shape is named, not decoded."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole"):
        read_header(file)


def write_shards(folder: Path) -> Path:
    """Two files and their index."""
    save_file({"a": TENSORS["a"]}, folder / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    return index


def test_shards_are_read_through_their_index(tmp_path):
    """The names of all files that the index lists, each with its file."""
    write_shards(tmp_path)
    assert {name: t.file.name for name, t in read_directory(tmp_path).items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }


def test_a_missing_shard_is_named(tmp_path):
    """A file that the index lists and that is not there is an error of its own."""
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors is missing"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "model-2.safetensors", "b": "model-2.safetensors"}}', "lacks the tensor a"),
        ('{"weight_map": {"a": "model-1.safetensors", "z": "model-1.safetensors"}}', "lacks the tensor z"),
        ("{}", "not an index"),
        ("[", "not an index"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, index, message):
    """A tensor that is not where the index says, and an index that is none, are refused."""
    write_shards(tmp_path).write_text(index)
    with pytest.raises(ValueError, match=message):
        read_directory(tmp_path)


def test_no_weights_at_all(tmp_path):
    """Without either file the error names both."""
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_directory(tmp_path)
