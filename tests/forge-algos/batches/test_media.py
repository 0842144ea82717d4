"""Arguments of media beside those of tokens: which are a number a token, and what is made of them."""

import numpy as np

from forge_algos.batches._media import continued
from forge_algos.heads._media import MediaDocument, longer


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
