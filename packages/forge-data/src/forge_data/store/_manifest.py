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
margins.bin          float32[P]  preferences only, where the rows give one: by how much each chosen answer is better
records.bin          uint8[C]    prompts only: JSON of each row (its prompt and further fields), one after another
record_offsets.bin   int64[N+1]  prompts only: the record of prompt i is bytes record_offsets[i] to record_offsets[i+1]
dropped.jsonl        a line a row that was left out: file, row, reason, tokens, and place, as messages name it
lint.json            what the lint found while preparing
tokenizer/           the tokenizer as it was, so that ids can be read back without anything else
```

All little-endian. Samples stand in the order of the sources, and a preference is two of them, chosen and then rejected.
A store of prompts has ids, offsets and rows, and records in the place of masks, segments and lint.
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
VERSION = 3
READABLE = (2, 3)
"""What was written before has neither margins nor prompts, and is otherwise the same."""
MANIFEST = "store.json"
DROPPED = "dropped.jsonl"
LINT = "lint.json"
TOKENIZER = "tokenizer"
SUPERVISED, PREFERENCE, UNPAIRED, PROMPTS = "supervised", "preference", "unpaired_preference", "prompts"
KINDS = (SUPERVISED, PREFERENCE, UNPAIRED, PROMPTS)
MARGINS = "margins.bin"

DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "loss_mask.bin": np.dtype("u1"),
    "offsets.bin": np.dtype("<i8"),
    "rows.bin": np.dtype("<i8"),
    "segment_starts.bin": np.dtype("<i4"),
    "segment_roles.bin": np.dtype("u1"),
    "segment_offsets.bin": np.dtype("<i8"),
    "desirable.bin": np.dtype("u1"),
    MARGINS: np.dtype("<f4"),
    "records.bin": np.dtype("u1"),
    "record_offsets.bin": np.dtype("<i8"),
}
FINGERPRINTED = (
    "input_ids.bin", "loss_mask.bin", "offsets.bin", "desirable.bin", MARGINS, "records.bin", "record_offsets.bin"
)  # fmt: skip
"""What is trained on; where a row stood in its file, or whose text a token is, is not."""
_OWN = {"desirable.bin": UNPAIRED, MARGINS: PREFERENCE, "records.bin": PROMPTS, "record_offsets.bin": PROMPTS}
_NOT_OF_PROMPTS = ("loss_mask.bin", "segment_starts.bin", "segment_roles.bin", "segment_offsets.bin")


def arrays_of(kind: str, *, margins: bool = False) -> tuple[str, ...]:
    """Names of the arrays that a store of a kind has; `margins` says whether its rows gave some."""
    without = set() if margins else {MARGINS}
    without |= {*_NOT_OF_PROMPTS} if kind == PROMPTS else set()
    return tuple(name for name in DTYPES if _OWN.get(name, kind) == kind and name not in without)


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

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of its arrays."""
        return arrays_of(self.kind, margins=MARGINS in self.sizes)

    def expected(self) -> dict[str, int]:
        """Bytes that each array must have by its count."""
        counts = {"input_ids.bin": self.tokens, "loss_mask.bin": self.tokens, MARGINS: self.samples // 2}
        counts |= {"segment_starts.bin": self.segments, "segment_roles.bin": self.segments}
        counts |= dict.fromkeys(("offsets.bin", "segment_offsets.bin", "record_offsets.bin"), self.samples + 1)
        # How long records are, no count tells.
        names = [name for name in self.arrays if name != "records.bin"]
        return {name: counts.get(name, self.samples) * DTYPES[name].itemsize for name in names}


def own_files(directory: Path) -> tuple[int, set[str]] | None:
    """Version and file names of a token store of ours, of whatever version and in whatever state; None for anything else."""
    try:
        fields = json.loads((directory / MANIFEST).read_text("utf-8"))
        if fields["format"] != FORMAT:
            return None
        return int(fields["version"]), {MANIFEST, *fields["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds_prompts(directory: Path) -> bool:
    """Whether a directory says that it is a store of prompts; what it is else, opening it tells."""
    try:
        return json.loads((directory / MANIFEST).read_text("utf-8"))["kind"] == PROMPTS
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_manifest(directory: Path) -> Manifest:
    """What `store.json` of a directory says, held against the files beside it.

    Raises:
        StoreError: no store, a foreign, older or newer one, or files whose sizes are not those that were written.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if directory.is_file():
            rows = f"forge_data.prepare({str(directory)!r}, tokenizer, store_dir)"
            raise StoreError(
                f"{directory} is a file, not a token store: if it holds rows, {rows} makes a store of them; open that"
            )
        found = f"it holds no {MANIFEST}" if directory.is_dir() else "there is no such directory"
        raise StoreError(f"{directory} is not a token store: {found}; forge_data.prepare(...) makes one")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise StoreError(f"{path} is not of a {FORMAT}; it belongs to something else")
    if (version := fields.pop("version", None)) not in READABLE:
        raise StoreError(
            f"{path} has format version {version!r}, this forge-data reads {' and '.join(map(str, READABLE))}; prepare it again"
        )
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
    for name in (*manifest.arrays, DROPPED, *([LINT] if manifest.kind != PROMPTS else [])):
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
