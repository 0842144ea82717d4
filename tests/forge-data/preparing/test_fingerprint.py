"""A store is made anew when, and only when, it would come out differently."""

import re

import pytest

from forge_data import StoreError, TokenStore, prepare
from forge_data._options import Options
from forge_data.preparing._fingerprint import fingerprint_of_inputs
from forge_data.reading._sources import resolve

FUNCTION = """
def same(fields):
    return fields
"""


def made_anew(store, make):
    """Tell whether preparing a store again wrote one."""
    before = (store.path / "store.json").stat()
    again = make()
    after = (store.path / "store.json").stat()
    assert again.path == store.path
    return (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns)


@pytest.fixture
def make(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """make(name=value, ...) prepares the same store with a change."""
    path = write_rows(small_chats)

    def make(**about):
        arguments = {
            "data_path": path,
            "tokenizer": chatml_tokenizer,
            "store_dir": tmp_path / "store",
            "max_seq_len": 50,
        } | about
        return prepare(**arguments)

    return make


def test_reused(make, families, chatml_tokenizer, tmp_path):
    """The same content, tokenizer and settings open the store: from a copy of the file elsewhere, with a loaded copy of
    the tokenizer, with any number of processes, and with a tokenizer that truncated in between.
    """
    store = make()
    assert not made_anew(store, make)
    (tmp_path / "elsewhere").mkdir()
    copy = (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "train.jsonl")
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    assert not made_anew(store, lambda: make(data_path=copy, tokenizer=tmp_path / "model", num_proc=1, progress=False))
    used = families["chatml"].tokenizer()
    used(["hello", "hello there"], truncation=True, max_length=1)
    assert '"truncation":null' not in used.backend_tokenizer.to_str()
    assert not made_anew(store, lambda: make(data_path=copy, tokenizer=used))


def other_tokens(families):
    made = families["chatml"].tokenizer()
    made.add_tokens(["hello"])
    return made


def other_template(families):
    made = families["chatml"].tokenizer()
    made.chat_template = made.chat_template.replace("You are Bot", "You are Tob")
    return made


def other_eos(families):
    made = families["chatml"].tokenizer()
    made.eos_token = "<|endoftext|>"
    return made


@pytest.mark.parametrize(
    "change",
    [{"max_seq_len": 49}, {"on_overflow": "truncate"}, {"train_on": "last"}, {"format": "messages"}, {"seed": 1},
     {"tokenizer": other_tokens}, {"tokenizer": other_template}, {"tokenizer": other_eos}],
    ids=lambda change: "-".join(f"{name}={getattr(value, '__name__', value)}" for name, value in change.items()),
)  # fmt: skip
def test_made_anew(make, families, change):
    """Another setting, tokenizer or template: the store is replaced in place."""
    store = make()
    change = {name: value(families) if callable(value) else value for name, value in change.items()}
    assert made_anew(store, lambda: make(**change))
    assert not made_anew(store, lambda: make(**change))


def test_special_tokens_read_as_letters(make, families):
    """An attribute of the tokenizer that changes ids and is in no file of its backend counts too."""
    store = make(max_seq_len=500)
    split = families["chatml"].tokenizer()
    split.split_special_tokens = True
    assert made_anew(store, lambda: make(max_seq_len=500, tokenizer=split))
    assert make(max_seq_len=500, tokenizer=split).fingerprint != store.fingerprint


def test_other_content(make, write_rows, small_chats):
    """Another row in the file makes another store; a process that mapped the old one still reads it."""
    store = make()
    write_rows(small_chats[:5])
    new = make()
    assert (len(store), len(new)) == (12, 5)
    assert store[11].input_ids.tolist()


def test_a_file_that_changes_while_it_is_read(make, write_rows, small_chats, tmp_path):
    """A file that changes while it is read is refused: the store would vouch for other content."""

    def write_on(done, total):
        write_rows(small_chats[:5])

    with pytest.raises(ValueError, match=r"train.jsonl changed while it was read; prepare it again"):
        make(progress=write_on)
    assert not (tmp_path / "store").exists()


def test_other_preprocess(make, tmp_path, monkeypatch):
    """A function is identified by its file; one without a file makes the store anew each time."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rows_d4.py").write_text(FUNCTION)
    store = make(preprocess="my_rows_d4:same")
    assert not made_anew(store, lambda: make(preprocess="my_rows_d4:same"))
    (tmp_path / "my_rows_d4.py").write_text(FUNCTION + "# changed\n")
    assert made_anew(store, lambda: make(preprocess="my_rows_d4:same"))
    assert made_anew(store, make)
    anonymous = lambda fields: fields  # noqa: E731
    assert made_anew(store, lambda: make(preprocess=anonymous))
    assert made_anew(store, lambda: make(preprocess=anonymous))


def test_a_template_with_the_date(make, families, monkeypatch):
    """A template that writes the date makes other tokens tomorrow; others stay."""
    from forge_data.preparing import _fingerprint

    class Tomorrow(_fingerprint.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 2, 3, tzinfo=tz)

    dated = families["chatml"].tokenizer()
    dated.chat_template = dated.chat_template.replace("You are Bot", "{{ strftime_now('%Y') }}")
    plain, store = make(), make(tokenizer=dated)
    assert not made_anew(store, lambda: make(tokenizer=dated))
    monkeypatch.setattr(_fingerprint, "datetime", Tomorrow)
    assert made_anew(store, lambda: make(tokenizer=dated))
    make()
    monkeypatch.undo()
    assert not made_anew(plain, make)


@pytest.mark.parametrize("name", ["transformers", "tokenizers", "forge-data"])
def test_other_versions(write_rows, small_chats, chatml_tokenizer, monkeypatch, name):
    """Another version of a library that makes the tokens makes the store anew."""
    from forge_data.preparing import _fingerprint

    def fingerprint():
        return fingerprint_of_inputs(resolve(write_rows(small_chats)), chatml_tokenizer, Options(), None, 0)

    before = fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", before)
    assert fingerprint() == before
    inner = _fingerprint.importlib.metadata.version
    monkeypatch.setattr(_fingerprint.importlib.metadata, "version", lambda each: "9" if each == name else inner(each))
    monkeypatch.setattr(
        _fingerprint.forge_data, "__version__", "9" if name == "forge-data" else _fingerprint.forge_data.__version__
    )
    assert fingerprint() != before


def test_a_store_that_failed_to_be_replaced(make, write_rows, small_chats):
    """If the new store cannot be made, the old one is as it was."""
    store = make()
    write_rows([*small_chats, "{broken"])
    with pytest.raises(ValueError, match="is not valid JSON"):
        make()
    assert len(TokenStore.open(store.path)) == 12
    assert [path.name for path in store.path.parent.iterdir() if "partial" in path.name] == []


def test_a_damaged_store_is_made_anew(make):
    """A store with a changed byte differs from its manifest: preparing again repairs it."""
    store = make()
    array = store.path / "loss_mask.bin"
    data = bytearray(array.read_bytes())
    data[-1] ^= 1
    array.write_bytes(data)
    make().verify()


def test_a_torn_store_is_not_reused(make):
    """A store with a file missing is named, not used and not silently replaced."""
    store = make()
    (store.path / "offsets.bin").unlink()
    with pytest.raises(StoreError, match="offsets.bin is torn: missing"):
        make()
