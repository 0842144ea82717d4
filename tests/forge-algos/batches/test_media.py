"""Positions of documents with media."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos import PackedBatchError
from forge_algos.batches._media import _positions

START, CLIP, IMAGE = 90, 91, 92


class Counting(torch.nn.Module):
    """Counts as Qwen-Omni: a mark of a clip is of a clip that is given, and an image's tokens share a position."""

    config = SimpleNamespace(image_token_id=IMAGE, audio_token_id=CLIP)

    @property
    def base_model(self):
        return self

    def get_rope_index(self, input_ids, audio_seqlens=None):
        if (input_ids == START).any():
            audio_seqlens[0]
        steps = torch.ones_like(input_ids)
        steps[:, 1:][(input_ids[:, 1:] == IMAGE) & (input_ids[:, :-1] == IMAGE)] = 0
        return (steps.cumsum(-1) - 1).expand(3, *input_ids.shape), None


def test_a_mark_in_a_completion():
    """Behind a document's media its tokens are text, also a mark that a model has sampled, which transformers cannot count."""
    marked, plain = (torch.tensor([1, IMAGE, IMAGE, IMAGE, 2, 3, each, 4]) for each in (START, 3))
    media = {"pixel_values": np.zeros((1, 3))}
    found, expected = (_positions(Counting(), ids, [8], [media]) for ids in (marked, plain))
    assert found is not None
    assert expected is not None
    assert expected[1, 0].tolist() == [0, 1, 1, 1, 2, 3, 4, 5]
    assert torch.equal(found, expected)
    # One without media behind it is an error, not text.
    with pytest.raises(PackedBatchError, match="Counting counts no positions of a document with media: 'NoneType'"):
        _positions(Counting(), torch.tensor([START, IMAGE, 2]), [3], [media])
