"""Python's collector of cycles is off while batches are made, and afterwards as it was."""

import gc
import weakref

import pytest

from forge_data import DataError, prepare
from forge_data.preparing._worker import collect_per_batch


class Knot:
    """An object that only the collector frees."""

    def __init__(self):
        self.itself = self


def test_cycles_are_freed_batch_by_batch():
    """Nothing is collected while a batch is made; after it, its cycles are gone."""
    alive = []

    def batches():
        for _ in range(3):
            assert not gc.isenabled()
            assert not any(reference() for reference in alive)
            alive.append(weakref.ref(Knot()))
            yield len(alive)

    assert gc.isenabled()
    assert list(collect_per_batch(batches())) == [1, 2, 3]
    assert gc.isenabled()


def test_what_is_in_use_grows_no_older():
    """After a batch only the newest generation is collected, and everything after 64 batches."""
    looked: list[int] = []

    def note(phase, info):
        if phase == "stop":
            looked.append(info["generation"])

    batches = collect_per_batch(iter(range(65)))
    next(batches)
    gc.callbacks.append(note)
    try:
        for _ in range(64):
            next(batches)
    finally:
        gc.callbacks.remove(note)
        batches.close()
    assert looked == [0] * 63 + [2]


def test_off_stays_off():
    """A collector that was off stays off."""
    gc.disable()
    try:
        assert list(collect_per_batch(iter([1]))) == [1]
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("num_proc", [None, 1])
def test_it_is_back_when_a_row_is_refused(write_rows, chat, chatml_tokenizer, tmp_path, num_proc):
    """An error that is kept does not keep the collector off."""
    rows = write_rows([chat(("user", "a"), ("assistant", "b")), {"messages": 1}])
    with pytest.raises(DataError) as kept:
        prepare(rows, chatml_tokenizer, tmp_path / "store", num_proc=num_proc, progress=False)
    assert kept.value.__traceback__ is not None
    assert gc.isenabled()
