"""What a token store is on disk: arrays, what a person wants to know beside them, and the one file that vouches for all.

```
store.json           format and version, sizes, SHA-256, source files, accounting, settings
input_ids.bin        int32[T]    token ids of all samples, one after another
loss_mask.bin        uint8[T]    1 where a token is learned
offsets.bin          int64[N+1]  sample i is tokens offsets[i] to offsets[i+1]
rows.bin             int64[N]    the row of its source file that sample i came from
segment_starts.bin   int32[G]    where each segment begins, counted from the beginning of its sample
segment_roles.bin    uint8[G]    whose text it is: a place in `ROLES`
segment_offsets.bin  int64[N+1]  the segments of sample i are segment_offsets[i] to segment_offsets[i+1]
desirable.bin        uint8[N]    unpaired preferences only: 1 where the answer is wanted
dropped.jsonl        a line a row that was left out: file, row, reason, tokens, and place, as messages name it
lint.json            what the lint found while preparing
tokenizer/           the tokenizer as it was, so that ids can be read back without anything else
```

All little-endian. Samples stand in the order of the sources, and a preference is two of them, chosen and then rejected.
`store.json` is written last, and the directory gets its name once all is on disk.
"""

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_data._accounting import Accounting
from forge_data._errors import StoreError

FORMAT = "forge-data token store"
VERSION = 2
MANIFEST = "store.json"
DROPPED = "dropped.jsonl"
LINT = "lint.json"
TOKENIZER = "tokenizer"
SUPERVISED, PREFERENCE, UNPAIRED = "supervised", "preference", "unpaired_preference"
KINDS = (SUPERVISED, PREFERENCE, UNPAIRED)

DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "loss_mask.bin": np.dtype("u1"),
    "offsets.bin": np.dtype("<i8"),
    "rows.bin": np.dtype("<i8"),
    "segment_starts.bin": np.dtype("<i4"),
    "segment_roles.bin": np.dtype("u1"),
    "segment_offsets.bin": np.dtype("<i8"),
    "desirable.bin": np.dtype("u1"),
}
FINGERPRINTED = ("input_ids.bin", "loss_mask.bin", "offsets.bin", "desirable.bin")
"""What is trained on; where a row stood in its file, or whose text a token is, is not."""


def arrays_of(kind: str) -> tuple[str, ...]:
    """Names of the arrays that a store of a kind has."""
    return tuple(name for name in DTYPES if kind == UNPAIRED or name != "desirable.bin")


@attrs.frozen
class SourceFile:
    """A file that samples came from; samples stand in the order of the sources."""

    name: str
    path: str
    samples: int
    group: int = 0
    """Which entry of `data_path` it belongs to; a directory is one entry of several files."""
    weight: float | None = None
    """The share that was given to its entry, None where none was."""
    indexed: bool = False
    """Whether a place in it is `train.json[416]` and not `train.jsonl:417`."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What `store.json` says."""

    kind: str
    samples: int
    tokens: int
    segments: int
    fingerprint: str
    """SHA-256 of the arrays that are trained on."""
    inputs: str | None
    """SHA-256 of all that the store was made from; None where that cannot be told, and it is never reused."""
    sha256: dict[str, str]
    """Of every file but this one, by its name."""
    sizes: dict[str, int]
    """Bytes of every file but this one."""
    sources: list[SourceFile]
    accounting: Accounting
    settings: dict[str, Any] = attrs.field(factory=dict)

    def dumps(self) -> str:
        """The text of `store.json`."""
        fields = {"format": FORMAT, "version": VERSION, **attrs.asdict(self, recurse=False)}
        fields["sources"] = [attrs.asdict(source) for source in self.sources]
        fields["accounting"] = self.accounting.as_dict()
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"

    def expected(self) -> dict[str, int]:
        """Bytes that each array must have by its count."""
        counts = {"input_ids.bin": self.tokens, "loss_mask.bin": self.tokens}
        counts |= {"segment_starts.bin": self.segments, "segment_roles.bin": self.segments}
        counts |= {"offsets.bin": self.samples + 1, "segment_offsets.bin": self.samples + 1}
        return {name: counts.get(name, self.samples) * DTYPES[name].itemsize for name in arrays_of(self.kind)}


def own_files(directory: Path) -> tuple[int, set[str]] | None:
    """Version and file names of a token store of ours, of whatever version and in whatever state; None for anything else."""
    try:
        fields = json.loads((directory / MANIFEST).read_text("utf-8"))
        if fields["format"] != FORMAT:
            return None
        return int(fields["version"]), {MANIFEST, *fields["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_manifest(directory: Path) -> Manifest:
    """What `store.json` of a directory says, held against the files beside it.

    Raises:
        StoreError: no store, a foreign, older or newer one, or files whose sizes are not those that were written.
    """
    path = directory / MANIFEST
    if not path.is_file():
        found = "there is no such directory" if not directory.is_dir() else f"it holds no {MANIFEST}"
        raise StoreError(f"{directory} is not a token store: {found}; forge_data.prepare(...) makes one")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise StoreError(f"{path} is not of a {FORMAT}; it belongs to something else")
    if (version := fields.pop("version", None)) != VERSION:
        raise StoreError(f"{path} has format version {version!r}, this forge-data reads {VERSION}; prepare it again")
    try:
        manifest = _manifest(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the store again") from error
    _check(directory, manifest)
    return manifest


def _manifest(fields: dict[str, Any]) -> Manifest:
    fields["accounting"] = Accounting(**fields["accounting"])
    fields["sources"] = [SourceFile(**source) for source in fields["sources"]]
    counts = {name: int(fields[name]) for name in ("samples", "tokens", "segments")}
    manifest = Manifest(**fields | counts)
    if manifest.kind not in KINDS:
        raise ValueError(f"kind {manifest.kind!r} is none of {', '.join(KINDS)}")
    for name in (*arrays_of(manifest.kind), DROPPED, LINT):
        int(manifest.sizes[name])
        str(manifest.sha256[name])
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in manifest.sizes):
        raise ValueError("a file outside the store is named")
    return manifest


def _check(directory: Path, manifest: Manifest) -> None:
    for name, size in (manifest.sizes | manifest.expected()).items():
        path = directory / name
        try:
            found = path.stat().st_size
        except OSError:
            found = None
        if found != size:
            raise StoreError(
                f"{path} is torn: {'missing' if found is None else f'{found:,} bytes'} where {size:,} bytes were written; "
                "remove the directory and prepare the store again"
            )
    told = manifest.accounting
    if manifest.samples < 1 or not manifest.samples == told.samples == sum(source.samples for source in manifest.sources):
        raise StoreError(f"{directory / MANIFEST} is damaged: {manifest.samples} samples, but {told.samples} were kept")
    if manifest.tokens != told.tokens_kept:
        raise StoreError(f"{directory / MANIFEST} is damaged: {manifest.tokens} tokens, but {told.tokens_kept} were kept")
