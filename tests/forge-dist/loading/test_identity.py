"""A model directory is identified by its content."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forge_dist import model_identity
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


def test_files_are_read_once(base, monkeypatch):
    """A run exports often: what did not change is not read again."""
    before = model_identity(base)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was read again"))
    assert model_identity(base) == before


def test_a_hub_name_stays_one():
    """Nothing is fetched to tell it."""
    assert model_identity("org/name") == "hub:org/name"
