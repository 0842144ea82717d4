"""Rows in memory become the same store as rows in a file, in order, in bounded memory, with the place of each in errors."""

import datetime
import json

import datasets
import numpy as np
import pytest

import forge_data
from forge_data import DataError, InMemoryRows, TokenStore, lint, prepare, prepare_prompts

from ..arrays import arrays_of


def given(kind, rows):
    """Rows as an object of a kind."""
    match kind:
        case "list":
            return rows
        case "tuple":
            return tuple(rows)
        case "generator":
            return (row for row in rows)
        case "sized":
            return Sized(rows)
        case "Dataset":
            return datasets.Dataset.from_list(rows)
        case "transformed Dataset":
            return datasets.Dataset.from_list([{"text": json.dumps(row)} for row in rows]).with_transform(
                lambda batch: {"messages": [json.loads(text)["messages"] for text in batch["text"]]}
            )
        case "IterableDataset":
            return datasets.Dataset.from_list(rows).to_iterable_dataset()
        case "generated IterableDataset":
            return datasets.IterableDataset.from_generator(lambda: iter(rows))


class Sized:
    """A data set as torch's: a length and an item, which is there for any number."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index % len(self.rows)]


KINDS = [
    "list", "tuple", "generator", "sized", "Dataset", "transformed Dataset", "IterableDataset", "generated IterableDataset"
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_is_that_of_a_file(kind, chatml_tokenizer, small_chats, write_rows, tmp_path):
    """Arrays, fingerprint and accounting are those of the same rows in a JSONL file; places count from 0."""
    made = prepare(given(kind, small_chats), chatml_tokenizer, tmp_path / "memory", progress=False)
    read = prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "file", progress=False)
    assert made.fingerprint == read.fingerprint
    assert arrays_of(made, without=("rows.bin",)) == arrays_of(read, without="rows.bin")
    assert made.accounting == read.accounting
    assert [made.source(index) for index in (0, 11)] == ["data_path[0]", "data_path[11]"]


@pytest.mark.slow
def test_several_workers_make_the_same_store(chatml_tokenizer, small_chats, tmp_path):
    """Chunks of a Dataset travel to other processes and keep their places."""
    alone, shared = (
        prepare(given("Dataset", small_chats), chatml_tokenizer, tmp_path / str(number), num_proc=number, progress=False)
        for number in (1, 2)
    )
    assert arrays_of(alone) == arrays_of(shared)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_the_row(kind, chatml_tokenizer, small_chats, tmp_path):
    """The place of a row in memory is `data_path[17]`."""
    rows = [*small_chats, {"messages": [{"role": "nobody", "content": "?"}]}]
    with pytest.raises(DataError, match=r"^data_path\[12\]: field messages\[0\]\.role"):
        prepare(given(kind, rows), chatml_tokenizer, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_equal_rows_open_the_store_again(kind, chatml_tokenizer, small_chats, tmp_path):
    """Rows that can be hashed beforehand are known again by their content, and other rows are not."""
    first = prepare(given(kind, small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    made = (tmp_path / "store").stat().st_ino
    prepare(given(kind, json.loads(json.dumps(small_chats))), chatml_tokenizer, tmp_path / "store", progress=False)
    assert (tmp_path / "store").stat().st_ino == made
    other = prepare(given(kind, small_chats[1:]), chatml_tokenizer, tmp_path / "store", progress=False)
    assert other.fingerprint != first.fingerprint


def test_a_stream_is_read_once_and_never_known_beforehand(chatml_tokenizer, small_chats, tmp_path):
    """A store of a generator is made anew each time; a generator that is used up is refused."""
    rows = (row for row in small_chats)
    store = prepare(rows, chatml_tokenizer, tmp_path / "store", progress=False)
    assert store.inputs is None
    again = InMemoryRows.of(row for row in small_chats)
    prepare(again, chatml_tokenizer, tmp_path / "store", progress=False)
    with pytest.raises(DataError, match="`data_path` is a generator, which was read already"):
        prepare(again, chatml_tokenizer, tmp_path / "store", progress=False)
    with pytest.raises(DataError, match="data_path holds no rows"):
        prepare(rows, chatml_tokenizer, tmp_path / "store", progress=False)


@pytest.mark.slow
def test_a_stream_is_never_in_memory_as_a_whole(chatml_tokenizer, tmp_path):
    """Rows are asked for a few chunks ahead of the tokenizer, not all at once."""
    asked, ahead = 0, []

    def rows():
        nonlocal asked
        for number in range(400):
            asked += 1
            text = f"{number} " + "what is this " * 1000
            yield {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}

    prepare(rows(), chatml_tokenizer, tmp_path / "store", num_proc=1, progress=lambda row, _: ahead.append(asked - row))
    assert asked == 400
    assert max(ahead) < 150


def test_the_store_says_what_it_was_made_of(chatml_tokenizer, small_chats, tmp_path):
    """In the place of a path stand kind, number and hash; equal rows of one kind have an equal description."""
    for kind, name in (("list", "list"), ("generator", "generator"), ("Dataset", "datasets.Dataset")):
        rows = InMemoryRows.of(given(kind, small_chats))
        store = prepare(rows, chatml_tokenizer, tmp_path / kind, progress=False)
        path = json.loads((store.path / "store.json").read_text())["sources"][0]["path"]
        assert path == rows.description
        assert path.startswith(f"{name} of 12 rows, sha256 ")
    assert InMemoryRows.of(small_chats).description != InMemoryRows.of(small_chats[::-1]).description
    assert InMemoryRows.of(iter(small_chats)).description == "list_iterator in memory"
    with pytest.raises(DataError, match="were rows in memory, which no path leads to; give the same rows again"):
        prepare(InMemoryRows.of(small_chats).description, chatml_tokenizer, tmp_path / "store")


def test_values_of_other_libraries_are_read_as_json(chatml_tokenizer, tmp_path):
    """Arrays and numbers of numpy, tuples and mappings are lists, numbers and objects; a date nobody reads is no error."""
    rows = [{"input_ids": np.array([5, 6, 7]), "labels": (np.int64(-100), 6, 7), "at": datetime.date(2026, 1, 2)}]
    store = prepare(rows, chatml_tokenizer, tmp_path / "store", progress=False)
    assert store[0].labels.tolist() == [-100, 6, 7]
    assert store.inputs is not None
    strange = [{**rows[0], "at": object()}]
    assert prepare(strange, chatml_tokenizer, tmp_path / "store", progress=False).inputs is None


def test_what_is_no_row_is_named(chatml_tokenizer, small_chats, tmp_path):
    """An item that is no mapping, an iterator that raises, and a dictionary of splits are refused by name."""

    def failing():
        yield small_chats[0]
        raise KeyError("shard 7")

    cases = [
        ([small_chats[0], "text"], r"data_path\[1\] is not an object but the string 'text'"),
        (failing(), r"data_path\[1\] cannot be read: KeyError: 'shard 7'"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(small_chats)),
            "is a DatasetDict of train; give one",
        ),
        (iter(["a.jsonl"]), r"data_path\[0\] is not an object but the string 'a.jsonl'"),
        ([], "`data_path` is empty: no rows were given"),
        (7, "`data_path` holds int 7; it must be a path, .* or rows"),
    ]
    for rows, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(rows, chatml_tokenizer, tmp_path / "store", progress=False)


class Table:
    """A table of columns, as pandas has them: sized, and indexed by name."""

    def __len__(self):
        return 2

    def __getitem__(self, name):
        return {"messages": []}[name]


def test_a_table_that_is_not_indexed_by_row_is_refused_as_rows_are(chatml_tokenizer, tmp_path):
    """By the package's own error, wherever its rows are looked at first."""
    with pytest.raises(DataError, match=r"data_path\[0\] cannot be read: KeyError: 0"):
        prepare(Table(), chatml_tokenizer, tmp_path / "store", progress=False)


@pytest.mark.parametrize("kind", ["generator", "generated IterableDataset"])
def test_rows_of_two_formats_in_a_stream(kind, chatml_tokenizer, small_chats, tmp_path):
    """Are named by their places; they cannot be counted, since what was read of the stream is gone."""
    rows = given(kind, [*small_chats, {"prompt": "?", "completion": "yes"}])
    with pytest.raises(DataError, match=r"^data_path\[12\] is a row of prompt_completion, but .* is one of messages; a file"):
        prepare(rows, chatml_tokenizer, tmp_path / "store", progress=False)


def test_a_row_of_brackets(chatml_tokenizer, small_chats, tmp_path):
    """A row nested deeper than Python follows is refused by its place."""
    deep = []
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(DataError, match=r"^data_path\[1\] is nested too deeply to be read$"):
        prepare([small_chats[0], {**small_chats[1], "deep": deep}], chatml_tokenizer, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


def test_lint_and_prompts_take_rows(chatml_tokenizer, small_chats, tmp_path):
    """Findings have places of the list that they are in, training or held-out rows; prompts keep their columns."""
    report = lint([*small_chats, small_chats[3]], chatml_tokenizer, eval_data=datasets.Dataset.from_list(small_chats[5:6]))
    places = {finding.rule: finding.place for finding in report.findings}
    assert places == {"duplicate_row": "data_path[12]", "train_eval_overlap": "eval_data[0]"}
    prompts = prepare_prompts(({"prompt": f"{n}?", "answer": n} for n in range(3)), chatml_tokenizer, tmp_path / "prompts")
    assert [prompt.columns for prompt in prompts] == [{"answer": n} for n in range(3)]
    assert prompts.source(2) == "data_path[2]"


def test_paths_are_still_paths(chatml_tokenizer, small_chats, write_rows, tmp_path):
    """A list of paths and a mapping of weights name files."""
    files = [write_rows(small_chats[:6], "a.jsonl"), write_rows(small_chats[6:], "b.jsonl")]
    assert all(InMemoryRows.of(paths) is None for paths in (files, tuple(files), str(files[0]), {str(files[0]): 0.5}))
    store = prepare({str(file): 0.5 for file in files}, chatml_tokenizer, tmp_path / "store", progress=False)
    assert isinstance(store, TokenStore)
    assert store.weights == [0.5, 0.5]
    assert forge_data.stats(store).sources[1].name == "b.jsonl"


@pytest.mark.parametrize(
    ("package", "kind", "call"),
    [
        ("pandas.core.frame", "DataFrame", r'df.to_dict\("records"\), or datasets.Dataset.from_pandas'),
        ("polars.dataframe.frame", "DataFrame", r"df.to_dicts\(\)"),
        ("pyarrow.lib", "Table", r"table.to_pylist\(\)"),
    ],
)
def test_a_table_of_another_library(package, kind, call, chatml_tokenizer, tmp_path):
    """Is refused with what makes rows of it, alone or in a list; the library is not imported."""
    table = type(kind, (Table,), {"__module__": package})()
    for given in (table, [table]):
        with pytest.raises(DataError, match=f"`data_path` is a {kind} of {package.split('.')[0]}, .*; give {call}"):
            prepare(given, chatml_tokenizer, tmp_path / "store", progress=False)


@pytest.mark.together
def test_images_in_memory_are_known_by_what_they_show():
    """Rows with decoded images have a hash, of pixels, transparency and orientation, and their size bounds a chunk."""
    pillow = pytest.importorskip("PIL.Image")

    def described(change=lambda image: None, seed=0):
        image = pillow.fromarray(np.random.default_rng(seed).integers(0, 255, (300, 400, 3), dtype=np.uint8))
        change(image)
        rows = InMemoryRows.of([{"images": [image]}] * 8)
        assert [chunk.last_row for chunk in rows.chunks(1 << 20)] == [2, 5, 7]
        return rows.description

    def turn(image):
        image.getexif()[0x0112] = 6

    found = [
        described(),
        described(seed=1),
        described(turn),
        described(lambda image: image.info.update(transparency=(1, 2, 3))),
    ]
    assert described() == found[0]
    assert len(set(found)) == len(found)
