"""Exports of mini-trainer lose the buffers that plain transformers does not know."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from forge.backends._mini_trainer import MiniTrainerBackend


def test_buffers_are_removed_and_weights_stay(tmp_path: Path) -> None:
    """Weights, dtype and metadata stay; a file and the index lose the buffers; a file without any is not written anew."""
    buffer, weight = "model.rotary_emb.inv_freq", torch.ones(3, dtype=torch.bfloat16)
    save_file({"a.weight": weight, buffer: torch.ones(2)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b.weight": weight}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    places = {"a.weight": "model-1.safetensors", buffer: "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    before = (tmp_path / "model-2.safetensors").stat().st_mtime_ns
    MiniTrainerBackend().tidy(tmp_path)
    with safe_open(tmp_path / "model-1.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["a.weight"]
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_tensor("a.weight"), weight)
    assert (tmp_path / "model-2.safetensors").stat().st_mtime_ns == before
    assert buffer not in json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]
