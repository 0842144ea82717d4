"""Reading a store: by index, as views, in other processes; and refusing what is none."""

import json
import pickle
import shutil
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, StoreError, TokenStore, prepare
from forge_data.store._manifest import SUPERVISED, arrays_of
from forge_data.tokenizing import _tokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory, small_chats, chatml_tokenizer):
    folder = tmp_path_factory.mktemp("store")
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, small_chats)))
    return prepare(folder / "a.jsonl", chatml_tokenizer, folder / "store")


@pytest.fixture
def copy(store, tmp_path):
    """A copy of the store's directory, to be damaged."""
    return shutil.copytree(store.path, tmp_path / "copy")


def test_index(store):
    """Indices are Python's: negative ones from the end, numpy's integers too, IndexError beyond."""
    assert store[-1].input_ids.tolist() == store[11].input_ids.tolist() == store[np.int64(11)].input_ids.tolist()
    assert len(list(store)) == 12
    for index in (12, -13):
        with pytest.raises(IndexError, match=f"sample {index} of a store of 12"):
            store[index]
    for index in ("0", [0, 1], np.array([0, 1])):
        with pytest.raises(TypeError, match=r"a whole number or a slice, not \w+; select\(\.\.\.\) takes many"):
            store[index]


@pytest.mark.parametrize(
    "template", [None, "", "{{ messages }}\r\n", {"default": "{{ a }}", "tool": "{{ b }}"}, {"tool": "{{ b }}"}]
)
def test_the_chat_template_of_its_tokenizer(template, tmp_path, chatml_tokenizer, monkeypatch):
    """One, several, or none: what its tokenizer has; of one the tokenizer is not loaded."""
    tokenizer = deepcopy(chatml_tokenizer)
    tokenizer.chat_template = template
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "len": 3}))
    made = TokenStore.from_jsonl(tokens, tmp_path / "made", tokenizer=tokenizer)
    assert made.chat_template == made.select([0]).chat_template == made.tokenizer().chat_template
    assert bool(made.chat_template) == bool(template)
    monkeypatch.setattr(_tokenizer, "load_tokenizer", None)
    if isinstance(template, str) and template:
        assert "{{ messages }}" in made.chat_template
        (made.path / "tokenizer" / "chat_template.jinja").write_text("{{ other }}")
        assert made.chat_template == "{{ other }}"


def test_the_chat_template_in_an_older_file(copy):
    """transformers once wrote it into tokenizer_config.json; a file of its own comes before that."""
    opened = TokenStore.open(copy)
    file = copy / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ older }}"}))
    assert opened.chat_template == opened.tokenizer().chat_template != "{{ older }}"
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    assert opened.chat_template == opened.tokenizer().chat_template == "{{ older }}"


def test_no_chat_template_without_a_tokenizer(tmp_path):
    """It is said that the store was made without one, as for the tokenizer itself."""
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "len": 3}))
    made = TokenStore.from_jsonl(tokens, tmp_path / "made")
    with pytest.raises(StoreError, match="was made from token ids without a tokenizer"):
        made.chat_template  # noqa: B018 - read for its error


def test_read_only(store):
    """Arrays on disk cannot be changed through an example."""
    with pytest.raises(ValueError, match="read-only"):
        store[0].input_ids[0] = 1


def test_repr(store):
    """A store prints what it is."""
    assert f"samples=12, tokens={store.lengths.sum()})" in repr(store)


@given(first=st.lists(st.integers(0, 11), max_size=15), data=st.data())
def test_views(store, first, data):
    """A view, and a view of a view, keep samples, lengths, loss counts, sources and accounting."""
    view = store.select(np.array(first, dtype=np.int64))
    second = data.draw(st.lists(st.integers(0, len(first) - 1), max_size=5)) if first else []
    inner = view.select(second)
    for seen, indices in ((view, first), (inner, [first[i] for i in second])):
        assert len(seen) == len(indices)
        assert seen.lengths.tolist() == store.lengths[indices].tolist() if indices else not len(seen.lengths)
        assert seen.loss_counts.dtype == seen.lengths.dtype == np.int64
        assert [seen.loss_counts[i] for i in range(len(seen))] == [store[i].loss_count for i in indices]
        assert [seen.source(i) for i in range(len(seen))] == [store.source(i) for i in indices]
        assert [x.labels.tolist() for x in seen] == [store[i].labels.tolist() for i in indices]
        assert seen.accounting == store.accounting
    assert inner.fingerprint == store.select(np.array([first[i] for i in second], dtype=np.int64)).fingerprint


def test_fingerprints_of_views(store):
    """A view's fingerprint depends on its samples and their order."""
    seen = {
        store.fingerprint,
        store.select([0, 1]).fingerprint,
        store.select([1, 0]).fingerprint,
        store.select([0, 2]).fingerprint,
    }
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("indices", "error"),
    [([12], IndexError), ([-1], IndexError), ([0.5], TypeError), ([[0]], TypeError), ([True] * 12, TypeError)],
)
def test_select_refuses(store, indices, error):
    """Indices outside the store, and values that are no indices, are refused."""
    with pytest.raises(error):
        store.select(indices)


def test_split(store):
    """A split is disjoint and complete, repeatable, and different for another seed."""
    train, held_out = store.split(0.25, seed=42)
    assert (len(train), len(held_out)) == (9, 3)
    both = [view.source(i) for view in (train, held_out) for i in range(len(view))]
    assert sorted(both) == sorted(store.source(i) for i in range(12))
    assert store.split(0.25, seed=42)[1].fingerprint == held_out.fingerprint
    assert store.split(0.25, seed=43)[1].fingerprint != held_out.fingerprint


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_split_with_an_empty_part(store, fraction):
    """A share that leaves a part without samples is refused, with the numbers."""
    with pytest.raises(DataError, match=f"a held-out share of {fraction} of 12 samples leaves .* change `validation_split`"):
        store.split(fraction, seed=0)


def test_split_by_number(store):
    """A whole number holds out that many samples; all of them are too many."""
    assert [len(part) for part in store.split(5, seed=0)] == [7, 5]
    with pytest.raises(DataError, match="a held-out number of 12 of 12 samples leaves 0 to train on and 12 held out"):
        store.split(12, seed=0)


def test_pickle(store):
    """A store, or a view, is pickled as its path and comes back the same."""
    view = store.select([3, 1])
    data = pickle.dumps(view)
    assert len(data) < 5000
    back = pickle.loads(data)
    assert back.fingerprint == view.fingerprint
    assert back[0].labels.tolist() == store[3].labels.tolist()
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint


def test_pickle_of_another_store(store, copy):
    """If the store was prepared anew in between, unpickling is an error."""
    data = pickle.dumps(TokenStore.open(copy))
    message = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(message | {"fingerprint": "0" * 64}))
    with pytest.raises(StoreError, match="was prepared anew"):
        pickle.loads(data)


def test_verify(copy):
    """Opening checks sizes; verify checks every byte."""
    TokenStore.open(copy).verify()
    data = bytearray((copy / "loss_mask.bin").read_bytes())
    data[5] ^= 1
    (copy / "loss_mask.bin").write_bytes(data)
    with pytest.raises(StoreError, match="loss_mask.bin does not hold what was written"):
        TokenStore.open(copy).verify()


@pytest.mark.parametrize("name", [*arrays_of(SUPERVISED), "dropped.jsonl", "lint.json", "tokenizer/tokenizer.json"])
def test_torn(copy, name):
    """A file that is too short, too long or missing is refused by name, with the sizes."""
    data = (copy / name).read_bytes()
    for spoilt in (data[:-1], data + b"\0"):
        if spoilt == data:
            continue
        (copy / name).write_bytes(spoilt)
        with pytest.raises(StoreError, match=f"{name} is torn: {len(spoilt):,} bytes where {len(data):,} bytes were written"):
            TokenStore.open(copy)
    (copy / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is torn: missing"):
        TokenStore.open(copy)


@pytest.mark.parametrize("name", ["offsets.bin", "segment_offsets.bin"])
def test_offsets_that_do_not_rise(copy, name):
    """Offsets of the right size and wrong values would read the wrong tokens: refused."""
    offsets = np.fromfile(copy / name, dtype="<i8")
    offsets[[1, 2]] = offsets[[2, 1]]
    offsets.tofile(copy / name)
    with pytest.raises(StoreError, match=f"{name} is damaged: it does not rise from 0"):
        TokenStore.open(copy)


@pytest.mark.parametrize("name", ["/etc/hostname", "../outside"])
def test_a_file_outside(copy, name):
    """A store.json that names files elsewhere is not followed."""
    message = json.loads((copy / "store.json").read_text())
    message["sizes"][name] = 1
    (copy / "store.json").write_text(json.dumps(message))
    with pytest.raises(StoreError, match="a file outside the store is named"):
        TokenStore.open(copy)


def test_no_store(tmp_path):
    """A directory without a store, or with something else, is refused as such."""
    (tmp_path / "beside").mkdir()
    with pytest.raises(StoreError, match=r"is not a token store: there is no such directory \(.*/ holds beside\)"):
        TokenStore.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"is not a token store: it holds no store.json"):
        TokenStore.open(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(
        StoreError,
        match=r"train.jsonl is a file, not a token store: if it holds rows, prepare makes a store "
        r"of them",
    ):
        TokenStore.open(tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "something else"}, "belongs to another program"),
        ({"version": 8}, "has format version 8, this forge-data reads 2 and 3 and 4 and 5 and 6 and 7; prepare it again"),
        ({"kind": "prompts"}, "is damaged"),
        ({"samples": "many"}, r"is damaged \(ValueError"),
        ({"kind": "songs"}, r"is damaged \(ValueError: kind 'songs' is none of"),
        ({"unknown": 1}, r"is damaged \(TypeError"),
        ({"sha256": {}}, r"is damaged \(KeyError: 'input_ids.bin'\)"),
        ({"sizes": {}}, r"is damaged \(KeyError: 'input_ids.bin'\)"),
        ({"accounting": {"read": 5, "kept": 12, "dropped": {}}}, r"is damaged \(ValueError: rows do not add up"),
        ({"accounting": {"read": 11, "kept": 11, "dropped": {}}}, "is damaged: 12 samples, but 11 were kept"),
        ({"accounting": {"read": 12, "kept": 12, "dropped": {}}}, r"is damaged: \d+ tokens, but 0 were kept"),
        ({"sources": []}, "is damaged: 12 samples, but 12 were kept"),
        ({"sources": [{"name": "x"}]}, r"is damaged \(TypeError"),
    ],
)
def test_foreign(copy, change, expected):
    """A store.json of another program or version, or an inconsistent one, is refused."""
    message = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(message | change))
    with pytest.raises(StoreError, match=expected):
        TokenStore.open(copy)


@pytest.mark.parametrize("text", ["{torn", "[]", "", pytest.param("[" * 100_000, id="deep")])
def test_no_manifest(copy, text):
    """A store.json that cannot be read is refused, also one that is nested deeper than Python follows."""
    (copy / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"cannot be read|belongs to another program"):
        TokenStore.open(copy)
