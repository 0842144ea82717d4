"""What an entry of data_path names: all files that are there, and none that cannot be read."""

import errno
import os
import re
from pathlib import Path

import fsspec
import pytest

from forge_data import DataError
from forge_data.reading._locate import located

LINE = '{"text": "x"}\n'


def names(found):
    return [Path(file.path).name for file in found]


@pytest.fixture
def folder(tmp_path):
    """A directory with usual contents."""
    for name in (
        "train.jsonl", "train-00001-of-00002.jsonl", "train-00000-of-00002.jsonl", "test.jsonl", "more/b.csv",
        "more/a.jsonl.gz",
        "train_notes.md", "README.md", ".git/config", "_cache/x.jsonl", ".hidden.jsonl",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINE)
    return tmp_path


def test_no_file(tmp_path):
    """A path where nothing is is named with the directory it was searched from."""
    with pytest.raises(DataError, match=r"no file at '.*nothing.jsonl' \(looked from .*\); check the path$"):
        located(str(tmp_path / "nothing.jsonl"))


def test_a_name_without_a_split():
    """A possible name on the Hub is not looked up without a split; the message explains how."""
    with pytest.raises(
        DataError, match="no file at 'org/name' .* A dataset on the Hub is given with its split: 'org/name:train'"
    ):
        located("org/name")


def test_files_joined_by_commas(tmp_path, monkeypatch):
    """Files that are there are told apart; a name with a comma in it is a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "c,d.jsonl"):
        (tmp_path / name).write_text(LINE)
    with pytest.raises(DataError, match=r"'a.jsonl, b.jsonl'; give each file by itself, without commas: a.jsonl b.jsonl$"):
        located("a.jsonl, b.jsonl")
    with pytest.raises(DataError, match="check the path$"):
        located("a.jsonl,e.jsonl")
    assert names(located("c,d.jsonl")) == ["c,d.jsonl"]


def test_a_name_that_is_too_long():
    """An error of the system about a path is an error of the data."""
    with pytest.raises(DataError, match="x{300}.jsonl cannot be read: File name too long"):
        located("x" * 300 + ".jsonl")


def test_a_directory_that_may_not_be_entered(tmp_path, monkeypatch):
    """A path without permission is refused with the reason."""

    def refuse(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(DataError, match="private/rows.jsonl cannot be read: Permission denied"):
        located(str(tmp_path / "private" / "rows.jsonl"))


@pytest.mark.parametrize("path", ["~no-such-user-here/rows.jsonl", "rows\0.jsonl"])
def test_no_path(path):
    """A string that cannot be a path is refused as one."""
    with pytest.raises(DataError, match="is no path to a file: "):
        located(path)


def test_no_regular_file(tmp_path):
    """A pipe, a device and a link to itself are refused without being opened."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    for path, expected in [
        (tmp_path / "pipe.jsonl", "is not a regular file but a named pipe; write the rows to a file"),
        (tmp_path / "loop.jsonl", "is not a regular file but a loop of symbolic links"),
        (tmp_path / "gone.jsonl", "no file at"),
        (Path(os.devnull), "is not a regular file but a device"),
    ]:
        with pytest.raises(DataError, match=expected):
            located(str(path))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rows.xlsx", 'save the sheet as CSV, "CSV UTF-8" in Excel'),
        ("my rows.txt", "`jq -Rc '{text: .}' 'my rows.txt' > 'my rows.jsonl'`"),
    ],
)
def test_suffix_of_another_program(tmp_path, name, remedy):
    """Sheets and plain text are answered with what makes rows of them."""
    (tmp_path / name).write_text(LINE)
    with pytest.raises(DataError, match=f"has a suffix that is not known .*; .*{re.escape(remedy)}"):
        located(str(tmp_path / name))


@pytest.mark.parametrize("name", ["rows.xlsx", "rows", "rows.gz", "rows.tar.gz"])
def test_suffix(tmp_path, name):
    """An unknown suffix is refused with the known ones."""
    (tmp_path / name).write_text(LINE)
    with pytest.raises(
        DataError, match=r"has a suffix that is not known \(.*\); known: .jsonl, .ndjson, .json, .csv, .tsv, .parquet"
    ):
        located(str(tmp_path / name))


def test_a_compressed_table(tmp_path):
    """A table is compressed within; compressed around, it is refused."""
    (tmp_path / "rows.parquet.gz").write_text(LINE)
    with pytest.raises(DataError, match="a .parquet file is compressed within; decompress it"):
        located(str(tmp_path / "rows.parquet.gz"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv.gz"])
def test_empty(tmp_path, name):
    """An empty file is refused as such."""
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="is empty: it holds no rows"):
        located(str(tmp_path / name))


def test_directory(folder):
    """All files of rows below a directory are read, sorted by path; hidden and other files are ignored."""
    assert names(located(str(folder))) == [
        "a.jsonl.gz", "b.csv", "test.jsonl", "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["more.jsonl.xz", "old.pkl", "rows.zip", "notes.md.gz"])
def test_a_file_that_may_hold_rows(folder, name):
    """A file of a directory that may hold rows and cannot be read is refused, not ignored."""
    (folder / name).write_text(LINE)
    with pytest.raises(DataError, match=f"holds {name}, whose suffix is not known; .*such as .*/\\*.jsonl"):
        located(str(folder))


def test_a_link_to_nothing(folder):
    """A broken link is named, in a directory or a glob too."""
    (folder / "gone.jsonl").symlink_to("nowhere")
    for entry in (str(folder), f"{folder}/g*.jsonl"):
        with pytest.raises(DataError, match="gone.jsonl is a broken link"):
            located(entry)


def test_a_name_that_is_no_utf8(tmp_path):
    """A name whose bytes JSON cannot hold is refused at once, not after the store was written."""
    path = tmp_path / os.fsdecode(b"a\xff.jsonl")
    try:
        path.write_text("{}\n")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    with pytest.raises(DataError, match="has a name that is not UTF-8, which no store can record; rename it"):
        located(str(path))


def test_a_name_where_python_reads_ascii(tmp_path, monkeypatch):
    """Under PYTHONUTF8=0 no file is to be renamed: the variable is named."""
    path = tmp_path / os.fsdecode(b"a\xff.jsonl")
    try:
        path.write_text("{}\n")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(DataError, match="Python reads names as ascii here .*set PYTHONUTF8=1"):
        located(str(path))


def test_a_directory_of_other_things(tmp_path):
    """A directory without a file of rows is refused."""
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(DataError, match="is a directory without a file of rows"):
        located(str(tmp_path))


def test_split_of_a_directory(folder):
    """A split of a directory is the files with its name, as on the Hub."""
    assert names(located(f"{folder}:train")) == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train.jsonl"]
    assert names(located(f"{folder}:more")) == ["a.jsonl.gz", "b.csv"]
    with pytest.raises(DataError, match="holds no file of rows that is called 'valid', such as valid.jsonl"):
        located(f"{folder}:valid")
    with pytest.raises(DataError, match="asks for a split of a file, and a file has none"):
        located(f"{folder}/train.jsonl:train")


def test_glob(folder, monkeypatch):
    """A glob is the matching files, sorted; two stars descend into directories."""
    assert names(located(f"{folder}/train*.jsonl")) == [
        "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "train.jsonl",
    ]  # fmt: skip
    monkeypatch.chdir(folder)
    assert names(located("**/[ab].*")) == ["a.jsonl.gz", "b.csv"]
    assert [Path(file.path).is_absolute() for file in located("t?st.jsonl")] == [True]
    with pytest.raises(DataError, match="no file matches 'x\\*.jsonl'"):
        located("x*.jsonl")
    with pytest.raises(DataError, match="train_notes.md has a suffix that is not known"):
        located("train*")


def test_a_name_with_brackets(tmp_path):
    """An existing file is that file, whatever its name would mean as a glob or a split."""
    for name in ("a[1].jsonl", "b:train.jsonl"):
        (tmp_path / name).write_text(LINE)
        assert names(located(str(tmp_path / name))) == [name]


def test_urls():
    """URLs of fsspec: a file, a directory, a glob."""
    system = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a.jsonl", "deep/c.csv", "README.md"):
        system.pipe(f"/urls/{name}", LINE.encode())
    assert names(located("memory://urls/a.jsonl")) == ["a.jsonl"]
    assert names(located("memory://urls")) == ["a.jsonl", "b.jsonl", "c.csv"]
    assert names(located("memory://urls/*.jsonl")) == ["a.jsonl", "b.jsonl"]
    for url, expected in [
        ("memory://urls/x.jsonl", "no file at 'memory://urls/x.jsonl'"),
        ("memory://urls/x*.jsonl", "no file matches"),
        ("memory://urls/README.md", "has a suffix that is not known"),
    ]:
        with pytest.raises(DataError, match=expected):
            located(url)


def test_file_urls(folder):
    """file:// is a path, with everything that a path allows."""
    assert located(f"file://{folder}/train.jsonl") == located(f"{folder}/train.jsonl")
    with pytest.raises(DataError, match="no file at"):
        located(f"file://{folder}/nothing.jsonl")
