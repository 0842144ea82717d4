"""Unpaired preferences of one class alone."""

import pytest

from forge_data import DataError, StoreError, check_classes, prepare


def rows(labels):
    return [{"prompt": f"count to {n}", "completion": f"{n}!", "label": label} for n, label in enumerate(labels)]


def test_of_both(write_rows, chatml_tokenizer, tmp_path):
    """Wanted and unwanted answers are accepted; a view that lost one of the two is refused."""
    store = prepare(write_rows(rows([True, False, True])), chatml_tokenizer, tmp_path / "store")
    check_classes(store)
    check_classes(store.select([1, 2]))
    with pytest.raises(DataError, match=r"train.jsonl:1 and every other answer that is trained on \(2\) has the label true"):
        check_classes(store.select([0, 2]))
    with pytest.raises(DataError, match="holds no answer"):
        check_classes(store.select([]))


@pytest.mark.parametrize(("label", "way_out"), [(True, "learn these with sft"), (False, "add rows with label true")])
def test_of_one(write_rows, chatml_tokenizer, tmp_path, label, way_out):
    """All wanted or all unwanted is refused with what to do."""
    store = prepare(write_rows(rows([label] * 3)), chatml_tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match=f"has the label {str(label).lower()}, .*{way_out}"):
        check_classes(store)


def test_of_no_preferences(write_rows, chatml_tokenizer, small_chats, tmp_path):
    """A store without labels is refused."""
    with pytest.raises(StoreError, match="which are desirable is known of unpaired preferences only"):
        check_classes(prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store"))
