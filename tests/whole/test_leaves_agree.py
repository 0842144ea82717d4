"""Leaves agree by shape alone: one package's output is another's input, and both count the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forge_algos
import forge_data
import forge_packing
from forge.reports._page import page

from . import reference, tiny
from .wiring import load, record

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = tiny.ragged()


@pytest.fixture(scope="module")
def store(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> forge_data.TokenStore:
    """The conversations of conftest.py, tokenized by forge_data."""
    return forge_data.prepare(
        str(chats), forge_data.load_tokenizer(str(model_dir)), tmp_path_factory.mktemp("store") / "tokens"
    )


def as_sample(example: Any) -> reference.Sample:
    """A TokenizedExample as plain lists."""
    return reference.Sample(example.input_ids.tolist(), example.labels.tolist())


@pytest.mark.parametrize("attention", ["documents", "sdpa"])
def test_the_whole_chain_equals_the_reference(store: forge_data.TokenStore, model_dir: Path, attention: str) -> None:
    """Conversations through store, plan, collate, loading and loop: losses and gradients are those of the reference."""
    chosen = forge_packing.plan(store.lengths, batch_size=9, max_tokens=150, seed=1, loss_counts=store.loss_counts)
    steps = [
        [forge_packing.collate([store[i] for i in row]) for row in chosen.micro_batches(step)]
        for step in range(chosen.num_steps)
    ]
    assert max(len(step) for step in steps) > 1
    outputs, seen = record(load(str(model_dir), attention), steps)
    plain = tiny.plain(str(model_dir))
    for step, (output, gradients) in enumerate(zip(outputs, seen, strict=True)):
        batch = [as_sample(store[i]) for i in chosen.samples(step)]
        loss, count, wanted = reference.loss_and_gradients(plain, batch)
        assert output.loss_count == count == chosen.loss_tokens[step]
        assert output.tokens == chosen.tokens[step]
        assert output.samples == len(batch)
        assert output.loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name


def test_every_package_counts_the_same_loss_tokens(store: forge_data.TokenStore) -> None:
    """The store's loss_counts, the objective's counts of a collated sample and row, and the plain definition agree."""
    plain = [sum(label != reference.NO_LOSS for label in as_sample(example).labels[1:]) for example in store]
    assert store.loss_counts.tolist() == plain
    assert store.lengths.tolist() == [len(example.input_ids) for example in store]
    objective = forge_algos.SFT()
    assert [objective.count(forge_packing.collate([example])) for example in store] == plain
    assert objective.count(forge_packing.collate(list(store))) == sum(plain)


def test_a_row_is_its_samples_and_nothing_else() -> None:
    """Token by token: ids and labels in order, the first label of each sample masked, positions from 0, all borders."""
    batch = forge_packing.collate(SAMPLES)
    ids, labels, positions, borders = [], [], [], [0]
    for sample in SAMPLES:
        for position, (token, label) in enumerate(zip(sample.input_ids, sample.labels, strict=True)):
            ids.append(token)
            labels.append(label if position else reference.NO_LOSS)
            positions.append(position)
        borders.append(len(ids))
    assert batch.input_ids.tolist() == ids
    assert batch.labels.tolist() == labels
    assert batch.position_ids.tolist() == positions
    assert batch.cu_seqlens.tolist() == borders
    assert batch.max_seqlen == max(len(sample.input_ids) for sample in SAMPLES)
    assert sum(sample.labels[0] != reference.NO_LOSS for sample in SAMPLES) > 3, "the mask must have had something to do"


def test_a_first_label_that_is_not_masked_is_not_learned(tmp_path: Path) -> None:
    """The objective masks first labels itself: a row of another packer, which left them in, gives the same loss and count."""
    ours = forge_packing.collate(SAMPLES)
    theirs = SimpleNamespace(
        input_ids=ours.input_ids,
        labels=np.concatenate([sample.labels for sample in SAMPLES]),
        position_ids=ours.position_ids,
        cu_seqlens=ours.cu_seqlens,
        max_seqlen=ours.max_seqlen,
    )
    model = load(tiny.save("llama-tied", tmp_path), "sdpa")
    found = [forge_algos.evaluate(model, [batch], objective=forge_algos.SFT()) for batch in (ours, theirs)]
    assert found[0] == found[1]


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_the_loop_takes_any_row_of_that_shape(tmp_path: Path, integer: type) -> None:
    """The shape is the contract, not the class or the width of its integers: int32 and int64 rows give one loss."""
    batch = forge_packing.collate(SAMPLES)
    row = SimpleNamespace(
        **{name: getattr(batch, name).astype(integer) for name in ("input_ids", "labels", "position_ids", "cu_seqlens")},
        max_seqlen=batch.max_seqlen,
    )
    directory = tiny.save("llama-tied", tmp_path)
    (output,), _ = record(load(directory, "documents"), [[row]])
    assert output.loss == pytest.approx(reference.evaluate(tiny.plain(directory), SAMPLES)[0], rel=1e-6)


def test_pages_have_one_look(store: forge_data.TokenStore, tmp_path: Path) -> None:
    """The token page of forge-data and the pages of the facade have the same style and the same button for dark and light."""
    forge_data.show(store, html=tmp_path / "tokens.html")
    for text in ((tmp_path / "tokens.html").read_text(), page("base.html")):
        assert all(part in text for part in forge_data.page_look())
