"""Models whose layers compute rows with images alone are trained by one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forge
from forge.tasks._images import _check_layers_of_images


@pytest.mark.parametrize(("ranks", "layers"), [(2, [1]), (1, [1]), (2, None)])
def test_layers_of_images_alone(ranks: int, layers: list[int] | None) -> None:
    """Ranks would wait for each other where a row has no image: one error before a step, also of a wrapped model."""
    inner = torch.nn.Linear(1, 1)
    inner.config = SimpleNamespace(cross_attention_layers=layers)  # type: ignore[assignment]
    settings = SimpleNamespace(model=SimpleNamespace(model_path="a/llama"))
    run: Any = SimpleNamespace(model=torch.nn.Sequential(inner), ranks=SimpleNamespace(world_size=ranks), settings=settings)
    if ranks == 1 or not layers:
        _check_layers_of_images(run)
        return
    with pytest.raises(forge.SettingsError, match="a/llama has layers .* image.*nproc_per_node=1") as caught:
        _check_layers_of_images(run)
    assert caught.value.exit_status == 2
