"""TRL packs and collates as we do: another project's code is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import forge_packing

trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")

lengths_of_samples = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def samples(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Samples of those lengths; every third token is learned, the first one of some samples too."""
    ids = [list(range(10 * index, 10 * index + length)) for index, length in enumerate(lengths)]
    labels = [[token if (token + index) % 3 == 0 else -100 for token in row] for index, row in enumerate(ids)]
    return [{"input_ids": row, "labels": wanted} for row, wanted in zip(ids, labels, strict=True)]


@settings(max_examples=50)
@given(lengths_of_samples)
def test_a_packed_row_is_trls_padding_free_row(lengths: list[int]) -> None:
    """The same tokens in order, the same restarting positions, the same labels: none for the first token of a sample."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = samples(lengths)
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    ours = forge_packing.collate([(row["input_ids"], row["labels"]) for row in rows])
    np.testing.assert_array_equal(ours.input_ids, theirs["input_ids"][0].numpy())
    np.testing.assert_array_equal(ours.position_ids, theirs["position_ids"][0].numpy())
    np.testing.assert_array_equal(ours.labels, theirs["labels"][0].numpy())
    assert (ours.labels[ours.cu_seqlens[:-1]] == -100).all()


@settings(max_examples=20)
@given(lengths_of_samples)
def test_no_more_rows_than_trl(lengths: list[int]) -> None:
    """Best-fit decreasing here needs no more rows than TRL's best-fit decreasing, and keeps every sample whole."""
    from datasets import Dataset

    capacity = 64
    theirs = trl.pack_dataset(
        Dataset.from_list([{"input_ids": row["input_ids"]} for row in samples(lengths)]), capacity, strategy="bfd"
    )
    ours = forge_packing.pack_rows(lengths, capacity)
    assert len(ours) <= len(theirs)
    assert sorted(np.concatenate(ours).tolist()) == list(range(len(lengths)))
