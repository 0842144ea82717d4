"""Arguments of media beside those of tokens: which are a number a token, positions, and what is made of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forge_algos import PackedBatchError
from forge_algos.batches._media import _positions, continued
from forge_algos.heads._media import MediaDocument, longer

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


def test_a_mask_of_as_many_frames_as_tokens():
    """It is a clip's: a completion behind the prompt leaves it as it is, and lengthens the tokens' own numbers."""
    media = {
        "input_features": np.zeros((1, 5, 8), np.float32),
        "input_features_mask": np.ones((1, 5), np.bool_),
        "mm_token_type_ids": np.array([[0, 3, 3, 0, 0]]),
    }
    found = continued(media, 5, 7)
    assert found["input_features_mask"].shape == (1, 5)
    assert found["mm_token_type_ids"].tolist() == [[0, 3, 3, 0, 0, 0, 0]]
    document = longer(MediaDocument(np.array([7, 60, 60, 8, 9]), media, [(1, 3)]), 2)
    assert document.inputs["input_features_mask"].shape == (1, 5)
    assert document.inputs["mm_token_type_ids"].tolist() == [[0, 0, 0, 3, 3, 0, 0]]


def test_words_before_a_document_are_no_marks_of_media():
    """Qwen3-Omni counts positions by the marks around an image, and of one without an image by what is not there."""
    start, pad, stop = 50, 60, 51
    given = MediaDocument(np.array([5, start, pad, pad, stop, 6, 7]), {}, [(2, 4)])
    assert longer(given, 4).input_ids.tolist() == [5, 6, 7, 5, 5, start, pad, pad, stop, 6, 7]
    marks = MediaDocument(np.array([start, pad, stop]), {}, [(1, 2)])
    assert longer(marks, 2).input_ids.tolist() == [start, stop, start, pad, stop]
