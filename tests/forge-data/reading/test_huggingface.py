"""Datasets that `datasets` saved or fetches."""

import time

import datasets
import huggingface_hub
import pytest
from datasets import Dataset, DatasetDict

from forge_data import DataError
from forge_data.reading import _huggingface
from forge_data.reading._huggingface import open_hub
from forge_data.reading._sources import resolve

ROWS = [
    {"messages": [{"role": "user", "content": f"n {i}"}, {"role": "assistant", "content": "x", "name": "bot"}]}
    for i in range(2500)
]
MORE = [{"messages": [{"role": "user", "content": "only", "name": None}]}]


@pytest.fixture
def splits(tmp_path):
    """Directory of a saved dataset with two splits."""
    made = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(MORE)})
    made.save_to_disk(str(tmp_path / "talk"))
    return tmp_path / "talk"


def fields(source):
    return [record.fields for record in source.records()]


def test_a_split(splits):
    """A saved split is read in order, null fields removed, with its name and count."""
    (source,) = resolve(f"{splits}:train")
    assert source.name == "talk:train"
    assert source.path == f"{splits}:train"
    assert source.count() == 2500
    assert fields(source) == ROWS
    assert [record.place for record in source.records()][-1] == "talk:train:2500"
    (other,) = resolve(f"{splits}:test")
    assert fields(other) == [{"messages": [{"role": "user", "content": "only"}]}]
    assert source.digest() != other.digest()
    assert source.digest() == resolve(f"{splits}:train")[0].digest()


def test_which_split(splits):
    """Of several splits one must be named, and it must exist."""
    with pytest.raises(DataError, match="talk holds the splits train, test, and no split was named; give .*talk:train"):
        resolve(splits)
    with pytest.raises(DataError, match="and there is no 'valid'"):
        resolve(f"{splits}:valid")


def test_one_dataset(tmp_path):
    """A dataset saved by itself needs no split, also through a view."""
    whole = Dataset.from_list(ROWS)
    whole.select([5, 3]).save_to_disk(str(tmp_path / "two"))
    (source,) = resolve(tmp_path / "two")
    assert (source.name, fields(source)) == ("two", [ROWS[5], ROWS[3]])
    with pytest.raises(DataError, match="two is one dataset without splits"):
        resolve(f"{tmp_path}/two:train")


def test_a_view(tmp_path):
    """The digest is of the rows as they are read, whatever files are beneath."""
    whole = Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "a"))
    whole.select(range(2499, -1, -1)).save_to_disk(str(tmp_path / "b"))
    whole.select(range(2500)).save_to_disk(str(tmp_path / "c"))
    one, two, three = (resolve(tmp_path / name)[0].digest() for name in "abc")
    assert one == three != two


def test_damaged(splits):
    """A saved dataset that lacks a file is refused by name."""
    for path in (splits / "train").glob("*.arrow"):
        path.unlink()
    with pytest.raises(DataError, match="talk is not a saved dataset that can be read"):
        resolve(f"{splits}:train")


def test_on_the_hub(monkeypatch):
    """`org/name:split` is what `datasets` loads under that name; a configuration comes before the split."""
    asked = []

    def load(*args, **more):
        asked.append((args, more))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    (source,) = resolve("org/name:train")
    assert (source.name, source.path, source.count()) == ("org/name:train", "org/name:train", 2500)
    resolve("org/na.me:fr:train[:10%]")
    assert asked == [(("org/name", None), {"split": "train"}), (("org/na.me", "fr"), {"split": "train[:10%]"})]


def test_not_to_be_had(monkeypatch):
    """A dataset that does not exist, or cannot be reached, is one message."""

    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'org/name' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    with pytest.raises(
        DataError, match="org/name:train is no file here, and as a dataset on the Hub .* ConnectionError: Couldn't reach"
    ):
        open_hub("org/name:train")


@pytest.mark.parametrize("silent", [False, True])
def test_without_a_network_it_is_given_up_soon(monkeypatch, silent, tmp_path):
    """`datasets` tries for half a minute; what it has in its cache it is left to find, and offline it does not try."""

    def ask(*_, **__):
        if silent:
            time.sleep(5)
        raise OSError("Name or service not known")

    loaded = []
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *_, **__: loaded.append(name) or Dataset.from_list(ROWS))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    monkeypatch.setattr(_huggingface, "_SECONDS", 0.1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    said = "no answer within 0.1 s" if silent else "Name or service not known"
    with pytest.raises(DataError, match=f"org/Some-Name:train is no file here, .* cannot be asked: {said}; check the name"):
        open_hub("org/Some-Name:train")
    assert not loaded
    (tmp_path / "org___some-name").mkdir()
    open_hub("org/Some-Name:train")
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    open_hub("org/other:train")
    assert loaded == ["org/Some-Name", "org/other"]
