"""Models whose layers compute rows with images alone are not divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forge
from forge.tasks._media import check_layers_of_media


@pytest.mark.parametrize(
    ("ranks", "strategy", "layers"), [(2, "fsdp2", [1]), (2, "ddp", [1]), (1, "single", [1]), (2, "fsdp2", None)]
)
def test_layers_of_images_alone(ranks: int, strategy: str, layers: list[int] | None) -> None:
    """Ranks would wait for each other where a row has no image: one error before a step, also of a wrapped model."""
    inner = torch.nn.Linear(1, 1)
    inner.config = SimpleNamespace(cross_attention_layers=layers)  # type: ignore[assignment]
    run: Any = SimpleNamespace(
        model=torch.nn.Sequential(inner),
        ranks=SimpleNamespace(world_size=ranks),
        strategy=SimpleNamespace(name=strategy),
        settings=SimpleNamespace(model=SimpleNamespace(model_path="a/llama")),
    )
    if strategy != "fsdp2" or not layers:
        check_layers_of_media(run)
        return
    with pytest.raises(
        forge.SettingsError, match=r"a/llama has layers .* image.* strategy=fsdp2 divides .*strategy=ddp"
    ) as caught:
        check_layers_of_media(run)
    assert caught.value.exit_status == 2
