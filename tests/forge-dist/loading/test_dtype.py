"""The float type that a model is stored in."""

import pytest
import torch
from safetensors.torch import save_file

from forge_dist import ModelError, base_dtype


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


def test_a_path_that_is_none_is_refused():
    """The same refusal as everywhere, offline hub included."""
    with pytest.raises(ModelError, match="neither"):
        base_dtype("/no/such/model")
    with pytest.raises(ModelError, match="nobody/no-such-model"):
        base_dtype("nobody/no-such-model")
