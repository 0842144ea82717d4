"""The float type that a model is stored in."""

import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from forge_dist import ModelError, base_dtype, weight_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_files_decide(save_base, edit_config, dtype):
    """The stored type is found, whatever config.json says."""
    path = save_base(dtype=dtype)
    edit_config(path, dtype="float64")
    assert base_dtype(path) == dtype


def test_most_bytes_decide(base, tmp_path):
    """Of mixed types, the one of most bytes; whole numbers do not count."""
    tensors = {"a": torch.zeros(9, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.zeros(99, dtype=torch.int64)}
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    assert base_dtype(base) == torch.bfloat16


@pytest.mark.parametrize(
    ("message", "dtype"), [("bfloat16", torch.bfloat16), ("nonsense", torch.float32), (None, torch.float32)]
)
def test_without_floats_the_config_decides(base, tmp_path, edit_config, message, dtype):
    """Where the files hold no float, config.json is asked; float32 where it says nothing usable."""
    save_file({"c": torch.zeros(3, dtype=torch.int64)}, tmp_path / "base" / "model.safetensors")
    edit_config(base, dtype=message)
    assert base_dtype(base) == dtype


def test_the_size_of_weights_counts_the_files_that_are_here(base, tmp_path, monkeypatch):
    """Of a directory, and of a hub name the files in its cache; 0 where there are none."""
    files = [tmp_path / "base" / "model.safetensors", tmp_path / "base" / "more.safetensors"]
    save_file({"a": torch.zeros(9)}, files[1])
    size = sum(file.stat().st_size for file in files)
    assert weight_bytes(base) == size
    cached = tmp_path / "hub" / "models--some--model"
    shutil.copytree(base, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert weight_bytes("some/model") == size
    snapshot = cached / "snapshots" / ("0" * 40)
    (snapshot / "consolidated.safetensors").write_bytes(b"the same again")
    (snapshot / "gone.safetensors").symlink_to("../../blobs/gone")
    assert weight_bytes("some/model") == size
    for file in files:
        file.unlink()
    assert weight_bytes(base) == 0


def test_a_path_that_is_none_is_refused():
    """The same refusal as everywhere, offline hub included."""
    with pytest.raises(ModelError, match="neither"):
        base_dtype("/no/such/model")
    with pytest.raises(ModelError, match="nobody/no-such-model"):
        base_dtype("nobody/no-such-model")
