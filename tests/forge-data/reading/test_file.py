"""Local, remote and compressed files: all bytes, or an error."""

import gzip
import importlib.util
import sys

import fsspec
import pytest

from forge_data import DataError
from forge_data.reading import _file as module
from forge_data.reading._file import DataFile, filesystem

DATA = b'{"a": 1}\n' * 20_000
needs_zstd = pytest.mark.skipif(
    sys.version_info < (3, 14) and not (importlib.util.find_spec("backports") and importlib.util.find_spec("backports.zstd")),
    reason="the zst extra is not installed: pip install 'forge-data[zst]'",
)


def read(file, **how):
    with file.opened(**how) as opened:
        return opened.read()


def zstd(data):
    return module._zstd().compress(data)


def write(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    return DataFile(str(tmp_path / name))


@pytest.mark.parametrize(
    ("path", "suffixes"),
    [
        ("/a/b.jsonl", (".jsonl", "")),
        ("/a/b.JSONL.GZ", (".jsonl", ".gz")),
        ("/a/b.gz", ("", ".gz")),
        ("https://x/b.csv.zst?download=true", (".csv", ".zst")),
        ("/a.csv/b", ("", "")),
        ("/a/why?.jsonl", (".jsonl", "")),
    ],
)
def test_suffixes(path, suffixes):
    """Type and compression follow from the name, without a URL's query."""
    assert DataFile(path).suffixes == suffixes


@pytest.mark.parametrize("compress", [gzip.compress, pytest.param(zstd, marks=needs_zstd)])
def test_compressed(tmp_path, compress):
    """A compressed file is read to its end, also if it consists of several members."""
    suffix = ".gz" if compress is gzip.compress else ".zst"
    file = write(tmp_path, f"a.jsonl{suffix}", compress(DATA) + compress(b"more\n"))
    assert read(file) == DATA + b"more\n"
    assert not file.plain
    assert read(file, decompressed=False)[:2] != DATA[:2]


@pytest.mark.parametrize("compress", [gzip.compress, pytest.param(zstd, marks=needs_zstd)])
def test_damage(tmp_path, compress):
    """A compressed file that breaks off, is damaged or is not compressed is refused by name, not read halfway."""
    suffix = ".gz" if compress is gzip.compress else ".zst"
    whole = compress(DATA)
    with pytest.raises(DataError, match="cut.jsonl.* breaks off in the middle"):
        read(write(tmp_path, f"cut.jsonl{suffix}", whole[:-9]))
    with pytest.raises(DataError, match=f"plain.jsonl{suffix} is damaged, or not a {suffix} file"):
        read(write(tmp_path, f"plain.jsonl{suffix}", DATA))
    bad = bytearray(whole)
    bad[len(bad) // 2 :] = bytes(255 - byte for byte in bad[len(bad) // 2 :])
    with pytest.raises(DataError, match="bad.jsonl"):
        read(write(tmp_path, f"bad.jsonl{suffix}", bytes(bad)))


def test_without_zstd(tmp_path, monkeypatch):
    """Without a reader for .zst, the message names the package to install."""
    monkeypatch.setattr(module, "_zstd", lambda: None)
    with pytest.raises(DataError, match=r"a.jsonl.zst needs a package to be decompressed: pip install 'forge-data\[zst\]'"):
        read(write(tmp_path, "a.jsonl.zst", b"x"))


def test_digest(tmp_path):
    """The digest is of the bytes, local or remote, and of nothing else."""
    one, two = write(tmp_path, "a.jsonl", DATA), write(tmp_path, "b.jsonl", DATA)
    assert one.digest() == two.digest() != write(tmp_path, "c.jsonl", DATA + b"\n").digest()
    fsspec.filesystem("memory").pipe("/digest/a.jsonl", DATA)
    assert DataFile("memory://digest/a.jsonl").digest() == one.digest()


def test_an_etag_vouches(monkeypatch):
    """Where a remote store has an ETag, nothing is fetched for the digest."""
    system = fsspec.filesystem("memory")
    system.pipe("/tag/a.jsonl", DATA)
    tags = iter(["one", "one", "two"])
    monkeypatch.setattr(system, "info", lambda path: {"ETag": next(tags), "size": len(DATA)})
    monkeypatch.setattr(system, "open", None)
    file = DataFile("memory://tag/a.jsonl")
    assert file.digest() == file.digest() != file.digest()


def test_elsewhere():
    """A URL is opened with fsspec; it has no path on this machine."""
    fsspec.filesystem("memory").pipe("/here/a.jsonl.gz", gzip.compress(DATA))
    file = DataFile("memory://here/a.jsonl.gz")
    assert read(file) == DATA
    assert file.local is None
    assert not file.plain


def test_protocols(monkeypatch):
    """An unknown protocol is refused; for a known one without its package the message names what to install."""
    with pytest.raises(DataError, match="nowhere://a.jsonl cannot be opened: Protocol not known: nowhere"):
        filesystem("nowhere://a.jsonl")

    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(
        DataError, match=r"s3://b/a.jsonl needs a package that is not installed: pip install 'forge-data\[s3\]'"
    ):
        filesystem("s3://b/a.jsonl")
