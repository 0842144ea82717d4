"""Bytecode of an environment → that of another one, for the modules that both hold with the same text.

pip compiles none in these environments, Python does what is imported: 13 of the 20 seconds in which an environment's first
process imports torch and transformers, and as much in every further environment, though the files are the same ones.
`python tools/bytecode.py NAME` takes it from the environment NAME of hatch, beside the one that runs this.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

_HEADER = 16
"""Bytes before the code: Python's magic number, flags, and of the source the seconds of its last change and its size."""


def reuse(source: Path, target: Path) -> int:
    """Copy the bytecode of modules whose text is the same below both folders of packages; return how many were copied.

    A file of bytecode names its source by time and size, so that these are written anew; the path in it is set when it is read.
    """
    return sum(_copied(cached, text, target / text.relative_to(source)) for cached, text in _compiled(source))


def _compiled(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file of this Python's bytecode below a folder, with the source that it is of."""
    ending = cache_from_source("x.py").rpartition("x")[2]
    for cached in folder.rglob(f"__pycache__/*{ending}"):
        text = cached.parents[1] / f"{cached.name.removesuffix(ending)}.py"
        if text.is_file():
            yield cached, text


def _copied(cached: Path, text: Path, other: Path) -> bool:
    """Write the bytecode of `text` for `other`, if that has the same bytes and none of its own."""
    written = Path(cache_from_source(str(other)))
    if written.exists() or not other.is_file():
        return False
    content, own, now = cached.read_bytes(), text.stat(), other.stat()
    if content[:_HEADER] != _header(own) or own.st_size != now.st_size or text.read_bytes() != other.read_bytes():
        return False
    written.parent.mkdir(exist_ok=True)
    part = written.with_name(f"{written.name}.{os.getpid()}")
    part.write_bytes(_header(now) + content[_HEADER:])
    part.replace(written)
    return True


def _header(of: os.stat_result) -> bytes:
    """Return the first bytes of what Python writes for a source of this time and size."""
    numbers = (0, int(of.st_mtime), of.st_size)
    return MAGIC_NUMBER + b"".join((number & 0xFFFFFFFF).to_bytes(4, "little") for number in numbers)


def beside(name: str) -> Path:
    """Return the folder of packages of the environment of a name beside this one, whether or not it is there."""
    return Path(sys.prefix).parent / name / packages().relative_to(sys.prefix)


def packages() -> Path:
    """Return the folder of packages of the environment that runs this."""
    return Path(sysconfig.get_path("purelib"))


if __name__ == "__main__":
    print(f"{reuse(beside(sys.argv[1]), packages())} modules are compiled already")
