"""Parts of a model of several modalities that train."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import forge_data
from forge import SettingsError
from forge.tasks import _media, _parts
from forge.tasks.items._text_pairs import TextPairs


@pytest.mark.parametrize(
    ("has", "adapter", "why"),
    [(True, "lora", "adapter=lora is put into linear"), (True, "none", "of the rows reaches it"), (False, "lora", "")],
)
def test_a_part_that_a_model_has_none_of(has, adapter, why, monkeypatch):
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
        adapter=SimpleNamespace(adapter=adapter, adapter_path=None, target_modules=None, unfrozen_parameters=None),
    )
    if has:
        with pytest.raises(SettingsError, match=f"freeze_multi_modal_projector=False: nothing of it would train: .*{why}"):
            _parts.check_trained(settings, model)
    else:
        assert _parts.check_trained(settings, model)["vision_tower"] == [tower]


def test_samples_of_every_kind():
    """Beside those that are tried stands the first sample of each kind of media that they have not."""

    class Store(list):
        media_kinds, has_media = ("image", "audio"), True
        source = "rows.jsonl:{}".format

        @property
        def media_counts(self):
            return np.array([[len(each.media), 0] for each in self])

    kinds = ((), ("image",), ("image",), ("audio", "image"), ("audio",))
    store = Store(SimpleNamespace(media=[SimpleNamespace(kind=kind) for kind in each]) for each in kinds)
    items = [SimpleNamespace(store=store)]
    assert _media._of_other_kinds(store[1:3], items) == [(store[3], "rows.jsonl:3")]
    assert _media._of_other_kinds(store[3:4], items) == []


def test_texts_of_every_kind():
    """Of a row of several texts it is the text alone, as the model computes it."""

    class Store(list):
        media_kinds, has_media, media_counts = ("image", "video"), True, np.array([[2, 4]])
        source = "rows.jsonl:{}".format

    media = tuple(
        forge_data.Media("a", "a.png", start=start, stop=start + 2, kind=kind) for start, kind in ((1, "image"), (5, "video"))
    )
    store = Store([SimpleNamespace(input_ids=np.arange(12), media=media, columns={"lengths": [4, 3, 5]})])
    items = TextPairs.__new__(TextPairs)
    items.store = store
    found = _media._of_other_kinds([], [items])
    assert [(text.input_ids.tolist(), text.media[0].start, place) for text, place in found] == [
        ([0, 1, 2, 3], 1, "rows.jsonl:0"),
        ([4, 5, 6], 1, "rows.jsonl:0"),
    ]
