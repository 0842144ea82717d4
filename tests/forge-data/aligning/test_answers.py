"""Completions as a teacher reads them: what a row with that text as its answer would be, and no more where one is cut off."""

from functools import cache

import numpy as np
import pytest

from forge_data import AnswerReader, prepare_taught
from forge_data.aligning._spelling import Spelling

from ..families import FAMILIES

WRITTEN = ("Paris, 中文 🙂 it is.", "def f(x):\n    return 1\n\nf(2)", "naïve  two  blanks")
PAIRS = [
    ("qwen3", "llama-3"), ("llama-2", "qwen2.5"), ("qwen2.5", "gemma"), ("qwen3", "chatml"), ("gemma", "llama-2"),
    ("llama-3", "qwen3"),
]  # fmt: skip


@cache
def tokenizers(*names):
    return [FAMILIES[name].tokenizer() for name in names]


def last_run(sample):
    """Where the last learned stretch of a sample begins."""
    learned = np.flatnonzero(sample.labels != -100)
    return int(learned[np.flatnonzero(np.diff(learned) > 1)[-1] + 1] if (np.diff(learned) > 1).any() else learned[0])


@pytest.fixture
def given(request, chat, write_rows, tmp_path):
    """Both tokenizers, two rows as both have them, and for each of `WRITTEN` the same rows with that as their last answer."""
    own, other = tokenizers(*request.param)
    rows = [
        row
        for answer in ("An answer of its own.", *WRITTEN)
        for row in (
            chat(("user", "What is the capital of France?"), ("assistant", answer)),
            chat(("user", "code"), ("assistant", "x = 1"), ("user", "and then"), ("assistant", answer)),
        )
    ]
    store = prepare_taught(write_rows(rows), own, other, tmp_path / "store", turns="history", progress=False)
    return own, other, store


@pytest.mark.parametrize("given", PAIRS, indirect=True, ids="-".join)
def test_is_what_a_row_of_that_text_would_be(given):
    """The teacher's tokens and the spans are those of a row with the completion as its answer, in any two templates.

    One that is cut off has no end on either side, and its spans are those of the whole one as far as the tokens are.
    """
    own, other, store = given
    reader, ends_of = AnswerReader(own, other), [theirs for _, theirs in store.teacher_ends]
    for index in range(2, len(store)):
        sample, (theirs,), begin = store[index % 2], store.taught(index % 2)[0], int(store.teacher_runs[index % 2])
        written, ((whole,), spans) = store[index], store.taught(index)
        at, other_at = last_run(written), int(store.teacher_runs[index])
        assert np.array_equal(whole[:other_at], theirs[:begin])
        asked = (sample.input_ids, sample.labels), theirs, begin
        run = written.input_ids[at : np.flatnonzero(written.labels != -100)[-1] + 1]
        found = reader(*asked, run, ended=True)
        assert found.ids.tolist() == whole[other_at:].tolist()
        assert found.spans.tolist() == (spans[spans[:, 0] >= at] - [at, at, other_at, other_at]).tolist()
        for size in range(len(run)):
            cut = reader(*asked, run[:size], ended=False)
            alike = min(len(cut.ids), len(found.ids))
            alike = int(np.append(np.flatnonzero(cut.ids[:alike] != found.ids[:alike]), alike)[0])
            # The last piece before the cut may have been of a longer token of the teacher's.
            spans = [[span for span in each.spans.tolist() if span[3] < alike] for each in (cut, found)]
            assert spans[0] == spans[1]
            assert (cut.spans[:, 1] <= size).all()
            assert ends_of[-1] not in cut.ids
    ends = np.flatnonzero([int(token) in Spelling(own).special for token in run])
    at_once = reader(*asked, run[ends[-1] :], ended=True)
    assert at_once.spans[:, [0, 1, 3]].tolist() == [[0, len(run) - ends[-1], len(at_once.ids)]]
