"""Rows of files → a store of prompts: all of it, or nothing."""

import csv
import gzip
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_data import DataError, PromptStore, StoreError, prepare, prepare_prompts
from forge_data.preparing import _prepare_prompts as _prompts_prepare

ROWS = [{"prompt": f"count to {n} é🎈", "answer": str(n)} for n in range(7)]


def owned(store):
    return [(prompt.prompt, prompt.columns) for prompt in store]


def test_the_books(write_rows, chatml_tokenizer, tmp_path, logged):
    """Every row and token is kept or dropped by reason; a prompt of exactly the limit stays."""
    messages = logged()
    size = len(chatml_tokenizer("one two three four")["input_ids"])
    rows = [
        {"prompt": ""},
        {"prompt": "one two three four"},
        {"prompt": "one two three four five"},
        {"prompt": "gone"},
        {"prompt": []},
    ]
    store = prepare_prompts(
        write_rows(["", *rows]),
        chatml_tokenizer,
        tmp_path / "store",
        max_prompt_len=size,
        preprocess=lambda row: None if row["prompt"] == "gone" else row,
    )
    books = store.accounting
    assert (books.read, books.kept, books.samples) == (5, 1, 1)
    assert books.dropped == {"empty_prompt": 2, "longer_than_max_prompt_len": 1, "preprocess": 1}
    longer = len(chatml_tokenizer("one two three four five")["input_ids"])
    assert (books.tokens_read, books.tokens_kept, books.tokens_lost) == (
        size + longer,
        size,
        {"longer_than_max_prompt_len": longer},
    )
    assert [(row["place"], row["reason"], row["tokens"]) for row in store.dropped()] == [
        ("train.jsonl:2", "empty_prompt", 0),
        ("train.jsonl:4", "longer_than_max_prompt_len", longer),
        ("train.jsonl:5", "preprocess", 0),
        ("train.jsonl:6", "empty_prompt", 0),
    ]
    assert store.source(0) == "train.jsonl:3"
    assert messages == [f"train.jsonl: {books}"]
    assert store.settings["max_prompt_len"] == size


def test_too_long_is_an_error_on_request(write_rows, chatml_tokenizer, tmp_path):
    """`on_overflow="error"` ends at the first long prompt, with its row and length, and leaves nothing behind."""
    path = write_rows([*ROWS, {"prompt": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}])
    with pytest.raises(DataError, match=r"train.jsonl:8: the prompt has \d+ tokens, and `max_prompt_len` is 30; raise it"):
        prepare_prompts(path, chatml_tokenizer, tmp_path / "store", max_prompt_len=30, on_overflow="error")
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("rows", [1, 512])
@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"prompt": [{"role": "system", "content": "loud"}, {"role": "user", "content": "x"}]}, "train.jsonl:3: .* refuses the "
                                                                                                "conversation"),
        ({"prompt": 7}, "train.jsonl:3: field prompt is int 7"),
        ('{"prompt": ', "train.jsonl:3 is not valid JSON"),
        ({"question": "x"}, "train.jsonl:3 has the fields 'question', and none of them is a prompt"),
    ],
)  # fmt: skip
def test_the_first_fault_is_told(write_rows, with_template, tmp_path, bad, expected, rows, monkeypatch):
    """Of several refused rows, for any reason and batch size, the first is named."""
    monkeypatch.setattr(_prompts_prepare, "_ROWS", rows)
    tokenizer = with_template(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    path = write_rows([*ROWS[:2], bad, {"prompt": 8}])
    with pytest.raises(DataError, match=expected):
        prepare_prompts(path, tokenizer, tmp_path / "store")
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


def test_nothing_left(write_rows, chatml_tokenizer, tmp_path):
    """A file without a prompt is refused with what became of its rows."""
    with pytest.raises(DataError, match="no prompt is left: kept 0 of 2 rows; dropped 2 empty_prompt"):
        prepare_prompts(write_rows([{"prompt": ""}] * 2), chatml_tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match="dropped 2 longer_than_max_prompt_len; raise max_prompt_len$"):
        prepare_prompts(write_rows([{"prompt": "too long"}] * 2), chatml_tokenizer, tmp_path / "store", max_prompt_len=1)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "csv", "json"])
def test_any_file(kind, chatml_tokenizer, tmp_path):
    """Compressed, as a table or as an array, a file gives the same prompts and columns, each with its own place."""
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path)
        case "csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["prompt", "answer"])
                writer.writeheader()
                writer.writerows(ROWS)
        case _:
            path.write_text(json.dumps(ROWS), encoding="utf-8")
    store = prepare_prompts(path, chatml_tokenizer, tmp_path / "store")
    assert owned(store) == [(row["prompt"], {"answer": row["answer"]}) for row in ROWS]
    assert store.source(2) == {"csv": "rows.csv:4", "json": "rows.json[2]"}.get(kind, f"rows.{kind}:3")


def test_several_files_with_weights(write_rows, chatml_tokenizer, tmp_path):
    """A mapping of files to weights keeps both, and each prompt knows its entry."""
    paths = [write_rows(ROWS[:3], "a.jsonl"), write_rows(ROWS[3:], "b.jsonl")]
    store = prepare_prompts({str(paths[0]): 1, str(paths[1]): 3}, chatml_tokenizer, tmp_path / "store")
    assert store.weights == [1.0, 3.0]
    assert store.sources.tolist() == [0] * 3 + [1] * 4


def test_the_same_store_again(write_rows, chatml_tokenizer, with_template, tmp_path):
    """Unchanged, it is opened and nothing is written; every input that decides its content makes it anew."""
    path = write_rows(ROWS)

    def made(tokenizer=chatml_tokenizer, **settings):
        store = prepare_prompts(path, tokenizer, tmp_path / "store", **settings)
        return store.path.stat().st_ino, store.inputs

    first = made()
    assert made() == first
    seen = {first}
    for change in (
        {"max_prompt_len": 90},
        {"seed": 1},
        {"max_prompt_len": 90, "on_overflow": "error"},
        {"tokenizer": with_template("x")},
    ):
        assert made(**change) not in seen
        seen.add(made(**change))
    write_rows([*ROWS, {"prompt": "one more"}])
    assert made()[1] not in {inputs for _, inputs in seen}
    assert len(PromptStore.open(tmp_path / "store")) == 8
    assert sorted(each.name for each in tmp_path.iterdir()) == ["store", "train.jsonl"]


def test_the_fingerprint_is_of_what_is_asked(write_rows, chatml_tokenizer, tmp_path):
    """Another answer beside the same prompt changes it, since rewards depend on it; the file's name does not."""

    def of(rows, name):
        return prepare_prompts(write_rows(rows, f"{name}.jsonl"), chatml_tokenizer, tmp_path / name).fingerprint

    assert of(ROWS, "a") == of(["", *ROWS], "b")
    assert of(ROWS, "a") != of([*ROWS[:-1], ROWS[-1] | {"answer": "7"}], "c")


def test_in_the_place_of_tokens(write_rows, small_chats, chatml_tokenizer, tmp_path):
    """A store of one kind replaces one of the other; anything else stays."""
    tokens = prepare(write_rows(small_chats, "chats.jsonl"), chatml_tokenizer, tmp_path / "store")
    assert owned(prepare_prompts(write_rows(ROWS), chatml_tokenizer, tokens.path))[0][0] == ROWS[0]["prompt"]
    assert prepare(tmp_path / "chats.jsonl", chatml_tokenizer, tmp_path / "store").fingerprint == tokens.fingerprint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="exists already and is not a token store"):
        prepare_prompts(tmp_path / "train.jsonl", chatml_tokenizer, tmp_path / "mine")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_prompt_len": 0}, "`max_prompt_len` must be a whole number of at least 1"),
        ({"on_overflow": "truncate"}, "`on_overflow` is 'truncate'; allowed: drop, error"),
        ({"seed": 1.5}, "`seed` must be a whole number"),
        ({"preprocess": "nowhere:f"}, "nowhere cannot be imported"),
    ],
)
def test_arguments(change, expected, write_rows, chatml_tokenizer, tmp_path):
    """An argument that is invalid is refused by name, before any file is read."""
    with pytest.raises(DataError, match=expected):
        prepare_prompts(tmp_path / "nowhere.jsonl", chatml_tokenizer, tmp_path / "store", **change)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="there is no such signal")
@pytest.mark.parametrize("moment", ["preprocess", "put_in_place"])
def test_killed(write_rows, chatml_tokenizer, tmp_path, moment):
    """`kill -9` while rows are read, or just before the rename, leaves the old store whole; the next run succeeds."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    place = tmp_path / "here"
    before = prepare_prompts(write_rows(ROWS[:3]), str(tmp_path / "model"), place / "store")
    path = write_rows(ROWS)
    kill = "lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    code = f"""
import os, signal, forge_data, forge_data.store._writer
kill = {kill}
if {moment!r} == "put_in_place":
    forge_data.store._writer.put_in_place = kill
forge_data.prepare_prompts({str(path)!r}, {str(tmp_path / "model")!r}, {str(place / "store")!r},
                           preprocess=kill if {moment!r} == "preprocess" else None)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    old = PromptStore.open(place / "store")
    old.verify()
    assert old.fingerprint == before.fingerprint
    assert len(list(place.iterdir())) == 2
    assert len(prepare_prompts(path, str(tmp_path / "model"), place / "store")) == 7
    assert [each.name for each in place.iterdir()] == ["store"]


@pytest.mark.slow
def test_no_torch(write_rows, chatml_tokenizer, tmp_path):
    """Prompts are prepared and read where torch cannot be imported."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    code = f"""
import importlib.util, sys
sys.modules["torch"] = None
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "torch" else found(name, package)
import forge_data
store = forge_data.prepare_prompts({str(write_rows(ROWS))!r}, {str(tmp_path / "model")!r}, {str(tmp_path / "store")!r})
print(len(store), sys.modules["torch"])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["7", "None"], done.stderr
