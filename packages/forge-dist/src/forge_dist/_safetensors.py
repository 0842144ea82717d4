"""Read the headers of safetensors files, without their data and without torch.

The format: 8 bytes little-endian length of the header, the header (JSON: name → dtype, shape, data_offsets; optional
`__metadata__`), the data. Source: https://github.com/huggingface/safetensors#format.
"""

import json
from pathlib import Path
from typing import NamedTuple

_HEADER_LIMIT = 100_000_000  # the library's own limit, in bytes


class TensorEntry(NamedTuple):
    """A tensor's entry in a file's header."""

    file: Path
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    size: int  # bytes
    start: int  # position of its first byte in the file


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return name → entry of one file.

    Raises:
        ValueError: the file is not whole (truncated, a Git LFS pointer, not safetensors); the message names it.
        OSError: it cannot be read.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{file} is not a whole safetensors file ({size} bytes)")
        header = stream.read(length)
    try:
        entries: dict[str, dict[str, object]] = json.loads(header)
        entries.pop("__metadata__", None)
        found = {}
        end = 0
        for name, entry in entries.items():
            start, stop = (int(offset) for offset in entry["data_offsets"])  # pyrefly: ignore[not-iterable]
            shape = tuple(int(extent) for extent in entry["shape"])  # pyrefly: ignore[not-iterable]
            found[name] = TensorEntry(file, str(entry["dtype"]), shape, stop - start, 8 + length + start)
            end = max(end, stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a whole safetensors file (its header cannot be read: {error})") from None
    if size != 8 + length + end:
        raise ValueError(f"{file} is not a whole safetensors file: it has {size} bytes and should have {8 + length + end}")
    return found


def read_directory(directory: Path, stem: str = "model") -> dict[str, TensorEntry]:
    """Return name → entry of the weights that transformers (or PEFT) reads from `directory`.

    Those of STEM.safetensors, or of the files that STEM.safetensors.index.json lists, each of which must be whole and match the
    index.

    Raises:
        FileNotFoundError: neither is there, or a listed file is missing.
        ValueError: a file, or the index, is broken.
    """
    single, index_file = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if not index_file.is_file():
        raise FileNotFoundError(f"{directory} holds neither {single.name} nor {index_file.name}")
    try:
        places: dict[str, str] = dict(json.loads(index_file.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index_file} is not an index of safetensors files: {error!r}") from None
    found: dict[str, TensorEntry] = {}
    for name in sorted(set(places.values())):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name} is missing, and {index_file.name} lists it")
        found |= read_header(directory / name)
    for name, place in places.items():
        if name not in found or found[name].file.name != place:
            raise ValueError(f"{directory / place} lacks the tensor {name}, which {index_file.name} places there")
    return found
