"""Parts of a model of several modalities that train."""

from types import SimpleNamespace

import pytest
import torch

from forge import SettingsError
from forge.tasks import _parts


@pytest.mark.parametrize("has", [True, False])
def test_a_part_that_a_model_has_none_of(has, monkeypatch):
    """A model without a projector (Inkling) trains its tower; one whose projector does not train is refused."""
    tower, projector = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    model = torch.nn.Module()
    model.tower, model.config = tower, None
    parts = {"language_model": [], "vision_tower": [tower], "multi_modal_projector": [projector] if has else []}
    monkeypatch.setattr(_parts, "chosen_parts", lambda _: "freeze_vision_tower=False")
    monkeypatch.setattr(_parts, "_parts_of", lambda _: parts)
    monkeypatch.setattr("forge_dist.is_multimodal", lambda _: True)
    settings = SimpleNamespace(
        parts=SimpleNamespace(freeze_language_model=False, freeze_vision_tower=False, freeze_multi_modal_projector=False),
        adapter=SimpleNamespace(adapter="lora", adapter_path=None, target_modules=None),
    )
    if has:
        with pytest.raises(SettingsError, match="freeze_multi_modal_projector=False: nothing of it would train"):
            _parts.check_trained(settings, model)
    else:
        assert _parts.check_trained(settings, model)["vision_tower"] == [tower]
