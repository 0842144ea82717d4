"""data_path in any form → sources that read themselves."""

import gzip
import itertools
import json
import subprocess
import sys

import datasets
import fsspec
import pytest

from forge_data import DataError
from forge_data._shard import Shard
from forge_data.reading._sources import _shortest, part_of, resolve

ROW = '{"text": "x"}\n'


@pytest.fixture
def files(tmp_path):
    """files("a.jsonl", ...) writes a row into each and returns the paths."""

    def write(*names, text=ROW):
        paths = [tmp_path / name for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return paths

    return write


@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_one_file(files, as_path):
    """A path, as a string or as a Path, is one source."""
    (path,) = files("train.jsonl", text=ROW * 3)
    (source,) = resolve(as_path(path))
    assert (source.name, source.path, source.weight, source.group) == ("train.jsonl", str(path), None, 0)
    assert source.count() == 3
    assert [(record.row, record.place, record.fields) for record in source.records()] == [
        (row, f"train.jsonl:{row}", {"text": "x"}) for row in (1, 2, 3)
    ]
    assert source.place(2) == "train.jsonl:2"
    assert not source.indexed


def test_every_kind(tmp_path):
    """The same rows are read from every kind of file."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"text": "a"}, {"text": "b\nc"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.ndjson").write_text(lines)
    (tmp_path / "c.json").write_text(lines)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    (tmp_path / "e.csv").write_text('text\na\n"b\nc"\n')
    (tmp_path / "f.tsv").write_text('text\na\n"b\nc"\n')
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet")
    with pa.ipc.new_file(str(tmp_path / "h.arrow"), pa.schema({"text": pa.string()})) as writer:
        writer.write_table(pa.Table.from_pylist(rows))
    (tmp_path / "i.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    sources = resolve(tmp_path)
    assert [source.name[0] for source in sources] == list("abcdefghi")
    assert [[record.fields for record in source.records()] for source in sources] == [rows] * 9
    assert [source.place(1) for source in sources if source.indexed] == ["d.json[1]"]
    assert len({source.digest() for source in sources}) == 6


def test_a_list(files):
    """A list keeps its order; each entry is a group, of one file or of several."""
    files("a/1.jsonl", "a/2.jsonl", "b.jsonl")
    (b,) = files("b.jsonl")
    sources = resolve([b, str(b.parent / "a")])
    assert [(source.name, source.group) for source in sources] == [("b.jsonl", 0), ("1.jsonl", 1), ("2.jsonl", 1)]


def test_weights(files):
    """A mapping gives each entry a weight, which all its files have."""
    paths = files("a/1.jsonl", "a/2.jsonl", "b.jsonl")
    sources = resolve({str(paths[0].parent / "*.jsonl"): 3, paths[2]: 0.5})
    assert [(source.name, source.group, source.weight) for source in sources] == [
        ("1.jsonl", 0, 3.0),
        ("2.jsonl", 0, 3.0),
        ("b.jsonl", 1, 0.5),
    ]


@pytest.mark.parametrize("weight", [0, -1, True, "2", None, float("nan"), float("inf")])
def test_no_weight(files, weight):
    """A weight is a number above 0."""
    (path,) = files("a.jsonl")
    with pytest.raises(DataError, match="the weight of .*a.jsonl is .*; it must be a number above 0"):
        resolve({path: weight})


def test_names_tell_files_apart(files):
    """Files of one name are named with as many directories as distinguish them."""
    paths = files("x/en/train.jsonl", "x/fr/train.jsonl", "y/fr/train.jsonl", "test.jsonl")
    assert [source.name for source in resolve(paths)] == [
        "en/train.jsonl",
        "x/fr/train.jsonl",
        "y/fr/train.jsonl",
        "test.jsonl",
    ]


def test_addresses_that_differ_in_their_queries():
    """They are named whole; beside another file they were compared without end."""
    urls = ["https://h/a.jsonl?part=1", "https://h/a.jsonl?part=2"]
    assert _shortest([*urls, "b.jsonl"]) == [*urls, "b.jsonl"]


def test_a_question_mark_in_a_name(files):
    """A question mark is part of a local file's name."""
    assert [source.name for source in resolve(files("a?1.jsonl", "a?2.jsonl"))] == ["a?1.jsonl", "a?2.jsonl"]


def test_a_file_twice(files):
    """A file that is named twice, by any entries, is refused."""
    (path,) = files("a.jsonl")
    with pytest.raises(
        DataError,
        match="a.jsonl is named more than once in the data; name it once, and to see its rows more often, give it a weight",
    ):
        resolve([path, path.parent / "*.jsonl"])
    with pytest.raises(DataError, match="a.jsonl is named more than once in the data, to be read in two ways: give both"):
        resolve({str(path): {"data_format": "alpaca"}, str(path.parent / "*.jsonl"): {"data_format": "axolotl:alpaca"}})


def test_a_file_twice_by_a_link(files):
    """A link to a file, or a directory link in a circle, does not make its rows count twice."""
    (path,) = files("a.jsonl")
    (path.parent / "round").symlink_to(path.parent, target_is_directory=True)
    with pytest.raises(DataError, match=r"/a.jsonl is named more than once in the data"):
        resolve(path.parent / "**" / "*.jsonl")
    (path.parent / "round").unlink()
    (path.parent / "b.jsonl").symlink_to(path)
    with pytest.raises(DataError, match=r"/a.jsonl is named more than once in the data"):
        resolve(path.parent)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], "`data_path` is empty: no rows were given"),
        ({}, "`data_path` is empty: no rows were given"),
        ("", "`data_path` holds the string ''; it must be a path"),
        (7, "`data_path` holds int 7; it must be a path"),
        ([None], "`data_path` holds null; it must be a path"),
        (b"a.jsonl", "`data_path` holds bytes b'a.jsonl'; it must be a path"),
    ],
)
def test_no_path(path, expected):
    """An entry that names nothing is refused with what it must be."""
    with pytest.raises(DataError, match=expected):
        resolve(path)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "\n  \n\n"), ("a.json", "[ ]"), ("a.csv", "text\n"), ("a.json", "\n \n")]
)
def test_no_rows(files, name, text):
    """A file that holds something but no rows is refused."""
    (path,) = files(name, text=text)
    (source,) = resolve(path)
    with pytest.raises(DataError, match=f"{name} holds no rows"):
        list(source.chunks())


def test_elsewhere():
    """A URL is read as a file is, and keeps its address."""
    fsspec.filesystem("memory").pipe("/sources/a.jsonl", ROW.encode() * 2)
    (source,) = resolve("memory://sources/a.jsonl")
    assert (source.name, source.path) == ("a.jsonl", "memory://sources/a.jsonl")
    assert [record.place for record in source.records()] == ["a.jsonl:1", "a.jsonl:2"]
    assert source.count() is None


@pytest.mark.slow
def test_what_is_loaded(files):
    """Plain JSONL is read without datasets, pyarrow or fsspec, which take longer to load than a small file to prepare."""
    (path,) = files("a.jsonl")
    code = (
        "import sys; from forge_data.reading._sources import resolve\n"
        "from forge_data.formats import _registry\nfrom forge_data.reading import _preprocess\n"
        f"(source,) = resolve({str(path)!r}); assert len(list(source.records())) == 1 and source.digest()\n"
        "print([name for name in ('datasets', 'pyarrow', 'fsspec', 'pandas', 'transformers', 'torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_row_in_the_place_of_the_data():
    """One row is no mapping of files to weights: the error says how rows are given."""
    with pytest.raises(DataError, match=r"one row is given as \[row\]"):
        resolve({"messages": [{"role": "user", "content": "Hi"}]})


def test_the_directory_of_relative_paths(files, tmp_path, monkeypatch):
    """Paths in rows begin beside their file or their `dataset_info.json`, in a saved dataset, or where the program runs."""
    monkeypatch.chdir(tmp_path)
    (file,) = files("rows/train.jsonl")
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "rows/train.jsonl", "columns": {"prompt": "text"}}}')
    datasets.Dataset.from_list([{"text": "x"}]).save_to_disk(tmp_path / "saved")
    fsspec.filesystem("memory").pipe("/rows/train.jsonl", ROW.encode())
    for path, expected in (
        (file, file.parent),
        ("rows/*.jsonl", file.parent),
        (str(tmp_path / "dataset_info.json:mine"), tmp_path),
        (tmp_path / "saved", tmp_path / "saved"),
        ([{"text": "x"}], tmp_path),
        ("memory://rows/train.jsonl", None),
    ):
        assert [source.directory for source in resolve(path)] == [None if expected is None else str(expected)]


def test_the_first_rows_of_each_entry(files):
    """`max_samples` counts over the files of a glob, over each of several entries anew, and within equal parts of all rows."""
    a, b = files("a.jsonl", "b.jsonl", text=ROW * 5)

    def places(sources):
        return [[record.place for record in source.records()] for source in sources]

    def named(name, *rows):
        return [f"{name}.jsonl:{row}" for row in rows]

    pattern = str(a.parent / "*.jsonl")
    assert places(resolve(pattern, max_samples=7)) == [named("a", 1, 2, 3, 4, 5), named("b", 1, 2)]
    assert places(resolve([a, b], max_samples=2)) == [named("a", 1, 2), named("b", 1, 2)]
    few = resolve(pattern, max_samples=4)
    assert (places(few), [source.count() for source in few]) == ([named("a", 1, 2, 3, 4), []], [4, 0])
    halves = [part_of(resolve(pattern, max_samples=7), Shard.parse(f"{half}/2"))[0] for half in (1, 2)]
    assert [places(half) for half in halves] == [[named("a", 1, 2, 3), []], [named("a", 4, 5), named("b", 1, 2)]]
    assert places(resolve(a, max_samples=50)) == [named("a", 1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rows.jsonl", "\n\n" + f"{ROW}\n" * 3, [3, 5]),
        ("rows.csv", 'text\n"two\nlines"\n\nx\ny\n', [2, 5]),
        ("few.jsonl", f"\n{ROW}\n", [2]),
    ],
)
def test_rows_are_no_lines(name, text, expected, files):
    """`max_samples` counts rows: blank lines, a CSV file's first, and line ends in its cells are none."""
    (path,) = files(name, text=text)
    (source,) = resolve(path, max_samples=2)
    assert [record.row for record in source.records()] == expected
    files("a.txt.jsonl", "b.txt.jsonl", text=f"\n{ROW}")
    several = resolve(str(path.parent / "*.txt.jsonl"), max_samples=2)
    assert [record.place for each in several for record in each.records()] == ["a.txt.jsonl:2", "b.txt.jsonl:2"]


def test_a_file_without_rows(files):
    """It is refused with `max_samples` as without."""
    (path,) = files("rows.csv", text="text\n")
    with pytest.raises(DataError, match=r"rows.csv holds no rows$"):
        list(resolve(path, max_samples=2)[0].records())


def test_the_first_rows_in_memory():
    """Of a list, a `Dataset` and a stream, which need not end."""
    rows = [{"text": str(number)} for number in range(9)]
    for given in (rows, datasets.Dataset.from_list(rows), ({"text": "x"} for _ in itertools.count())):
        (source,) = resolve(given, max_samples=3)
        assert [record.place for record in source.records()] == ["data_path[0]", "data_path[1]", "data_path[2]"]
