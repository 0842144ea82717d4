"""The manifest of a full state: its files and tensors, with digests.

`manifest.json` lists every file with its size and SHA-256, every tensor with its chunks, and has a SHA-256 of itself, so that
nothing of a full state can be lost, truncated, swapped or edited unnoticed.

Tensors that are divided alike have their dtype, shape and chunks in common: `layouts` holds each once, and `tensors` has the
position of its layout for each name. In version 1, which is still read, every tensor had its own.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from forge_dist._errors import CheckpointError
from forge_dist._files import file_damage, size_damage
from forge_dist.checkpoints._plan import DTYPES, Chunk, StoredTensor
from forge_dist.checkpoints._write import WrittenFile, file_of

MANIFEST = "manifest.json"
FORMAT, VERSION = "forge full state", 2
_READ = (1, 2)


class Damaged(ValueError):  # noqa: N818 - a finding, which the caller turns into a CheckpointError or a note
    """A full state that is not whole; the message names the file and what is wrong with it."""


@attrs.frozen(kw_only=True)
class Manifest:
    """Contents of one full state. All values are plain JSON but the tuples."""

    step: int
    """Optimizer step after which it was saved."""
    serial: int
    """Number among the full states of a run, in the order in which they were finished: after going back, steps repeat."""
    world_size: int
    """Number of ranks that saved it."""
    versions: dict[str, str]
    """Distribution → version of what wrote it."""
    must_match: dict[str, Any]
    """Values that a run must have in common with the one that saved."""
    about: dict[str, Any]
    """The caller's own JSON."""
    files: dict[str, WrittenFile]
    """File name → size and digest."""
    tensors: dict[str, StoredTensor]
    """Tensor name → its chunks."""

    @staticmethod
    def from_text(text: str) -> "Manifest":
        """Parse what `to_text` wrote."""
        return _from_content(json.loads(text))

    def to_text(self) -> str:
        """Return the content of manifest.json."""
        content = {"format": FORMAT, "version": VERSION, **attrs.asdict(self, recurse=False)}
        content["files"] = {name: written._asdict() for name, written in self.files.items()}
        content["layouts"], content["tensors"] = _layouts(self.tensors)
        return json.dumps({**content, "sha256": _digest(content)}, separators=(",", ":"))


def _layouts(tensors: Mapping[str, StoredTensor]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the different layouts, and name → position of its layout."""
    found: dict[str, int] = {}
    layouts: list[dict[str, Any]] = []
    positions: dict[str, int] = {}
    # A list of chunks that tensors share is looked at once: it may have one for each of many ranks.
    texts: dict[tuple[str, int], str] = {}
    for name, tensor in tensors.items():
        key = tensor.dtype, id(tensor.chunks)
        if key not in texts:
            texts[key] = json.dumps(tensor)
        text = texts[key]
        if text not in found:
            found[text] = len(layouts)
            layouts.append(tensor._asdict())
        positions[name] = found[text]
    return layouts, positions


def _digest(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return distribution → version of what writes the files."""
    found = {}
    for name in ("torch", "forge-dist"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def jsonable(values: Mapping[str, Any], what: str) -> str:
    """Return the values as JSON text.

    Raises:
        CheckpointError: one of them is not JSON; the message begins with `what`.
    """
    try:
        return json.dumps(dict(values))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} of a full state must be JSON: {error}") from None


def next_serial(directories: Iterable[Path]) -> int:
    """Return the serial after those of these full states."""
    serials = [0]
    for directory in directories:
        with suppress(Damaged, CheckpointError, OSError):
            serials.append(read_manifest(directory, None).serial)
    return max(serials) + 1


def read_manifest(directory: Path, step: int | None) -> Manifest:
    """Read the manifest of the full state in `directory`, whose name has `step` (None: no step).

    Raises:
        Damaged: it is missing, truncated, edited or of another step.
        CheckpointError: it is whole and in a format that this version does not read.
        OSError: it cannot be read.
    """
    try:
        text = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    manifest = _parse(text, directory)
    if step is not None and manifest.step != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.step}, and the directory is called {directory.name}")
    return manifest


def _parse(text: bytes, directory: Path) -> Manifest:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is not JSON ({error})") from None
    # The digest comes before the version: a flipped bit in the version is damage, and no reason to ask for another forge-dist.
    if not isinstance(content, dict) or content.get("sha256") != _digest(content):
        raise Damaged(f"{MANIFEST} does not have the SHA-256 that it says it has: it was edited or damaged")
    if content.get("format") != FORMAT or content.get("version") not in _READ:
        raise CheckpointError(
            f"{directory} is of format {content.get('format')!r}, version {content.get('version')!r}; "
            f"this forge-dist reads {FORMAT!r}, versions {' and '.join(map(str, _READ))}: use the version that wrote it "
            f"({content.get('versions')})"
        )
    try:
        manifest = _from_content(content)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise Damaged(f"{MANIFEST} lacks entries that it must have ({error!r})") from None
    looked_at: set[int] = set()
    for name, tensor in manifest.tensors.items():
        if id(tensor.chunks) in looked_at:
            continue
        if tensor.dtype not in DTYPES or any(file_of(chunk.rank) not in manifest.files for chunk in tensor.chunks):
            raise Damaged(f"{MANIFEST} describes {name} in a way that cannot be followed")
        looked_at.add(id(tensor.chunks))
    return manifest


def _from_content(content: Mapping[str, Any]) -> Manifest:
    if content.get("version") == 1:
        tensors = {str(name): _stored(tensor) for name, tensor in content["tensors"].items()}
    else:
        layouts = dict(enumerate(map(_stored, content["layouts"])))
        tensors = {str(name): layouts[position] for name, position in content["tensors"].items()}
    files = {str(name): WrittenFile(**written) for name, written in content["files"].items()}
    rest = {key: content[key] for key in ("step", "serial", "world_size", "versions", "must_match", "about")}
    return Manifest(files=files, tensors=tensors, **rest)


def _stored(layout: Mapping[str, Any]) -> StoredTensor:
    return StoredTensor(layout["dtype"], layout["shape"], [Chunk(*chunk) for chunk in layout["chunks"]])


def check_sizes(directory: Path, files: Mapping[str, WrittenFile]) -> None:
    """Check that every file exists and has its size.

    Raises:
        Damaged: one is missing, is no file or has another size.
    """
    for name, written in files.items():
        try:
            wrong = size_damage(directory / name, written.size)
        except OSError as error:
            raise Damaged(f"{name} cannot be found ({error.strerror})") from None
        if wrong is not None:
            raise Damaged(wrong)


def check_hash(file: Path, written: WrittenFile) -> str | None:
    """Return what is wrong with the file's bytes, or None."""
    return file_damage(file, *written)


def refuse_foreign(directory: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a full state belongs to the run that asks for it.

    Raises:
        CheckpointError: values of `must_match` differ; each is named, with both values.
    """
    wanted = json.loads(json.dumps(dict(wanted)))  # tuples become lists, as they did in the file
    absent = "(not there)"
    differing = [
        f"{name}: {saved.get(name, absent)!r} was saved, {wanted.get(name, absent)!r} is asked for"
        for name in sorted({*saved, *wanted})
        if name not in saved or name not in wanted or saved[name] != wanted[name]
    ]
    if differing:
        raise CheckpointError(f"{directory} belongs to another run: {'; '.join(differing)}")
