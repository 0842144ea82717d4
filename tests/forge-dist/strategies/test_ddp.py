"""Copies of a model on all ranks: layers that a row leaves out."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from forge_dist.strategies._ddp import _leaves_out_layers


def test_layers_that_rows_without_images_leave_out() -> None:
    """They are told by the configuration of the model's text part, wherever it stands."""
    inner = torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(inner)
    assert not _leaves_out_layers(model)
    inner.config = SimpleNamespace(cross_attention_layers=[])  # type: ignore[assignment]
    assert not _leaves_out_layers(model)
    inner.config = SimpleNamespace(cross_attention_layers=[3])  # type: ignore[assignment]
    assert _leaves_out_layers(model)
