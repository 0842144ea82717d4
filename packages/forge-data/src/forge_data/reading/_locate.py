"""Entry of `data_path` → the files, or the split of a dataset, that it names."""

import errno
import glob
import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from forge_data._errors import DataError
from forge_data.reading._file import COMPRESSED, DataFile, beside, filesystem
from forge_data.reading._huggingface import DatasetSplit, is_hub_name, is_saved, open_hub, open_saved

ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (".parquet", ".arrow", ".feather")
# Suffixes of files that are usually beside data in a directory.
_OTHER_SUFFIXES = {
    "",
    ".md",
    ".txt",
    ".rst",
    ".yaml",
    ".yml",
    ".py",
    ".ipynb",
    ".toml",
    ".cfg",
    ".lock",
    ".log",
    ".pdf",
    ".png",
    ".html",
}
_SHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")
_PLAIN_TEXT = (".txt", ".text", ".md", ".rst")
_IN_MEMORY = re.compile(r" of [\d,]+ rows, sha256 [0-9a-f]{16}$")
"""What a store and a run record in the place of a path where rows were given as objects."""
_GLOB = re.compile(r"[*?\[]")
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def located(entry: str) -> list[DataFile] | DatasetSplit:
    """Find what an entry names: a file, the files of a directory or a glob, sorted, or a split.

    Raises:
        DataError: nothing is there, or something that cannot be read.
    """
    if "://" in entry:
        return _remote(entry)
    mode = _mode(entry)
    if mode is None:
        base, colon, split = entry.rpartition(":")
        if colon and base and _mode(base) is not None:
            return _split(base, split)
        if is_hub_name(entry):
            return open_hub(entry)
        if _GLOB.search(entry):
            return _matching(entry)
        raise DataError(_not_found(entry))
    path = Path(entry).expanduser().absolute()
    if stat.S_ISDIR(mode):
        return open_saved(path, None) if is_saved(path) else _files_in(path, entry)
    return [_file(path, entry)]


def _not_found(entry: str) -> str:
    if _IN_MEMORY.search(entry):
        return f"{entry!r} were rows in memory, which no path leads to; give the same rows again in Python"
    if "," in entry and all(map(os.path.exists, parts := [os.path.expanduser(part.strip()) for part in entry.split(",")])):
        return f"no file at {entry!r}; give each file by itself, without commas: {' '.join(parts)}"
    what = f"no file at {entry!r} (looked from {Path.cwd()}); check the path"
    if is_hub_name(f"{entry}:train") and Path(entry).suffix not in (*ROWS, *TABLES, *COMPRESSED):
        what += f". A dataset on the Hub is given with its split: '{entry}:train'"
    return what


def _mode(entry: str) -> int | None:
    """Return the `stat` mode of a path; None where nothing is there."""
    try:
        return Path(entry).expanduser().stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{entry} is not a regular file but a loop of symbolic links; check the path") from error
        raise DataError(f"{entry} cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:
        # A null byte, or an unknown ~user.
        raise DataError(f"{entry!r} is no path to a file: {error}") from error


def _file(path: Path, entry: str) -> DataFile:
    """Check that a file can be read.

    Raises:
        DataError: not a regular file, of an unknown suffix, empty, or not readable.
    """
    mode = _mode(str(path))
    if mode is None:
        raise DataError(f"{path} is a broken link; correct or remove it")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        if (encoding := sys.getfilesystemencoding()) != "utf-8":
            why = f"Python reads names as {encoding} here (PYTHONUTF8=0, or a locale of that encoding)"
            raise DataError(f"{str(path)!r}: {why}; set PYTHONUTF8=1") from error
        raise DataError(f"{str(path)!r} has a name that is not UTF-8, which no store can record; rename it") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise DataError(f"{entry} is not a regular file but {kind}; write the rows to a file and give that")
    file = DataFile(str(path))
    _check_suffix(file)
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: it holds no rows")
    return file


def _check_suffix(file: DataFile) -> None:
    suffix, compressed = file.suffixes
    if suffix in TABLES and compressed:
        raise DataError(f"{file.path}: a {suffix} file is compressed within; decompress it ({compressed})")
    if suffix not in ROWS + TABLES:
        raise DataError(
            f"{file.path} has a suffix that is not known ({suffix or compressed or 'none'}); known: "
            f"{', '.join(ROWS + TABLES)}, of text files also with {' or '.join(COMPRESSED)}{_converted(file, suffix)}"
        )


def _converted(file: DataFile, suffix: str) -> str:
    """Say how a file of another program becomes rows; empty where that is not known."""
    if suffix in _SHEETS:
        return '; save the sheet as CSV, "CSV UTF-8" in Excel, with a first line that names the columns'
    if suffix in _PLAIN_TEXT:
        old, new = beside(PurePosixPath(file.path).name, ".jsonl")
        return (
            f"; rows of text are objects with the field text: `jq -Rc '{{text: .}}' {old} > {new}` makes one of each line, "
            "`jq -Rsc` one of the whole file"
        )
    if suffix in (".yaml", ".yml"):
        return "; a recipe holds settings and no rows: give the files that its data_path names"
    return ""


def _split(base: str, split: str) -> list[DataFile] | DatasetSplit:
    path = Path(base).expanduser().absolute()
    if not path.is_dir():
        raise DataError(f"{base}:{split} asks for a split of a file, and a file has none; give {base}")
    if is_saved(path):
        return open_saved(path, split)
    # As the Hub names files: train.jsonl, train-00000-of-00002.parquet, data_train.csv, train/rows.jsonl.
    files = [file for file in _data_files(path, base) if split in _words(file.relative_to(path))]
    if not files:
        raise DataError(
            f"{base} holds no file of rows that is called {split!r}, such as {split}.jsonl or {split}-00000.parquet"
        )
    return [_file(file, str(file)) for file in files]


def _words(path: Path) -> set[str]:
    return {*path.parts[:-1], *re.split(r"[-_.]", path.name)}


def _files_in(path: Path, entry: str) -> list[DataFile]:
    files = _data_files(path, entry)
    if not files:
        raise DataError(f"{entry} is a directory without a file of rows; known: {', '.join(ROWS + TABLES)}")
    return [_file(file, str(file)) for file in files]


def _data_files(path: Path, entry: str) -> list[Path]:
    return [
        path / name
        for name in _row_files(entry, (str(each.relative_to(path)) for each in sorted(path.rglob("*")) if not each.is_dir()))
    ]


def _row_files(entry: str, names: Iterable[str]) -> list[str]:
    """Choose the files of rows among those of a directory, sorted.

    Hidden files, and those of suffixes that are usually beside data, are ignored.

    Raises:
        DataError: one of them may hold rows and cannot be read; it is not left out silently.
    """
    kept = []
    for name in sorted(names):
        if any(part.startswith((".", "_")) for part in PurePosixPath(name).parts):
            continue
        suffix, compressed = DataFile(name).suffixes
        if suffix in ROWS + TABLES:
            kept.append(name)
        elif suffix not in _OTHER_SUFFIXES or compressed:
            raise DataError(
                f"{entry} holds {name}, whose suffix is not known; known: {', '.join(ROWS + TABLES)}. Move it away, or give "
                f"the files that are meant, such as {entry.rstrip('/')}/*.jsonl"
            )
    return kept


def _matching(pattern: str) -> list[DataFile]:
    expanded = str(Path(pattern).expanduser().absolute())
    found = [Path(name) for name in sorted(glob.glob(expanded, recursive=True))]
    files = [_file(path, str(path)) for path in found if not path.is_dir()]
    if not files:
        raise DataError(f"no file matches {pattern!r} (looked from {Path.cwd()}); check the pattern")
    return files


def _remote(url: str) -> list[DataFile] | DatasetSplit:
    system, path = filesystem(url)
    protocols = (system.protocol,) if isinstance(system.protocol, str) else tuple(system.protocol)
    if "file" in protocols:
        return located(path)
    web = "http" in protocols
    try:
        if "*" in path if web else _GLOB.search(path):
            names = sorted(str(name) for name in system.glob(path))
            found = [system.unstrip_protocol(name) for name in names if web or not system.isdir(name)]
            if not found:
                raise DataError(f"no file matches {url!r}; check the pattern")
        elif not web and system.isdir(path):
            inside = {str(name).removeprefix(path).lstrip("/"): str(name) for name in system.find(path)}
            found = [system.unstrip_protocol(inside[name]) for name in _row_files(url, inside)]
            if not found:
                raise DataError(f"{url} is a directory without a file of rows; known: {', '.join(ROWS + TABLES)}")
        elif system.exists(path):
            found = [url]
        else:
            raise DataError(f"no file at {url!r}; check the address")
    except OSError as error:
        raise DataError(f"{url} cannot be read: {error}") from error
    files = [DataFile(each) for each in found]
    for file in files:
        _check_suffix(file)
    return files
