"""Files of a store, and `store.json`, which records the size and hash of each.

```
store.json           format and version, sizes, SHA-256, source files, accounting, settings
input_ids.bin        int32[T]    token ids of all samples, one after another
loss_mask.bin        uint8[T]    1 where a token is learned
offsets.bin          int64[N+1]  sample i is tokens offsets[i] to offsets[i+1]
rows.bin             int64[N]    row of its source file that sample i came from
segment_starts.bin   int32[G]    where each segment begins, counted from the beginning of its sample
segment_roles.bin    uint8[G]    role of the segment's text: an index into `ROLES`
segment_offsets.bin  int64[N+1]  segments of sample i are segment_offsets[i] to segment_offsets[i+1]
desirable.bin        uint8[N]    unpaired preferences only: 1 where the answer is wanted
shared.bin           int32[N]    only where rows became a sample for each turn: first tokens that a later turn of the row has
                                 too; -1 for the last turn, and for a sample that is all of its row
weights.bin          float32[T]  only where some are neither 0 nor 1: by how much each token's loss term counts
images.bin           uint8[C]    only where rows have images: JSON of each sample's images: SHA-256, first and last token + 1
image_offsets.bin    int64[N+1]  images of sample i are bytes image_offsets[i] to image_offsets[i+1]
image_files.bin      uint8[C]    JSON of where they are, field and path, and the bytes of those that a row holds itself
image_file_offsets.bin
                     int64[N+1]  those of sample i are bytes image_file_offsets[i] to image_file_offsets[i+1]
teacher_ids.bin      int32[U]    only where a teacher has another tokenizer: its tokens of each sample's text
teacher_starts.bin   uint8[U]    1 where a text of the teacher's begins; a sample may have several
teacher_offsets.bin  int64[N+1]  teacher's tokens of sample i are teacher_offsets[i] to teacher_offsets[i+1]
spans.bin            int32[4G]   tokens [a, b) of a sample and [c, d) of its teacher's, which spell the same text
span_offsets.bin     int64[N+1]  numbers in spans.bin of sample i are span_offsets[i] to span_offsets[i+1]
margins.bin          float32[P]  preferences with margins only: by how much each chosen answer is better
records.bin          uint8[C]    prompts only: JSON of each row (its prompt and further fields), one after another
record_offsets.bin   int64[N+1]  prompts only: record of prompt i is bytes record_offsets[i] to record_offsets[i+1]
dropped.jsonl        a line for each row that was left out: file, row, reason, tokens, and place, as messages name it
lint.json            findings of the lint while preparing
tokenizer/           the tokenizer, so that ids can be read back without anything else
```

All little-endian. Samples are in the order of the sources, and a preference is two of them, chosen and then rejected. A store
of prompts has ids, offsets and rows, and records in place of masks, segments and lint. `store.json` is written last, and the
directory gets its name once everything is on disk.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_data._accounting import Accounting
from forge_data._errors import StoreError, printable
from forge_data._shard import Shard
from forge_data._values import parsed_json

FORMAT = "forge-data token store"
VERSION = 4
WITH_MEDIA = 6
"""Version of stores with media, which earlier releases would train without them, or take for images."""
WITH_TEACHER = 7
"""Version of stores with a teacher's tokens, which earlier releases would train without them."""
READABLE = (2, 3, 4, 5, 6, 7)
"""Versions that can be read; earlier ones lack weights and turns, 2 margins and prompts too, and are otherwise the same."""
MANIFEST = "store.json"
DROPPED = "dropped.jsonl"
LINT = "lint.json"
TOKENIZER = "tokenizer"
SUPERVISED, PREFERENCE, UNPAIRED, PROMPTS = "supervised", "preference", "unpaired_preference", "prompts"
KINDS = (SUPERVISED, PREFERENCE, UNPAIRED, PROMPTS)
MARGINS = "margins.bin"
WEIGHTS = "weights.bin"
SHARED = "shared.bin"
MEDIA, MEDIA_OFFSETS = "images.bin", "image_offsets.bin"
MEDIA_FILES, MEDIA_FILE_OFFSETS = "image_files.bin", "image_file_offsets.bin"
TEACHER_IDS, TEACHER_STARTS, TEACHER_OFFSETS = "teacher_ids.bin", "teacher_starts.bin", "teacher_offsets.bin"
SPANS, SPAN_OFFSETS = "spans.bin", "span_offsets.bin"
TEACHER_RUNS = "teacher_runs.bin"
ALONE = -1
"""In `SHARED`: no later turn of its row follows a sample."""

DTYPES = {
    "input_ids.bin": np.dtype("<i4"),
    "loss_mask.bin": np.dtype("u1"),
    "offsets.bin": np.dtype("<i8"),
    "rows.bin": np.dtype("<i8"),
    "segment_starts.bin": np.dtype("<i4"),
    "segment_roles.bin": np.dtype("u1"),
    "segment_offsets.bin": np.dtype("<i8"),
    "desirable.bin": np.dtype("u1"),
    SHARED: np.dtype("<i4"),
    WEIGHTS: np.dtype("<f4"),
    MEDIA: np.dtype("u1"),
    MEDIA_OFFSETS: np.dtype("<i8"),
    MEDIA_FILES: np.dtype("u1"),
    MEDIA_FILE_OFFSETS: np.dtype("<i8"),
    TEACHER_IDS: np.dtype("<i4"),
    TEACHER_STARTS: np.dtype("u1"),
    TEACHER_OFFSETS: np.dtype("<i8"),
    SPANS: np.dtype("<i4"),
    SPAN_OFFSETS: np.dtype("<i8"),
    TEACHER_RUNS: np.dtype("<i4"),
    MARGINS: np.dtype("<f4"),
    "records.bin": np.dtype("u1"),
    "record_offsets.bin": np.dtype("<i8"),
}
FINGERPRINTED = (
    "input_ids.bin", "loss_mask.bin", "offsets.bin", "desirable.bin", SHARED, WEIGHTS, MEDIA, MEDIA_OFFSETS, TEACHER_IDS,
    TEACHER_STARTS, TEACHER_OFFSETS, SPANS, SPAN_OFFSETS, MARGINS, "records.bin", "record_offsets.bin",
)  # fmt: skip
"""Arrays that are trained on; rows, roles and places of images are not."""
_ARRAY_KIND = {
    "desirable.bin": UNPAIRED,
    SHARED: SUPERVISED,
    WEIGHTS: SUPERVISED,
    TEACHER_IDS: SUPERVISED,
    TEACHER_STARTS: SUPERVISED,
    TEACHER_OFFSETS: SUPERVISED,
    SPANS: SUPERVISED,
    SPAN_OFFSETS: SUPERVISED,
    TEACHER_RUNS: SUPERVISED,
    MARGINS: PREFERENCE,
    "records.bin": PROMPTS,
    "record_offsets.bin": PROMPTS,
}
_NOT_OF_PROMPTS = ("loss_mask.bin", "segment_starts.bin", "segment_roles.bin", "segment_offsets.bin")


OF_MEDIA = (MEDIA, MEDIA_OFFSETS, MEDIA_FILES, MEDIA_FILE_OFFSETS)
OF_TEACHER = (TEACHER_IDS, TEACHER_STARTS, TEACHER_OFFSETS, SPANS, SPAN_OFFSETS, TEACHER_RUNS)
OPTIONAL = (SHARED, WEIGHTS, *OF_MEDIA, *OF_TEACHER, MARGINS)
"""Arrays that a store has only where its rows give them."""


def arrays_of(kind: str, given: Collection[str] = ()) -> tuple[str, ...]:
    """List the arrays of a store of a kind, with those of `OPTIONAL` that are `given`."""
    without = {*OPTIONAL} - {*given}
    without |= {*_NOT_OF_PROMPTS} if kind == PROMPTS else set()
    return tuple(name for name in DTYPES if _ARRAY_KIND.get(name, kind) == kind and name not in without)


def fingerprint_of(kind: str, sha256: dict[str, str]) -> str:
    """Hash what is trained on: SHA-256 in hex.

    A preference is trained differently than two samples with the same tokens.
    """
    lines = [f"{name}:{sha256[name]}\n" for name in FINGERPRINTED if name in sha256]
    lines += [] if kind in (SUPERVISED, UNPAIRED) else [f"kind:{kind}\n"]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@attrs.frozen
class SourceFile:
    """A file that samples came from; samples are in the order of the sources."""

    # A store may come from elsewhere, and its names are shown.
    name: str = attrs.field(converter=lambda name: printable(str(name)))
    path: str
    samples: int
    group: int = 0
    """Entry of `data_path` that it belongs to; a directory is one entry of several files."""
    weight: float | None = None
    """Weight given to its entry; None where none was."""
    indexed: bool = False
    """Whether a place in it is `train.json[416]` and not `train.jsonl:417`."""
    format: str | None = None
    """Format of its rows; None for prompts, without a row, and in stores that do not say."""
    read: int | None = None
    """Rows read, as the accounting counts them; None in stores that do not say, as for `kept`."""
    kept: int | None = None
    """Rows that became samples."""
    directory: str | None = None
    """Where relative paths of images in its rows begin; known of stores with images alone."""


@attrs.frozen(kw_only=True)
class Manifest:
    """Content of `store.json`."""

    kind: str
    samples: int
    tokens: int
    segments: int
    fingerprint: str
    """SHA-256 of the arrays that are trained on."""
    inputs: str | None
    """SHA-256 of everything the store was made from; None if unknown, and then it is never reused."""
    sha256: dict[str, str]
    """SHA-256 of every file but this one, by name."""
    sizes: dict[str, int]
    """Bytes of every file but this one."""
    sources: list[SourceFile]
    accounting: Accounting
    settings: dict[str, Any] = attrs.field(factory=dict)
    shard: Shard | None = None
    """Part of the rows that it holds; None for all."""

    def dumps(self) -> str:
        """Return the text of `store.json`."""
        fields = {
            "format": FORMAT,
            "version": WITH_TEACHER if SPANS in self.sizes else WITH_MEDIA if MEDIA in self.sizes else VERSION,
            **attrs.asdict(self, recurse=False),
        }
        # Only where there is one, so that earlier versions read all other stores.
        fields |= {"shard": attrs.asdict(shard)} if (shard := fields.pop("shard")) is not None else {}
        fields["sources"] = [_written(source) for source in self.sources]
        fields["accounting"] = self.accounting.as_dict()
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of its arrays."""
        return arrays_of(self.kind, self.sizes)

    def expected(self) -> dict[str, int]:
        """Compute the bytes that each array must have."""
        counts = dict.fromkeys(("input_ids.bin", "loss_mask.bin", WEIGHTS), self.tokens) | {MARGINS: self.samples // 2}
        counts |= {"segment_starts.bin": self.segments, "segment_roles.bin": self.segments}
        counts |= dict.fromkeys((name for name in self.arrays if name.endswith("offsets.bin")), self.samples + 1)
        # No count gives the size of these.
        without = ("records.bin", MEDIA, MEDIA_FILES, TEACHER_IDS, TEACHER_STARTS, SPANS)
        names = [name for name in self.arrays if name not in without]
        return {name: counts.get(name, self.samples) * DTYPES[name].itemsize for name in names}


def _written(source: SourceFile) -> dict[str, Any]:
    """Return a source as JSON, without a field that earlier versions lack and that is None."""
    fields = attrs.asdict(source)
    return fields if source.directory is not None else {name: fields[name] for name in fields if name != "directory"}


def own_files(directory: Path) -> tuple[int, set[str]] | None:
    """Return version and file names of a store in any state and version; None for anything else."""
    try:
        fields = parsed_json((directory / MANIFEST).read_text("utf-8"))
        if fields["format"] != FORMAT:
            return None
        return int(fields["version"]), {MANIFEST, *fields["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds_prompts(directory: Path) -> bool:
    """Tell whether `store.json` claims a store of prompts; opening it checks the rest."""
    try:
        return parsed_json((directory / MANIFEST).read_text("utf-8"))["kind"] == PROMPTS
    except (OSError, ValueError, KeyError, TypeError):
        return False


_NAMED = 5


def _beside(missing: Path) -> str:
    """Name the folders beside one that is missing, or ""."""
    try:
        names = sorted(each.name for each in missing.parent.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return ""
    more = ", ..." if len(names) > _NAMED else ""
    return f" ({missing.parent}/ holds {', '.join(names[:_NAMED])}{more})" if names else ""


def read_manifest(directory: Path) -> Manifest:
    """Read `store.json` of a directory and compare it with the files beside it.

    Raises:
        StoreError: no store, one of another program, an older or newer one, or files whose sizes are not those that were
            written.
    """
    path = directory / MANIFEST
    if not path.is_file():
        if directory.is_file():
            raise StoreError(
                f"{directory} is a file, not a token store: if it holds rows, prepare makes a store of them; open that"
            )
        found = f"it holds no {MANIFEST}" if directory.is_dir() else f"there is no such directory{_beside(directory)}"
        raise StoreError(f"{directory} is not a token store: {found}; prepare makes one")
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}; prepare the store again") from error
    manifest = parse_manifest(text, str(path))
    _check(directory, manifest)
    return manifest


def parse_manifest(text: str, where: str) -> Manifest:
    """Read the text of a `store.json`, which messages name `where`.

    Raises:
        StoreError: it is of another program, of an older or newer version, or damaged.
    """
    try:
        fields = parsed_json(text)
    except ValueError as error:
        raise StoreError(f"{where} cannot be read: {error}; prepare the store again") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise StoreError(f"{where} is not of a {FORMAT}; it belongs to another program")
    if (version := fields.pop("version", None)) not in READABLE:
        raise StoreError(
            f"{where} has format version {version!r}, this forge-data reads {' and '.join(map(str, READABLE))}; prepare it "
            "again"
        )
    try:
        return _manifest(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where} is damaged ({type(error).__name__}: {error}); prepare the store again") from error


def _manifest(fields: dict[str, Any]) -> Manifest:
    fields["accounting"] = Accounting(**fields["accounting"])
    fields["sources"] = [SourceFile(**source) for source in fields["sources"]]
    if "shard" in fields:
        fields["shard"] = Shard(**fields["shard"])
    counts = {name: int(fields[name]) for name in ("samples", "tokens", "segments")}
    manifest = Manifest(**fields | counts)
    if manifest.kind not in KINDS:
        raise ValueError(f"kind {manifest.kind!r} is none of {', '.join(KINDS)}")
    for name in (*manifest.arrays, DROPPED, *([LINT] if manifest.kind != PROMPTS else [])):
        int(manifest.sizes[name])
        str(manifest.sha256[name])
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in {*manifest.sizes, *manifest.sha256}):
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
    accounting = manifest.accounting
    counted = {accounting.samples, sum(source.samples for source in manifest.sources)}
    if counted != {manifest.samples} or (manifest.samples < 1 and manifest.shard is None):
        raise StoreError(f"{directory / MANIFEST} is damaged: {manifest.samples} samples, but {accounting.samples} were kept")
    if manifest.tokens != accounting.tokens_kept:
        raise StoreError(f"{directory / MANIFEST} is damaged: {manifest.tokens} tokens, but {accounting.tokens_kept} were kept")
